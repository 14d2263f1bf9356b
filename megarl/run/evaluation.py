"""Evaluation on held-out prompts."""

from __future__ import annotations

from collections.abc import Sequence

from megarl.batch.trajectory import Prompt
from megarl.config import RunConfig
from megarl.groups.rollout_group import RolloutGroup
from megarl.rollout.engine import Sampling


def greedy_score(config: RunConfig, rollout: RolloutGroup, prompts: Sequence[Prompt], *, label: str) -> float:
    """Return the mean of `reward.eval_term` over one greedy completion per prompt."""
    greedy = Sampling(temperature=0.0, max_new_tokens=config.rollout.max_new_tokens)
    groups = rollout.collect(prompts, num_samples=1, sampling=greedy, label=label)
    values = [t.rewards[config.reward.eval_name] for group in groups for t in group.summary.trajectories]
    return sum(values) / len(values)
