"""Runs agents against engines and has their trajectories scored, a group of samples at a time.

controller --- GroupJob ---> RolloutWorker --- requests of one group ---> the engine with the fewest outstanding
           <-- summaries --       |                              (another one, should it be lost)
              + trajectories      '--- trajectory, prompt ---> Scorer
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np

from megarl.batch.trajectory import Prompt, Trajectory
from megarl.errors import LostEngineError, WorkerError
from megarl.rollout.agents.agent import Agent
from megarl.rollout.agents.single_turn import single_turn
from megarl.rollout.batching_engine import CoalescingEngine
from megarl.rollout.engine import GenerationEngine, Sampling
from megarl.rollout.engine_pool import Fleet, GroupBerth
from megarl.rollout.scorer import Scorer

T = TypeVar("T")

ABORT_GRACE_SECONDS = 10.0
"""How long an engine may take to end a request that has timed out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutWorkerSpec:
    """How a worker runs its jobs."""

    request_timeout_seconds: float
    """For one trajectory's generation, waiting for the engine included."""
    agent: Agent = single_turn


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupJob:
    """Samples of one prompt."""

    prompt: Prompt
    group_id: int
    num_samples: int
    sampling: Sampling
    seed: tuple[int, ...] = ()
    """Where not empty, every sample's randomness follows from it, the group and the sample."""
    request_id: str
    """Prefix of the samples' ids: `<request_id>-<sample>`; unique among the jobs in flight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectorySummary:
    """The scalars of one trajectory: all that the controller reads."""

    num_tokens: int
    prompt_length: int
    response_length: int
    """Sampled tokens."""
    reward: float
    rewards: Mapping[str, float]
    finish_reason: str
    min_policy_version: int
    """Of the sampled tokens; -1 where none was sampled."""
    max_policy_version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSummary:
    """A finished job without its tokens."""

    group_id: int
    prompt_id: str
    trajectories: tuple[TrajectorySummary, ...]
    """In the order of the trajectories."""
    generation_seconds: float
    """From the job's start to its last token."""
    scoring_seconds: float
    """From then to the last reward."""
    replayed: bool = False
    """It was finished before, and written down."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reassignments:
    """What lost engines have caused."""

    num_samples: int
    """Begun anew on another engine."""
    late_answers: int
    """Dropped: nobody waited for them any more."""


class RolloutWorker:
    """Lives in a process of its own, beside the engines."""

    def __init__(self, spec: RolloutWorkerSpec, engines: Sequence[GenerationEngine | None], scorer: Scorer) -> None:
        """Args:
        engines: None: it is not there yet; `replace_engine` brings it.
        """
        assert engines, "a worker needs an engine"
        self._spec = spec
        self._fleet = Fleet(engines)
        self._scorer = scorer

    async def lose_engine(self, index: int, error: LostEngineError) -> None:
        """Give an engine up: what it has not answered, another one is asked; see `Fleet`."""
        self._fleet.lose(index, error)

    async def replace_engine(self, index: int, engine: GenerationEngine) -> None:
        """Have `engine` in the place of one that was lost, or that was not there yet."""
        self._fleet.replace(index, engine)

    async def reassignments(self) -> Reassignments:
        """What lost engines have caused so far."""
        return Reassignments(num_samples=self._fleet.reassigned, late_answers=self._fleet.late_answers)

    async def rollout_group(self, job: GroupJob) -> tuple[GroupSummary, list[Trajectory]]:
        """`num_samples` scored trajectories of the job's prompt.

        Raises:
            WorkerError: a request timed out, or its engine refused it. One that is lost is no error: another one is
                asked, as soon as there is one.
            RewardError: a reward could not be computed.
        """
        start = time.perf_counter()
        berth = GroupBerth(self._fleet, job.num_samples)
        try:
            await berth.engine()  # now, so that the next group finds it busy
            trajectories = await _all(self._episode(job, sample, berth) for sample in range(job.num_samples))
        finally:
            berth.leave()
        generated = time.perf_counter()
        trajectories = await _all(self._scored(trajectory, job.prompt) for trajectory in trajectories)
        summary = GroupSummary(
            group_id=job.group_id,
            prompt_id=job.prompt.prompt_id,
            trajectories=tuple(summarize(trajectory) for trajectory in trajectories),
            generation_seconds=generated - start,
            scoring_seconds=time.perf_counter() - generated,
        )
        return summary, trajectories

    async def _episode(self, job: GroupJob, sample: int, berth: GroupBerth) -> Trajectory:
        """Of the first engine that lives to the end of it: agents keep nothing from one attempt to the next."""
        while True:
            engine = await berth.engine()
            try:
                return await self._attempt(job, sample, engine)
            except LostEngineError as error:
                engine.lose(error)
                self._fleet.reassigned += 1

    async def _attempt(self, job: GroupJob, sample: int, engine: CoalescingEngine) -> Trajectory:
        request_id = f"{job.request_id}-{sample}"
        sampling = replace(job.sampling, seed=_sample_seed(job, sample)) if job.seed else job.sampling
        seconds = self._spec.request_timeout_seconds
        try:
            async with asyncio.timeout(seconds):
                return await self._spec.agent(
                    job.prompt, engine, sampling, request_id=request_id, group_id=job.group_id
                )
        except TimeoutError as e:
            await _abort(engine, request_id)
            raise WorkerError(
                f"request {request_id} (prompt {job.prompt.prompt_id}) was not done after {seconds} s "
                f"(rollout.request_timeout_seconds)"
            ) from e

    async def _scored(self, trajectory: Trajectory, prompt: Prompt) -> Trajectory:
        rewards, reward = await self._scorer.score(trajectory, prompt)
        return replace(trajectory, rewards=rewards, reward=reward)


def summarize(trajectory: Trajectory) -> TrajectorySummary:
    """The trajectory's scalars."""
    versions = trajectory.policy_versions[trajectory.loss_mask]
    return TrajectorySummary(
        num_tokens=trajectory.num_tokens,
        prompt_length=trajectory.prompt_length,
        response_length=int(np.count_nonzero(trajectory.loss_mask)),
        reward=trajectory.reward,
        rewards=trajectory.rewards,
        finish_reason=trajectory.finish_reason,
        min_policy_version=int(versions.min()) if len(versions) else -1,
        max_policy_version=int(versions.max()) if len(versions) else -1,
    )


def _sample_seed(job: GroupJob, sample: int) -> int:
    return int(np.random.SeedSequence((*job.seed, job.group_id, sample)).generate_state(1)[0]) & 0x7FFFFFFF


async def _all(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """The results in order; the first failure cancels the rest and is raised."""
    tasks = [asyncio.ensure_future(w) for w in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _abort(engine: GenerationEngine, request_id: str) -> None:
    """Try to free the engine of a request; an engine that does not answer is reported by the caller's error."""
    with contextlib.suppress(TimeoutError, WorkerError):
        async with asyncio.timeout(ABORT_GRACE_SECONDS):
            await engine.abort(request_id)
