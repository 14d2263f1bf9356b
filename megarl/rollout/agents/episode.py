"""One episode as its agent sees it: the prompt, the tokens so far, and the engine that continues them."""

from __future__ import annotations

import asyncio
import contextlib
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from megarl.batch.trajectory import Prompt, Routes, Trajectory, count_turns, fit_routes, join_routes
from megarl.data.tokenizer import describe_unknown_token, read_vocab_size
from megarl.engines.engine import CompletionEngine, Generation, GenerationRequest, Sampling
from megarl.engines.engine_pool import ABORT_GRACE_SECONDS
from megarl.engines.request_clock import RequestClock, TimeLimit
from megarl.errors import AgentError, WorkerError
from megarl.text import replace_surrogates

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class RefusedTextError(AgentError):
    """A text of the policy or of an environment that the chat template fails on, or that has tokens of no model.

    Its episode is repeated once and then left out of the step.

    Examples:
            if "<|im_end|>" in observation:
                raise agents.RefusedTextError("the tool has written a special token")
    """


@dataclass(frozen=True, slots=True)
class _Segment:
    """Consecutive tokens that were either all sampled or all given; arrays [K]."""

    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    policy_versions: NDArray[np.int32]
    sampled: bool


class Episode:
    """Collects the tokens of one episode: the prompt, then sampled tokens and observations in any order.

        first = await episode.generate()  # continues the prompt; these tokens are trained on
        episode.observe(run_tool(episode.decode(first.token_ids)))  # the policy sees these; never trained on
        await episode.generate()  # continues all tokens so far
        return episode.trajectory()

    What follows the prompt has at most `rollout.max_new_tokens` tokens, observations included: a longer observation is
    truncated, and without remaining tokens `generate` returns an empty completion that ended by `length`. Once the time
    limit is reached, the completion in progress ends with the tokens so far, and later ones are empty; they end by
    `seconds`. An agent that then does not return is cancelled, and the tokens so far are its trajectory.

    An agent that continues with other tokens than those so far, such as a shortened history, calls `fork` with them:

        episode.fork(shorter_prompt)  # these are never trained on
        await episode.generate()
        return episode.trajectories()  # one for each fork, and the first
    """

    def __init__(
        self,
        prompt: Prompt,
        tokenizer: PreTrainedTokenizerBase,
        engine: CompletionEngine,
        sampling: Sampling,
        *,
        request_id: str,
        group_id: int,
        clock: RequestClock | None = None,
        limit: TimeLimit | None = None,
    ) -> None:
        """Start an episode with the prompt's tokens.

        Args:
            sampling: its `max_new_tokens` limits the whole episode; its seed is that of the first request.
            request_id: id of the first request; those of later ones begin with it.
            clock: clock that stops while engines are paused; None: one that never stops.
            limit: time limit, which ends requests of the engine; None: none.
        """
        self.prompt = prompt
        """The row's prompt: text, token ids, and `answer` if the row has one."""
        self.tokenizer = tokenizer
        """Tokenizer of the policy."""
        self.finish_reason = "stop"
        """How the last call of `generate` ended; becomes that of the trajectory unless the agent sets it."""
        self.unfinished_requests: set[str] = set()
        """Ids of the requests that the engine has not answered."""
        self._engine, self._sampling = engine, sampling
        self._request_id, self.group_id = request_id, group_id
        self.clock = clock or RequestClock()
        """Clock of the episode's time limits: it stops while the engines are paused for new weights."""
        self._limit = limit
        self.ends_by_itself = False
        """Whether the agent ends the episode after its time limit; otherwise it is cancelled after a grace period."""
        self._num_requests = 0
        self._segments = [_given(prompt.token_ids)]
        self._routes: Routes | None = None
        """Of the first tokens of this sequence; None: of none."""
        self._finished: list[Trajectory] = []
        """The sequences before the last fork."""
        self._turn_rewards: list[float] = []

    @property
    def limit_reached(self) -> asyncio.Future[None]:
        """Done once the time limit is reached: `generate` and `complete` then return empty completions at once."""
        return asyncio.get_running_loop().create_future() if self._limit is None else self._limit.reached

    def end_by_itself(self) -> None:
        """Keep to time limits of the agent's own, and end soon after `limit_reached`: the agent is not cancelled."""
        self.ends_by_itself = True
        if self._limit is not None:
            self._limit.stop()

    @property
    def row(self) -> Mapping[str, Any]:
        """The prompt's row of the data file."""
        return self.prompt.row

    @property
    def seed(self) -> int:
        """A seed for random numbers of the episode: that of its samples; of a greedy one, determined by its prompt."""
        return zlib.crc32(self.prompt.prompt_id.encode()) if self._sampling.seed is None else self._sampling.seed

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All tokens of this sequence so far: its prompt, and what was sampled and observed."""
        return tuple(np.concatenate([segment.token_ids for segment in self._segments]).tolist())

    @property
    def max_num_tokens(self) -> int:
        """Maximum number of tokens of a sequence, the prompt's included."""
        return len(self.prompt.token_ids) + self._sampling.max_new_tokens

    @property
    def num_remaining_tokens(self) -> int:
        """How many tokens may still be sampled or observed; less than 0 after a fork to too many tokens."""
        in_sequence = self.max_num_tokens - sum(len(segment.token_ids) for segment in self._segments)
        if not self._finished:
            return in_sequence
        earlier = sum(int(sequence.loss_mask.sum()) for sequence in self._finished)
        sampled = earlier + sum(len(segment.token_ids) for segment in self._segments if segment.sampled)
        return min(in_sequence, self._sampling.max_new_tokens - sampled)

    def decode(self, token_ids: Sequence[int] | NDArray[np.int32]) -> str:
        """Return the text of the tokens, without special tokens."""
        text = self.tokenizer.decode(
            np.asarray(token_ids, np.int32), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        assert isinstance(text, str)
        return text

    async def generate(self, *, max_new_tokens: int | None = None) -> Generation:
        """Sample a continuation of all tokens so far, append it, and return it. One call at a time.

        Args:
            max_new_tokens: limit of this continuation; at most `num_remaining_tokens`, the default.

        Raises:
            EngineFailedError: the engine refused the request or makes no progress, also not a second one. The episode
                then fails, whatever the agent does.
        """
        limit = self.num_remaining_tokens if max_new_tokens is None else min(max_new_tokens, self.num_remaining_tokens)
        if limit > 0:
            known = 0 if self._routes is None else len(self._routes)
            generation = await self.complete(self.token_ids, max_new_tokens=limit, are_known=True, num_routed=known)
            self._routes = join_routes(self._routes, generation.routes)
        else:
            await asyncio.sleep(0)  # an agent that asks again and again lets others run
            generation = _empty_completion()
        self._segments.append(
            _Segment(generation.token_ids, generation.logprobs, generation.policy_versions, sampled=True)
        )
        self.finish_reason = generation.finish_reason
        return generation

    async def complete(
        self, token_ids: Sequence[int], *, max_new_tokens: int, are_known: bool = False, num_routed: int = 0
    ) -> Generation:
        """Sample a completion of any tokens that does not become part of the trajectory.

        Args:
            are_known: whether the tokens have been compared with the model's vocabulary.
            num_routed: number of tokens whose routes are known, which the completion then leaves out.

        Raises:
            RefusedTextError: the model does not have one of the tokens.
            EngineFailedError: as `generate`.
        """
        if not are_known:
            self._require_known(token_ids)
        number, seed = self._num_requests, self._sampling.seed
        self._num_requests += 1
        request_id = f"{self._request_id}.{number}" if number else self._request_id
        if number and seed is not None:
            seed = int(np.random.SeedSequence((seed, number)).generate_state(1)[0]) & 0x7FFFFFFF
        sampling = replace(self._sampling, max_new_tokens=max_new_tokens, seed=seed)
        self.unfinished_requests.add(request_id)
        try:
            generation = await self._engine.generate(
                GenerationRequest(
                    request_id=request_id, token_ids=tuple(token_ids), sampling=sampling, num_routed=num_routed
                )
            )
        except WorkerError:  # the engine may still sample one that is cancelled
            self.unfinished_requests.discard(request_id)
            raise
        self.unfinished_requests.discard(request_id)
        return generation

    async def abort_unfinished(self) -> None:
        """Abort the requests that the engine has not answered; the coroutines that sent them must be cancelled.

        An engine that does not reply is left alone: the episode does not need it any more.
        """
        request_ids, self.unfinished_requests = self.unfinished_requests, set()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ABORT_GRACE_SECONDS):
                for request_id in sorted(request_ids):
                    with contextlib.suppress(WorkerError):
                        await self._engine.abort(request_id)

    def observe(self, observation: str | Sequence[int]) -> None:
        """Append tokens that the policy sees and is not trained on, such as a tool's output.

        Args:
            observation: text, in which the names of special tokens are plain text; or token ids, which may be special.

        Raises:
            RefusedTextError: the model does not have one of the tokens.
        """
        token_ids: Sequence[int] = (
            self.tokenizer.encode(replace_surrogates(observation), add_special_tokens=False, split_special_tokens=True)
            if isinstance(observation, str)
            else observation
        )
        self._require_known(token_ids)
        self._segments.append(_given(token_ids[: max(0, self.num_remaining_tokens)]))

    def fork(self, token_ids: Sequence[int]) -> None:
        """Begin another sequence with these tokens as its prompt; a no-op if they are the tokens so far.

        The tokens sampled before stay in their own sequence, where each is trained on once. All sequences of an episode
        share its reward, and have at most `rollout.max_new_tokens` sampled tokens together.

        Args:
            token_ids: the policy sees them and is not trained on them.

        Raises:
            RefusedTextError: the model does not have one of the tokens.
        """
        self._require_known(token_ids)
        if tuple(token_ids) == self.token_ids:
            return
        if any(segment.sampled and len(segment.token_ids) for segment in self._segments):
            self._finished.append(self.trajectory())
        self._segments, self._turn_rewards, self._routes = [_given(token_ids)], [], None

    def _require_known(self, token_ids: Sequence[int]) -> None:
        unknown = describe_unknown_token(self.tokenizer, token_ids, read_vocab_size(self.tokenizer))
        if unknown is not None:
            raise RefusedTextError(f"the episode of {self.prompt.prompt_id} cannot continue: {unknown}")

    def add_turn_reward(self, reward: float) -> None:
        """Add the environment's reward of the last run of sampled tokens."""
        sampled = np.concatenate([np.full(len(s.token_ids), s.sampled) for s in self._segments])
        self._turn_rewards += [0.0] * (count_turns(sampled) - len(self._turn_rewards))
        self._turn_rewards[-1] += reward

    def trajectories(self) -> list[Trajectory]:
        """Return all sequences of the episode, the last of which is `trajectory()`."""
        reason = self.finish_reason
        return [*(replace(sequence, finish_reason=reason) for sequence in self._finished), self.trajectory()]

    def trajectory(self) -> Trajectory:
        """Return the tokens so far as a trajectory; `loss_mask` is True for those that `generate` has appended.

        After a fork these are the tokens of the last sequence: return `trajectories()` then.
        """
        loss_mask = np.concatenate([np.full(len(s.token_ids), s.sampled) for s in self._segments])
        missing = count_turns(loss_mask) - len(self._turn_rewards)
        return Trajectory(
            routes=fit_routes(self._routes, len(loss_mask)),
            prompt_id=self.prompt.prompt_id,
            group_id=self.group_id,
            token_ids=np.concatenate([segment.token_ids for segment in self._segments]),
            loss_mask=loss_mask,
            logprobs=np.concatenate([segment.logprobs for segment in self._segments]),
            policy_versions=np.concatenate([segment.policy_versions for segment in self._segments]),
            finish_reason=self.finish_reason,
            segment=len(self._finished),
            turn_rewards=(*self._turn_rewards, *[0.0] * missing) if self._turn_rewards else (),
        )


def _given(token_ids: Sequence[int]) -> _Segment:
    count = len(token_ids)
    return _Segment(
        np.array(token_ids, np.int32), np.zeros(count, np.float32), np.full(count, -1, np.int32), sampled=False
    )


def _empty_completion() -> Generation:
    return Generation(
        token_ids=np.zeros(0, np.int32),
        logprobs=np.zeros(0, np.float32),
        policy_versions=np.zeros(0, np.int32),
        finish_reason="length",
    )
