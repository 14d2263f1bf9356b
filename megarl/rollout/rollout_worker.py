"""Runs agents against engines and scores their trajectories, one group of samples at a time.

controller --- GroupJob ---> RolloutWorker --- requests of one group ---> the engine with the fewest outstanding
           <-- summaries --       |                              samples (another one if that is lost)
              + trajectories      '--- trajectories, prompt ---> Scorer
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from megarl.batch.packed_trajectories import ObjectColumns, field_positions, with_values
from megarl.batch.trajectory import (
    TIME_LIMIT,
    TRUNCATED_REASONS,
    Prompt,
    TermReport,
    Trajectory,
    count_turns,
    find_mixed_kv,
    join_segments,
)
from megarl.config.rollout import AgentConfig, RolloutConfig
from megarl.engines.engine import GenerationEngine, Sampling
from megarl.engines.engine_pool import EngineFailedError, EngineLease, EnginePool, EpisodeEngine
from megarl.engines.request_clock import RequestClock, TimeLimit
from megarl.errors import LostEngineError, MegarlError, StalledEngineError
from megarl.rollout.agents.agent import Agent, run_agent
from megarl.rollout.agents.episode import Episode, RefusedTextError
from megarl.rollout.agents.single_turn import single_turn
from megarl.rollout.environments.conversation import EnvironmentFailedError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase
from typing import Protocol

from megarl.batch.trajectory import ScoredGroup


class Scorer(Protocol):
    """Computes the rewards of finished trajectories."""

    async def score(self, trajectories: Sequence[Trajectory], prompt: Prompt) -> ScoredGroup:
        """Return the trajectories, which are all completions of `prompt`, with their rewards.

        Raises:
            RewardError: a reward could not be computed, and its configuration does not allow to drop the completion.
        """
        ...

    async def close(self) -> None:
        """Release what the rewards hold, such as connections."""
        ...


ENVIRONMENT = "environment"
"""Name under which failures of environments are counted, as those of a reward term."""

ENGINE = "engine"
"""Name under which samples are counted whose engine made no progress, or refused a request."""


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
    """Time limit of one episode from its first token, after which it is truncated."""
    no_progress_seconds: float = RolloutConfig().no_progress_seconds
    """Longest time in which an engine that owes completions shows no progress."""
    agent: Agent = single_turn
    agent_path: str = AgentConfig().path
    """Import path of `agent`, for error messages."""
    agent_key: str = "rollout.agent.path"
    """YAML path of `agent_path`."""
    source_agents: Mapping[str, SourceAgent] = field(default_factory=dict)
    """By name of the source, agents of sources that do not use `agent`."""
    refuses_forks: str | None = None
    """Why an episode needs to be one sequence; None: it may have forked segments."""


@dataclass(frozen=True, kw_only=True)  # without slots: pickled in C
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
    num_resent: int = 0
    """Number of workers that were sent the job before and were lost; one of them may still be working on it."""

    @property
    def num_episodes(self) -> int:
        """Number of completions to sample, the greedy one included."""
        return self.num_samples + self.has_baseline


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
    """As `Trajectory.reward`."""
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


@dataclass(frozen=True, kw_only=True)  # without slots: pickled in C
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

    def column(self, name: str) -> tuple[Any, ...]:
        """Return a field of the summary of each episode."""
        assert isinstance(self.trajectories, ObjectColumns)
        return self.trajectories.column(name)

    @property
    def columns(self) -> tuple[tuple[Any, ...], ...]:
        """All fields of the summaries, in the order of `SUMMARY_POSITIONS`, of each episode."""
        assert isinstance(self.trajectories, ObjectColumns)
        return self.trajectories.columns()

    def with_columns(self, **columns: Sequence[Any]) -> GroupSummary:
        """Return the summary with other values of some fields of the episodes."""
        assert isinstance(self.trajectories, ObjectColumns)
        return with_values(self, trajectories=self.trajectories.replace(**columns))

    @property
    def kept(self) -> tuple[int, ...]:
        """Indices of the episodes that are trained on: not the dropped ones, nor the greedy one."""
        errors = self.column("reward_errors")[: -1 if self.has_baseline else None]
        return tuple([i for i, error in enumerate(errors) if not error]) if any(errors) else tuple(range(len(errors)))

    @property
    def baseline(self) -> float | None:
        """Reward of the greedy trajectory; None if there is none, or its reward failed."""
        return None if not self.has_baseline or self.trajectories[-1].is_dropped else self.trajectories[-1].reward


SUMMARY_POSITIONS: Mapping[str, int] = field_positions(TrajectorySummary)
"""Index of each field of a summary."""


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
            engines: None for an engine that has not started yet; `update_engines` adds it later.
            tokenizer: tokenizer of the policy, for agents.
        """
        assert engines, "a worker needs an engine"
        self._spec = spec
        self._clock = RequestClock()
        self.pool = EnginePool(engines, self._clock, no_progress_seconds=spec.no_progress_seconds)
        """The engines, with the load that this worker puts on each."""
        self._scorer = scorer
        self._tokenizer = tokenizer

    async def update_engines(self, changes: Mapping[int, GenerationEngine | LostEngineError]) -> None:
        """Stop using the engines that were lost, whose requests are retried on others, and use those that have started.

        Args:
            changes: by index of the engine, why it was lost, or its new handle.
        """
        for index, change in changes.items():
            if isinstance(change, LostEngineError):
                self.pool.mark_lost(index, change)
            else:
                self.pool.replace(index, change)

    async def pause_clock(self) -> None:
        """Stop the time limits: the engines are paused for new weights."""
        self._clock.pause()

    async def resume_clock(self) -> None:
        """Let the time limits continue."""
        self._clock.resume()

    async def rollout_group(self, job: GroupJob) -> tuple[GroupSummary, Sequence[Trajectory]]:
        """Generate and score `num_samples` trajectories of the job's prompt.

        If an engine is lost, its requests are continued on another one as soon as one is live.

        Raises:
            WorkerError: a call to an engine failed, with all requests that it sent.
            AgentError: the agent raised an exception or returned no valid trajectory.
            RewardError: a reward could not be computed.
        """
        start = time.perf_counter()
        lease = EngineLease(self.pool, job.num_episodes, job.engine, group_id=job.group_id, priority=job.priority)
        retried = Counter[str]()
        try:
            await lease.engine()  # leased before the first request, so that the next group sees the load
            episodes = await _gather_or_cancel(
                self._run_episode(job, sample, lease, retried) for sample in range(job.num_episodes)
            )
        finally:
            lease.release()
        generated = time.perf_counter()
        episodes, terms = await self._score(episodes, job.prompt)
        terms = {**terms, **{name: TermReport(seconds=0.0, num_retried=num) for name, num in retried.items()}}
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
            rewards, errors = result.rewards, result.reward_errors
            found[n] = [replace(each, rewards=rewards, reward_errors=errors) for each in episodes[n]]
        return found, scored.terms

    async def shutdown(self) -> None:
        """Close the rewards. The worker must not be used afterwards, and its groups must be cancelled."""
        await self.pool.finish_aborts()
        await self._scorer.close()

    async def _run_episode(
        self, job: GroupJob, sample: int, lease: EngineLease, retried: Counter[str]
    ) -> list[Trajectory]:
        """Run one agent episode; a request whose engine is lost is continued on another one.

        If its environment fails, a text cannot be used, or the engine refuses a request, the episode is repeated once
        with another seed, and then left out of the step. If its engine makes no progress, its requests are continued
        once on another one.

        Args:
            retried: counts the episode by the name of what has failed.
        """
        stalls: list[StalledEngineError] = []
        attempt = 0
        while True:
            try:
                segments = await self._attempt(job, sample, lease, stalls, attempt=attempt)
            except (EnvironmentFailedError, RefusedTextError, EngineFailedError) as error:
                name = ENGINE if isinstance(error, EngineFailedError) else ENVIRONMENT
                if attempt == 0 and len(stalls) < 2:
                    attempt = 1
                    retried[name] += 1
                    continue
                segments = [_failed_episode(job, name, f"{error} on {job.prompt.prompt_id}")]
            if stalls:
                retried[ENGINE] += 1
            return segments

    async def _attempt(
        self, job: GroupJob, sample: int, lease: EngineLease, stalls: list[StalledEngineError], *, attempt: int
    ) -> list[Trajectory]:
        request_id = f"{job.request_id}-{sample}" + (f"-retry{attempt}" if attempt else "")
        sampling = replace(job.sampling, seed=_derive_seed(job, sample, attempt)) if job.seed else job.sampling
        if sample == job.num_samples:
            sampling = replace(sampling, temperature=0.0)
        spec = self._spec
        limit = TimeLimit(self._clock, spec.request_timeout_seconds)
        engine = EpisodeEngine(lease, limit, stalls)
        episode = Episode(
            job.prompt,
            self._tokenizer,
            engine,
            sampling,
            request_id=request_id,
            group_id=job.group_id,
            clock=self._clock,
            limit=limit,
        )
        own = spec.source_agents.get(job.prompt.source)
        limit.start(max(spec.request_timeout_seconds, spec.no_progress_seconds))  # for an agent that asks for nothing
        try:
            segments = await run_agent(
                spec.agent if own is None else own.agent,
                episode,
                path=spec.agent_path if own is None else own.path,
                refuses_forks=spec.refuses_forks,
                key=spec.agent_key if own is None else own.key,
            )
        except MegarlError:
            if engine.error is None:
                raise
        finally:
            limit.stop()
        if engine.error is not None:  # which the agent may have caught
            raise engine.error
        if engine.has_cut:
            ended_by_limit = segments[-1].finish_reason in TRUNCATED_REASONS
            return segments if ended_by_limit else [replace(each, finish_reason=TIME_LIMIT) for each in segments]
        return segments


