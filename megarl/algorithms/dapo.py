"""DAPO: prompts on which all completions do alike teach nothing, and are replaced by others."""

from __future__ import annotations

import torch

from megarl.algorithms.grpo import group_estimates
from megarl.config.algorithms.algorithm import DapoConfig
from megarl.functional import keep_informative_groups, overlong_penalty
from megarl.groups.rollout_group import FinishedGroup
from megarl.run.rl_run import PolicyRun
from megarl.run.rollout_batch import Experience

SAMPLED = "reward/sampled_mean"
"""Mean of the metric over everything that was sampled, what was left out included."""


def train_dapo(run: PolicyRun, algorithm: DapoConfig) -> None:
    """As GRPO, on informative groups alone."""
    run.begin()
    metric = algorithm.filter_metric or run.config.reward.eval_name
    for prompts in run.steps():
        kept: list[FinishedGroup] = []
        raw: list[float] = []
        for attempt in range(algorithm.max_batches):
            batch = run.sample(run.prompts() if attempt else prompts, attempt=attempt)
            kept += informative(batch, metric)
            raw += batch.term(metric)
            if len(kept) >= algorithm.prompts_per_step:
                break
        run.note({"dapo/batches": attempt + 1, "dapo/informative_groups": len(kept), SAMPLED: sum(raw) / len(raw)})
        if len(kept) < algorithm.prompts_per_step:
            run.say(
                f"step {run.step}: {len(kept)} of {algorithm.prompts_per_step} informative groups in "
                f"{algorithm.max_batches} batches (algorithm.max_batches)"
            )
        if not kept:
            run.finish_step(batch, None)
            continue
        batch = Experience(groups=kept[: algorithm.prompts_per_step])
        punish_overlong(batch, algorithm, run.config.rollout.max_new_tokens)
        run.add_reference(batch)
        run.estimate(group_estimates, batch, algorithm, run.kl_coefficient)
        run.finish_step(batch, run.train_policy(batch))


def informative(batch: Experience, metric: str) -> list[FinishedGroup]:
    """The groups in which the metric differs: before any penalty, which would make all of them look informative."""
    keep_N = keep_informative_groups(torch.tensor(batch.term(metric)), torch.tensor(batch.group_ids))
    first = batch.first_of_groups
    return [group for group, n in zip(batch.groups, first, strict=True) if bool(keep_N[n])]


def punish_overlong(batch: Experience, algorithm: DapoConfig, max_new_tokens: int) -> None:
    """Take the penalty of long completions from their rewards."""
    if algorithm.overlong is None:
        return
    lengths_N = torch.tensor([summary.response_length for summary in batch.summaries])
    max_length, buffer = algorithm.overlong.bounds(max_new_tokens)
    penalty_N = overlong_penalty(lengths_N, max_length=max_length, buffer=buffer, factor=algorithm.overlong.factor)
    batch.add_to_rewards("overlong", penalty_N.tolist())
