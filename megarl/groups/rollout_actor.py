"""A rollout worker with everything it needs in its own process."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from megarl.batch.trajectory import Trajectory
from megarl.config import RunConfig
from megarl.data.tokenizer import load_tokenizer
from megarl.groups.estimation import EstimateJob, estimate
from megarl.reward.reward_scorer import RewardScorer
from megarl.rollout.engine import GenerationEngine
from megarl.rollout.journal.journal import Journal, fingerprint_of, step_of
from megarl.rollout.journal.replay import Replay
from megarl.rollout.rollout_worker import GroupJob, GroupSummary, RolloutWorker, RolloutWorkerSpec
from megarl.tracking.rollout_log import write_rollouts


@dataclass(frozen=True, slots=True)
class Rewards:
    """Of one trajectory."""

    total: float
    terms: Mapping[str, float]


class RolloutProcess(RolloutWorker):
    """Runs agents, scores trajectories, writes them down, and computes what needs no model."""

    def __init__(self, config: RunConfig, engines: Sequence[GenerationEngine]) -> None:
        spec = RolloutWorkerSpec(request_timeout_seconds=config.rollout.request_timeout_seconds)
        super().__init__(spec, engines, RewardScorer.from_model(config.reward, config.model.path))
        tokenizer = load_tokenizer(config.model.path)
        self._decode = partial(tokenizer.decode, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        self._folder = Path(config.run_dir) / "rollouts"
        self._replay = Replay(Journal(config.run_dir, fingerprint_of(config)))

    async def rollout_group(self, job: GroupJob) -> tuple[GroupSummary, list[Trajectory]]:
        """As journaled, where the job has finished before, in whichever process; else generated, and then journaled.

        Raises:
            WorkerError: as `RolloutWorker`, or the journal cannot be used.
            RewardError: a reward could not be computed.
        """
        step = step_of(job.request_id)
        if step is None:
            return await super().rollout_group(job)
        group = await self._replay.find(step, job)
        if group is not None:
            return replace(group.summary, replayed=True), group.trajectories
        group = await self._replay.keep(step, job, *await super().rollout_group(job))
        return group.summary, group.trajectories

    async def record(
        self, step: int, rewards: Sequence[Rewards], advantages: Sequence[float], *groups: Sequence[Trajectory]
    ) -> None:
        """Write the groups' trajectories to `rollouts/step-<step>.parquet`.

        Args:
            rewards: of each trajectory, complete; as is `advantages`.
        """
        # groups of several samplings have been numbered apart from each other
        trajectories = [replace(trajectory, group_id=g) for g, group in enumerate(groups) for trajectory in group]
        known = [replace(t, reward=r.total, rewards=r.terms) for t, r in zip(trajectories, rewards, strict=True)]
        path = self._folder / f"step-{step:06d}.parquet"
        await asyncio.to_thread(write_rollouts, path, known, advantages, step=step, decode=self._decode)

    async def estimate(self, job: EstimateJob, *groups: Sequence[Trajectory]) -> Any:
        """What `job` finds out of the groups' trajectories, and behind it each of the columns that it gives."""
        found, columns = await asyncio.to_thread(estimate, job, groups)
        return (found, *columns) if columns else found