def summarize(*segments: Trajectory) -> TrajectorySummary:
    """Return the scalars of an episode."""
    trajectory = join_segments(segments)
    loss_mask_T, versions_T = trajectory.loss_mask, trajectory.policy_versions
    by_version = _count(versions_T[loss_mask_T])
    return TrajectorySummary(
        num_tokens=trajectory.num_tokens,
        segment_tokens=tuple(segment.num_tokens for segment in segments) if len(segments) > 1 else (),
        num_turns=sum(count_turns(segment.loss_mask) for segment in segments),
        prompt_length=trajectory.prompt_length,
        response_length=int(np.count_nonzero(loss_mask_T)),
        reward=trajectory.reward,
        rewards=trajectory.rewards,
        finish_reason=trajectory.finish_reason,
        tokens_by_version=by_version,
        mixed_by_version=(_count(versions_T[find_mixed_kv(loss_mask_T, versions_T)]) if len(by_version) > 1 else ()),
        reward_errors=trajectory.reward_errors,
    )


def _count(versions: NDArray[np.int32]) -> tuple[tuple[int, int], ...]:
    """Return (version, number of its occurrences), ascending."""
    if len(versions) and versions.min() == versions.max():  # nearly always, and np.unique takes five times as long
        return ((int(versions[0]), len(versions)),)
    distinct, counts = np.unique(versions, return_counts=True)
    return tuple(zip(distinct.tolist(), counts.tolist(), strict=True))


def _derive_seed(job: GroupJob, sample: int, attempt: int = 0) -> int:
    entropy = (*job.seed, job.group_id, sample, *([attempt] if attempt else []))
    return int(np.random.SeedSequence(entropy).generate_state(1)[0]) & 0x7FFFFFFF


def _failed_episode(job: GroupJob, name: str, error: str) -> Trajectory:
    """Return the prompt alone, as a trajectory that is left out of the step."""
    count = len(job.prompt.token_ids)
    return Trajectory(
        prompt_id=job.prompt.prompt_id,
        group_id=job.group_id,
        token_ids=np.array(job.prompt.token_ids, np.int32),
        loss_mask=np.zeros(count, np.bool_),
        logprobs=np.zeros(count, np.float32),
        policy_versions=np.full(count, -1, np.int32),
        reward_errors={name: error},
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
