"""The rollout worker that runs in a Ray actor: generation, rewards, journal, rollout logs and estimators."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, override

from megarl.batch.packed_trajectories import PackedGroups, PackedTrajectories
from megarl.batch.trajectory import Trajectory
from megarl.checkpoint.run_lock import LockClaim, adopt_claim, require_lock
from megarl.cluster.process.process_start import freeze_objects
from megarl.cluster.workers.dispatch import fetch_arguments
from megarl.config import RunConfig
from megarl.data.tokenizer import load_tokenizer
from megarl.engines.engine import GenerationEngine
from megarl.errors import WorkerError
from megarl.reward.reward_scorer import RewardScorer
from megarl.rollout.agents.agent import load_agent
from megarl.rollout.environments.environment_agent import EnvironmentAgent
from megarl.rollout.gateway.harness_agent import HarnessAgent
from megarl.rollout.gateway.harness_process import HARNESS
from megarl.rollout.journal import Replay, open_journal, parse_step
from megarl.rollout.rollout_worker import GroupJob, GroupSummary, RolloutWorker, RolloutWorkerSpec, SourceAgent
from megarl.tracking.tracker import write_rollouts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from megarl.rollout.estimate_job import ColumnPart, EstimateJob, EstimateSummary, WhitenJob


class RolloutActor(RolloutWorker):
    """Runs agents, scores trajectories, writes rollouts to disk, and runs estimators."""

    def __init__(self, config: RunConfig, engines: Sequence[GenerationEngine], claim: LockClaim | None = None) -> None:
        """`claim`: the run's claim to its folder, checked before each write; None: the folder is not locked."""
        if claim is not None:
            adopt_claim(claim)
        tokenizer = load_tokenizer(config.model.path, trust_remote_code=config.model.trust_remote_code)
        refuses_forks = config.algorithm.refuses_forks
        main = _load_main_agent(config, tokenizer)
        self._harness = main.agent if isinstance(main.agent, HarnessAgent) else None
        spec = RolloutWorkerSpec(
            request_timeout_seconds=config.rollout.request_timeout_seconds,
            no_progress_seconds=config.rollout.no_progress_seconds,
            agent=main.agent,
            agent_path=main.path,
            agent_key=main.key,
            source_agents={
                source.name: SourceAgent(
                    agent=EnvironmentAgent(
                        own, config.data, tokenizer, refuses_forks=refuses_forks, key=f"{source.key}.env"
                    ),
                    path=own.path,
                    key=f"{source.key}.env.path",
                )
                for source in config.data.resolved_sources
                if (own := source.config.env) is not None
            },
            refuses_forks=refuses_forks,
        )
        super().__init__(spec, engines, RewardScorer.from_tokenizer(config.reward, tokenizer), tokenizer)
        self._decode = partial(tokenizer.decode, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        self._run_dir, self._folder = config.run_dir, Path(config.run_dir) / "rollouts"
        self._replay = Replay(open_journal(config))

    async def rollout_group(self, job: GroupJob) -> tuple[GroupSummary, PackedTrajectories]:
        """Return the journal entry for this job if any process has finished it; otherwise generate and append it.

        Raises:
            WorkerError: as `RolloutWorker` raises it, or the journal cannot be used.
            AgentError, RewardError: as `RolloutWorker` raises them.
            LostLockError: another run has taken over the run folder.
        """
        step = parse_step(job.request_id)
        if step is None:
            summary, trajectories = await super().rollout_group(job)
            return summary, PackedTrajectories.of(trajectories)
        group = await self._replay.lookup(step, job)
        if group is not None:
            return replace(group.summary, replayed=True), PackedTrajectories.of(group.trajectories)
        group = await self._replay.append(step, job, *await super().rollout_group(job))
        return group.summary, PackedTrajectories.of(group.trajectories)

    @staticmethod
    def join_values(groups: Sequence[PackedTrajectories | None]) -> PackedGroups:
        """Return the trajectories of groups that leave the worker as one object; a group that failed has none."""
        return PackedGroups.of([group or () for group in groups])

    @override
    async def shutdown(self) -> None:
        """Close the rewards and the harness. The worker must not be used afterwards."""
        await super().shutdown()
        if self._harness is not None:
            await self._harness.close()

    async def record(
        self,
        step: int,
        rewards: tuple[Sequence[float], Sequence[Mapping[str, float]], Sequence[Mapping[str, str]]],
        advantages: Sequence[float | None],
        places: Sequence[tuple[int, int]],
        *stored: Sequence[Sequence[Trajectory]],
    ) -> None:
        """Write the trajectories of the groups to `rollouts/step-<step>.parquet`.

        Args:
            rewards: columns of one value per trajectory, from the controller: total reward, all terms, and errors.
            advantages: one per trajectory; None for one that was not trained on.
            places: for each group, the index of its object and its index there.
            stored: the objects, or the only item that `as_arguments` returns.

        Raises:
            LostLockError: another run has taken over the run folder; nothing is written.
        """
        groups = await _fetch_groups(places, stored)
        # group ids are unique within one sampling call only; a step may combine several
        trajectories = [replace(trajectory, group_id=g) for g, group in enumerate(groups) for trajectory in group]
        known = [
            replace(trajectory, reward=total, rewards=terms, reward_errors=errors)
            for trajectory, total, terms, errors in zip(trajectories, *rewards, strict=True)
        ]
        path = self._folder / f"step-{step:06d}.parquet"
        require_lock(self._run_dir)
        await asyncio.to_thread(write_rollouts, path, known, advantages, step=step, decode=self._decode)

    async def estimate(
        self, places: Sequence[tuple[int, int]], job: EstimateJob, *stored: Sequence[Sequence[Trajectory]]
    ) -> EstimateSummary | tuple[EstimateSummary | ColumnPart, ...]:
        """Run the estimator; return its `EstimateSummary`, followed by one value for each column of `job.outputs`.

        Args:
            places, stored: as `record`.
        """
        # imports torch, which the estimator of `job` needs, too
        from megarl.rollout.estimate_job import estimate

        _freeze_imported_modules()
        groups = await _fetch_groups(places, stored)
        summary, columns = await asyncio.to_thread(estimate, job, groups)
        return (summary, *columns) if columns else summary

    async def whiten(
        self,
        places: Sequence[tuple[int, int]],
        job: WhitenJob,
        advantages: ColumnPart,
        *stored: Sequence[Sequence[Trajectory]],
    ) -> tuple[EstimateSummary, ColumnPart]:
        """Return the summary with the means of whitened advantages, and their column.

        Args:
            places, stored: as `record`.
            advantages: the column of these groups that `estimate` has returned.
        """
        from megarl.rollout.estimate_job import whiten

        return await asyncio.to_thread(whiten, job, await _fetch_groups(places, stored), advantages)


@cache
def _freeze_imported_modules() -> None:
    """Freeze the objects of the modules that the first estimator has imported; a no-op at later calls."""
    freeze_objects()


async def _fetch_groups(
    places: Sequence[tuple[int, int]], stored: Sequence[Sequence[Sequence[Trajectory]]]
) -> list[Sequence[Trajectory]]:
    """Return the groups at these places of stored objects, or of the only item that `as_arguments` returns."""
    objects = await asyncio.to_thread(fetch_arguments, stored)
    return [objects[object_index][index] for object_index, index in places]


def _load_main_agent(config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> SourceAgent:
    """Return what runs the episodes of all sources that have no environment of their own."""
    rollout, refuses_forks = config.rollout, config.algorithm.refuses_forks
    if rollout.harness is not None:
        harness = HarnessAgent(
            rollout.harness,
            config.data,
            tokenizer,
            refuses_forks=refuses_forks,
            needs_reward=bool(config.reward.environments),
        )
        return SourceAgent(agent=harness, path=rollout.harness.label, key=HARNESS)
    if rollout.env is not None:
        environment = EnvironmentAgent(rollout.env, config.data, tokenizer, refuses_forks=refuses_forks)
        return SourceAgent(agent=environment, path=rollout.env.path, key="rollout.env.path")
    return SourceAgent(agent=load_agent(rollout.agent), path=rollout.agent.path, key="rollout.agent.path")


class ReplayActor(RolloutActor):
    """Has no engine: every group is one of the journal."""

    @override
    async def rollout_group(self, job: GroupJob) -> tuple[GroupSummary, PackedTrajectories]:
        """Return the journal entry for this job.

        Raises:
            WorkerError: the journal lacks the group, or cannot be used.
        """
        step = parse_step(job.request_id)
        group = None if step is None else await self._replay.lookup(step, job)
        if group is None:
            raise WorkerError(f"{job.request_id}: the rollout journal lacks this group, prompt {job.prompt.prompt_id}")
        return replace(group.summary, replayed=True), PackedTrajectories.of(group.trajectories)
