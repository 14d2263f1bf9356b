"""Runs agents against engines and scores their trajectories, one group of samples at a time.

controller --- GroupJob ---> RolloutWorker --- requests of one group ---> the engine with the fewest outstanding
           <-- summaries --       |                              samples (another one if that is lost)
              + trajectories      '--- trajectories, prompt ---> Scorer
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from megarl.batch.object_columns import ObjectColumns
from megarl.batch.scored_group import TermReport
from megarl.batch.trajectory import Prompt, Trajectory, count_turns, find_mixed_kv, join_segments
from megarl.config.rollout import AgentConfig
from megarl.errors import LostEngineError, WorkerError
from megarl.rollout.agents.agent import Agent
from megarl.rollout.agents.episode import Episode, RefusedTextError
from megarl.rollout.agents.run_agent import run_agent
from megarl.rollout.agents.single_turn import single_turn
from megarl.rollout.continuing_engine import ContinuingEngine
from megarl.rollout.engine import GenerationEngine, Sampling
from megarl.rollout.engine_pool import EngineLease, EnginePool
from megarl.rollout.environments.calls import EnvironmentFailedError
from megarl.rollout.request_clock import RequestClock
from megarl.rollout.scorer import Scorer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


ENVIRONMENT = "environment"
"""Name under which failures of environments are counted, as those of a reward term."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceAgent:
    """An agent, and how error messages name it."""

    agent: Agent
    path: str
    """Import path of what it runs, for error messages."""
    key: str
    """YAML path of `path`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutWorkerSpec:
    """Settings of a rollout worker."""

    request_timeout_seconds: float
    """Timeout of one episode, including the time its requests are queued in the engine."""
    agent: Agent = single_turn
    agent_path: str = AgentConfig().path
    """Import path of `agent`, for error messages."""
    agent_key: str = "rollout.agent.path"
    """YAML path of `agent_path`."""
    source_agents: Mapping[str, SourceAgent] = field(default_factory=dict)
    """By name of the source, agents of sources that do not use `agent`."""
    refuses_forks: str | None = None
    """Why an episode needs to be one sequence; None: it may have forked segments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupJob:
    """A request for `num_samples` trajectories of one prompt."""

    prompt: Prompt
    group_id: int
    num_samples: int
    sampling: Sampling
    seed: tuple[int, ...] = ()
    """If not empty, each sample's seed is derived from it, the group id and the sample's index."""
    request_id: str
    """Prefix of the samples' ids: `<request_id>-<sample>`; unique among the jobs in flight."""
    has_baseline: bool = False
    """Whether the group ends with one more completion, with temperature 0, that is not trained on."""
    engine: int | None = None
    """Index of the engine to use while it is live; None: the one with the fewest samples of this worker."""
    priority: int = 0
    """An engine that cannot sample all requests begins with those of the groups of the highest priority."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectorySummary:
    """The scalars of one episode, which are all that the controller reads."""

    num_tokens: int
    """Tokens of all segments."""
    prompt_length: int
    """Tokens before the first sampled one of the first segment."""
    response_length: int
    """Number of sampled tokens."""
    reward: float
    rewards: Mapping[str, float]
    """As `Trajectory.rewards`."""
    finish_reason: str
    tokens_by_version: tuple[tuple[int, int], ...]
    """(policy version, number of tokens that it has sampled), ascending; empty if no token was sampled."""
    mixed_by_version: tuple[tuple[int, int], ...] = ()
    """Of these tokens, those after a push within their request (`find_mixed_kv`)."""
    reward_errors: Mapping[str, str] = field(default_factory=dict)
    """As `Trajectory.reward_errors`: if there are any, the trajectory is dropped."""
    segment_tokens: tuple[int, ...] = ()
    """Tokens of each segment; empty: there is one."""
    num_turns: int = 1
    """Number of runs of sampled tokens."""

    @property
    def num_segments(self) -> int:
        """Number of sequences that the episode consists of."""
        return len(self.segment_tokens) or 1

    @property
    def is_dropped(self) -> bool:
        """Whether a reward failed on the trajectory, so that it is not trained on."""
        return bool(self.reward_errors)

    @property
    def min_policy_version(self) -> int:
        """Smallest policy version among the sampled tokens; -1 if none was sampled."""
        return self.tokens_by_version[0][0] if self.tokens_by_version else -1

    @property
    def max_policy_version(self) -> int:
        """Largest policy version among the sampled tokens; -1 if none was sampled."""
        return self.tokens_by_version[-1][0] if self.tokens_by_version else -1


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSummary:
    """The result of a finished job, without its tokens."""

    group_id: int
    prompt_id: str
    trajectories: Sequence[TrajectorySummary]
    """One summary per episode, in the order of the trajectories, of which an episode with forked segments has more.
    They are kept as `ObjectColumns`, which `column` reads."""
    generation_seconds: float
    """Time from the job's start to its last token."""
    scoring_seconds: float
    """Time from the last token to the last reward."""
    terms: Mapping[str, TermReport] = field(default_factory=dict)
    """How each reward term that the worker computes was computed, by name."""
    source: str = ""
    """Name of the prompt's source; empty in a run with one data file."""
    replayed: bool = False
    """Whether the group was read from the journal and not generated."""
    has_baseline: bool = False
    """Whether the last trajectory is the greedy one, which is not trained on."""
    num_retried: int = 0
    """Number of requests that were sent again because their engine was lost; 0 if the group was replayed."""
    num_kept_tokens: int = 0
    """Number of tokens that these requests had sampled and continued from."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "trajectories", ObjectColumns.of(TrajectorySummary, self.trajectories))

    def __reduce__(self) -> tuple[Any, ...]:
        # a step has thousands; what dataclasses do by themselves takes several times as long to unpickle
        return _make_group_summary, tuple([getattr(self, name) for name in _group_summary_fields()])

    def column(self, name: str) -> tuple[Any, ...]:
        """Return a field of the summary of each episode."""
        assert isinstance(self.trajectories, ObjectColumns)
        return self.trajectories.column(name)

    def with_column(self, name: str, values: Sequence[Any]) -> GroupSummary:
        """Return the summary with other values of a field of the episodes."""
        assert isinstance(self.trajectories, ObjectColumns)
        return replace(self, trajectories=self.trajectories.replace(**{name: values}))

    @property
    def kept(self) -> tuple[int, ...]:
        """Indices of the episodes that are trained on: not the dropped ones, nor the greedy one."""
        errors = self.column("reward_errors")[: -1 if self.has_baseline else None]
        return tuple([i for i, error in enumerate(errors) if not error]) if any(errors) else tuple(range(len(errors)))

    @property
    def baseline(self) -> float | None:
        """Reward of the greedy trajectory; None if there is none, or its reward failed."""
        return None if not self.has_baseline or self.trajectories[-1].is_dropped else self.trajectories[-1].reward


@cache
def _group_summary_fields() -> tuple[str, ...]:
    return tuple([each.name for each in fields(GroupSummary)])


def _make_group_summary(*values: Any) -> GroupSummary:
    return GroupSummary(**dict(zip(_group_summary_fields(), values, strict=True)))


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryCounts:
    """Counts of the retries that lost engines have caused."""

    num_retried: int
    """Number of requests that were sent again, to another engine."""
    num_kept_tokens: int = 0
    """Number of tokens that these requests had sampled and continued from."""
    num_stale_replies: int
    """Number of completions that were dropped because no caller was waiting for them any more."""


class RolloutWorker:
    """Generates and scores groups of trajectories, in a process separate from the engines."""

    def __init__(
        self,
        spec: RolloutWorkerSpec,
        engines: Sequence[GenerationEngine | None],
        scorer: Scorer,
        tokenizer: PreTrainedTokenizerBase,
    ) -> None:
        """Create a worker for the given engines.

        Args:
            engines: None for an engine that has not started yet; `replace_engine` adds it later.
            tokenizer: tokenizer of the policy, for agents.
        """
        assert engines, "a worker needs an engine"
        self._spec = spec
        self._pool = EnginePool(engines)
        self._scorer = scorer
        self._tokenizer = tokenizer
        self._clock = RequestClock()

    async def mark_engine_lost(self, index: int, error: LostEngineError) -> None:
        """Stop using an engine; its unfinished requests are retried on another one."""
        self._pool.mark_lost(index, error)

    async def replace_engine(self, index: int, engine: GenerationEngine) -> None:
        """Use `engine` as engine `index`, which was lost or had not started yet."""
        self._pool.replace(index, engine)

    async def update_engines(self, changes: Mapping[int, GenerationEngine | LostEngineError]) -> None:
        """Stop using the engines that were lost, and use those that have started, by their indices."""
        for index, change in changes.items():
            if isinstance(change, LostEngineError):
                await self.mark_engine_lost(index, change)
            else:
                await self.replace_engine(index, change)

    async def pause_clock(self) -> None:
        """Stop the timeouts of requests: the engines are paused for new weights."""
        self._clock.pause()

    async def resume_clock(self) -> None:
        """Let the timeouts continue."""
        self._clock.resume()

    async def retry_counts(self) -> RetryCounts:
        """Return how many requests were retried and how many replies were dropped so far."""
        return RetryCounts(
            num_retried=self._pool.num_retried,
            num_kept_tokens=self._pool.num_kept_tokens,
            num_stale_replies=self._pool.num_stale_replies,
        )

    async def rollout_group(self, job: GroupJob) -> tuple[GroupSummary, Sequence[Trajectory]]:
        """Generate and score `num_samples` trajectories of the job's prompt.

        If an engine is lost, its requests are continued on another one as soon as one is live.

        Raises:
            WorkerError: an episode timed out, or the engine rejected a request.
            AgentError: the agent raised an exception or returned no valid trajectory.
            RewardError: a reward could not be computed.
        """
        start = time.perf_counter()
        num_samples = job.num_samples + job.has_baseline
        lease = EngineLease(self._pool, num_samples, job.engine, group_id=job.group_id, priority=job.priority)
        retried: list[int] = []
        try:
            await lease.engine()  # leased before the first request, so that the next group sees the load
            episodes = await _gather_or_cancel(
                self._run_episode(job, sample, lease, retried) for sample in range(num_samples)
            )
        finally:
            lease.release()
        generated = time.perf_counter()
        episodes, terms = await self._score(episodes, job.prompt)
        if retried:
            terms = {**terms, ENVIRONMENT: TermReport(seconds=0.0, num_retried=len(retried))}
        summary = GroupSummary(
            group_id=job.group_id,
            prompt_id=job.prompt.prompt_id,
            trajectories=tuple(summarize(*segments) for segments in episodes),
            generation_seconds=generated - start,
            scoring_seconds=time.perf_counter() - generated,
            terms=terms,
            has_baseline=job.has_baseline,
            source=job.prompt.source,
            num_retried=lease.num_retried,
            num_kept_tokens=lease.num_kept_tokens,
        )
        return summary, [trajectory for segments in episodes for trajectory in segments]

    async def _score(
        self, episodes: Sequence[list[Trajectory]], prompt: Prompt
    ) -> tuple[list[list[Trajectory]], Mapping[str, TermReport]]:
        """Return the segments of each episode with the rewards of the episode; failed episodes stay as they are."""
        found = list(episodes)
        valid = [n for n, segments in enumerate(episodes) if not segments[0].reward_errors]
        if not valid:
            return found, {}
        scored = await self._scorer.score([join_segments(episodes[n]) for n in valid], prompt)
        for n, result in zip(valid, scored.trajectories, strict=True):
            rewards, reward, errors = result.rewards, result.reward, result.reward_errors
            found[n] = [replace(each, rewards=rewards, reward=reward, reward_errors=errors) for each in episodes[n]]
        return found, scored.terms

    async def shutdown(self) -> None:
        """Close the rewards. The worker must not be used afterwards, and its groups must be cancelled."""
        await self._pool.finish_aborts()
        await self._scorer.close()

    async def _run_episode(
        self, job: GroupJob, sample: int, lease: EngineLease, retried: list[int]
    ) -> list[Trajectory]:
        """Run one agent episode; a request whose engine is lost is continued on another one.

        If its environment fails or a text cannot be used, the episode is repeated once with another seed, and then left
        out of the step.

        Args:
            retried: gets the index of the sample if its environment fails.
        """
        while True:
            try:
                return await self._attempt(job, sample, lease, attempt=int(sample in retried))
            except (EnvironmentFailedError, RefusedTextError) as error:
                if sample in retried:
                    return [_failed_episode(job, f"{error} on {job.prompt.prompt_id}")]
                retried.append(sample)

    async def _attempt(self, job: GroupJob, sample: int, lease: EngineLease, *, attempt: int = 0) -> list[Trajectory]:
        request_id = f"{job.request_id}-{sample}" + (f"-retry{attempt}" if attempt else "")
        sampling = replace(job.sampling, seed=_derive_seed(job, sample, attempt)) if job.seed else job.sampling
        if sample == job.num_samples:
            sampling = replace(sampling, temperature=0.0)
        seconds = self._spec.request_timeout_seconds  # pauses of the engines do not count
        try:
            async with self._clock.timeout(seconds) as timeout:
                engine = ContinuingEngine(lease, timeout)
                episode = Episode(
                    job.prompt,
                    self._tokenizer,
                    engine,
                    sampling,
                    request_id=request_id,
                    group_id=job.group_id,
                    clock=self._clock,
                )
                spec = self._spec
                own = spec.source_agents.get(job.prompt.source)
                return await run_agent(
                    spec.agent if own is None else own.agent,
                    episode,
                    path=spec.agent_path if own is None else own.path,
                    refuses_forks=spec.refuses_forks,
                    key=spec.agent_key if own is None else own.key,
                )
        except TimeoutError as e:
            await episode.abort_unfinished()
            raise WorkerError(
                f"request {request_id} (prompt {job.prompt.prompt_id}) did not finish within {seconds} s "
                f"(rollout.request_timeout_seconds)"
            ) from e


def summarize(*segments: Trajectory) -> TrajectorySummary:
    """Return the scalars of an episode."""
    trajectory = join_segments(segments)
    by_version = _count(trajectory.policy_versions[trajectory.loss_mask])
    mixed_T = find_mixed_kv(trajectory.loss_mask, trajectory.policy_versions)
    return TrajectorySummary(
        num_tokens=trajectory.num_tokens,
        segment_tokens=tuple(segment.num_tokens for segment in segments) if len(segments) > 1 else (),
        num_turns=sum(count_turns(segment.loss_mask) for segment in segments),
        prompt_length=trajectory.prompt_length,
        response_length=int(np.count_nonzero(trajectory.loss_mask)),
        reward=trajectory.reward,
        rewards=trajectory.rewards,
        finish_reason=trajectory.finish_reason,
        tokens_by_version=by_version,
        mixed_by_version=_count(trajectory.policy_versions[mixed_T]) if len(by_version) > 1 else (),
        reward_errors=trajectory.reward_errors,
    )


def _count(versions: NDArray[np.int32]) -> tuple[tuple[int, int], ...]:
    """Return (version, number of its occurrences), ascending."""
    distinct, counts = np.unique(versions, return_counts=True)
    return tuple(zip(distinct.tolist(), counts.tolist(), strict=True))


def _derive_seed(job: GroupJob, sample: int, attempt: int = 0) -> int:
    entropy = (*job.seed, job.group_id, sample, *([attempt] if attempt else []))
    return int(np.random.SeedSequence(entropy).generate_state(1)[0]) & 0x7FFFFFFF


def _failed_episode(job: GroupJob, error: str) -> Trajectory:
    """Return the prompt alone, as a trajectory that is left out of the step."""
    count = len(job.prompt.token_ids)
    return Trajectory(
        prompt_id=job.prompt.prompt_id,
        group_id=job.group_id,
        token_ids=np.array(job.prompt.token_ids, np.int32),
        loss_mask=np.zeros(count, np.bool_),
        logprobs=np.zeros(count, np.float32),
        policy_versions=np.full(count, -1, np.int32),
        reward_errors={ENVIRONMENT: error},
        finish_reason="failed",
    )


async def _gather_or_cancel[T](work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Return the results in order; the first failure cancels the others and is raised."""
    tasks = [asyncio.ensure_future(w) for w in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
