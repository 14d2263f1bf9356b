"""Makes finished groups whose tokens are in this process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from megarl.batch.trajectory import Prompt, Trajectory
from megarl.cluster.workers.dispatch import LocalPayload
from megarl.config import RunConfig
from megarl.engines.engine import Sampling
from megarl.rollout.rollout_worker import GroupJob, GroupSummary, summarize
from megarl.run.remote.rollout_group import FinishedGroup
from megarl.run.schedule.events import OpenGroup
from megarl.run.schedule.schedule import place


def completion(
    mask: Sequence[int],
    *,
    reward: float = 0.0,
    rewards: Mapping[str, float] | None = None,
    reward_errors: Mapping[str, str] | None = None,
) -> Trajectory:
    """Return a trajectory with one token per entry of `mask`; 1: sampled."""
    sampled = np.array(mask, bool)
    return Trajectory(
        prompt_id="data.jsonl:1",
        group_id=0,
        token_ids=np.arange(2, 2 + len(sampled), dtype=np.int32),
        loss_mask=sampled,
        logprobs=np.where(sampled, -1.0, 0.0).astype(np.float32),
        policy_versions=np.where(sampled, 0, -1).astype(np.int32),
        reward=reward,
        rewards=rewards or {"match": reward},
        reward_errors=reward_errors or {},
    )


def finished_group(trajectories: Sequence[Trajectory], group_id: int = 0) -> FinishedGroup:
    """Return a finished group of these trajectories."""
    summary = GroupSummary(
        group_id=group_id,
        prompt_id="data.jsonl:1",
        trajectories=tuple(map(summarize, trajectories)),
        generation_seconds=1.0,
        scoring_seconds=1.0,
    )
    payload: Any = LocalPayload(list(trajectories))
    return FinishedGroup(summary, payload)


def groups_with_rewards(*rewards: Sequence[float]) -> list[FinishedGroup]:
    """Return one group per argument; its completions have these rewards and 2 sampled tokens each."""
    return [finished_group([completion([0, 1, 1], reward=r) for r in group], g) for g, group in enumerate(rewards)]


def run_config(algorithm: Mapping[str, Any], **sections: Any) -> RunConfig:
    """Return a minimal valid run configuration with this `algorithm:` section."""
    tree = {
        "run_dir": "runs/x",
        "model": {"path": "model"},
        "data": {"path": "data.jsonl"},
        "reward": {"terms": {"match": {"type": "numeric"}}},
        "algorithm": dict(algorithm),
    }
    return RunConfig.model_validate(tree | sections)


def group_job(group: OpenGroup, groups_per_step: int, *, num_samples: int, max_new_tokens: int) -> GroupJob:
    """Return the job of a group of a schedule, with the request id that `GroupJobs` gives it."""
    step, index = place(group.ordinal, groups_per_step)
    again = f"-again{group.attempt}" if group.attempt else ""
    return GroupJob(
        prompt=Prompt(prompt_id=f"p{group.ordinal}", text="", token_ids=(1,), row={}),
        group_id=index,
        num_samples=num_samples,
        sampling=Sampling(temperature=1.0, max_new_tokens=max_new_tokens),
        request_id=f"step-{step}{again}-{index}",
        seed=(0, step),
    )
