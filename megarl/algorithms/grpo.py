"""Algorithms that compare a completion with the others of its prompt: GRPO, Dr.GRPO, RLOO, GSPO, CISPO, GMPO."""

from __future__ import annotations

from megarl.config.algorithms.algorithm import GroupPolicyConfig
from megarl.functional import group_advantages
from megarl.groups.estimation import Estimates, StepTokens
from megarl.run.kl_penalty import penalty
from megarl.run.rl_run import PolicyRun


def train_grouped(run: PolicyRun, algorithm: GroupPolicyConfig) -> None:
    """Sample, compare, train, push. While engines sample, what training alone needs is off the devices."""
    run.begin()
    for prompts in run.steps():
        batch = run.sample(prompts)
        run.add_reference(batch)
        run.estimate(group_estimates, batch, algorithm, run.kl_coefficient)
        run.finish_step(batch, run.train_policy(batch))


def group_estimates(tokens: StepTokens, algorithm: GroupPolicyConfig, kl_coefficient: float) -> Estimates:
    """One advantage a completion, from its reward less its divergence from the reference, where that is punished."""
    penalty_T, metrics = penalty(tokens, algorithm, kl_coefficient)
    advantages_N = group_advantages(tokens.totals(penalty_T), tokens.group_ids_N, kind=algorithm.group_baseline)
    return Estimates(scalars={"advantages": advantages_N}, metrics=metrics)
