"""Runs agents against engines and has their trajectories scored, a group of samples at a time.

controller --- GroupJob ---> RolloutWorker --- requests of one group ---> the engine with the fewest outstanding
           <-- summaries --       |
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
from megarl.errors import WorkerError
from megarl.rollout.agents.agent import Agent
from megarl.rollout.agents.single_turn import single_turn
from megarl.rollout.coalesce import CoalescingEngine
from megarl.rollout.engine import GenerationEngine, Sampling
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


class RolloutWorker:
    """Lives in a process of its own, beside the engines."""

    def __init__(self, spec: RolloutWorkerSpec, engines: Sequence[GenerationEngine], scorer: Scorer) -> None:
        assert engines, "a worker needs an engine"
        self._spec = spec
        self._engines = [CoalescingEngine(engine) for engine in engines]
        self._outstanding = [0] * len(engines)
        """Samples that each engine is working on for this worker."""
        self._scorer = scorer

    async def rollout_group(self, job: GroupJob) -> tuple[GroupSummary, list[Trajectory]]:
        """`num_samples` scored trajectories of the job's prompt.

        Raises:
            WorkerError: a request timed out, or its engine failed.
            RewardError: a reward could not be computed.
        """
        start = time.perf_counter()
        # one engine for the group: the prompt's keys and values are computed once
        index = min(range(len(self._engines)), key=self._outstanding.__getitem__)
        self._outstanding[index] += job.num_samples
        try:
            trajectories = await _all(self._episode(job, sample, index) for sample in range(job.num_samples))
        finally:
            self._outstanding[index] -= job.num_samples
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

    async def _episode(self, job: GroupJob, sample: int, index: int) -> Trajectory:
        request_id, engine = f"{job.request_id}-{sample}", self._engines[index]
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
