"""Evaluation on held-out prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megarl.batch.trajectory import Prompt
from megarl.config import RunConfig
from megarl.groups.rollout_group import RolloutGroup
from megarl.rollout.engine import Sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Result of an evaluation."""

    score: float | None
    """Mean of `reward.eval_term`; None if it failed on all completions."""
    num_dropped: int
    """Number of completions on which the term failed; they do not count."""


def greedy_score(config: RunConfig, rollout: RolloutGroup, prompts: Sequence[Prompt], *, label: str) -> Evaluation:
    """Evaluate `reward.eval_term` on one greedy completion per prompt."""
    greedy = Sampling(temperature=0.0, max_new_tokens=config.rollout.max_new_tokens)
    groups = rollout.collect(prompts, num_samples=1, sampling=greedy, label=label)
    versions = {v for group in groups for t in group.summary.trajectories for v, _ in t.tokens_by_version}
    assert len(versions) <= 1, f"{label}: weights were pushed during the evaluation, versions {sorted(versions)}"
    name = config.reward.eval_name
    rewards = [t.rewards for group in groups for t in group.summary.trajectories]
    values = [each[name] for each in rewards if name in each]
    return Evaluation(score=sum(values) / len(values) if values else None, num_dropped=len(rewards) - len(values))
