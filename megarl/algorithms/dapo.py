"""DAPO: GRPO with dynamic sampling.

Groups with zero reward variance carry no gradient; prompts are resampled until the batch is full.
"""

from __future__ import annotations

import torch
from typing_extensions import override

from megarl.algorithms.algorithm import Algorithm
from megarl.algorithms.grpo import group_estimates
from megarl.config.algorithms.group_baseline import DapoConfig
from megarl.functional import keep_informative_groups, overlong_penalty
from megarl.groups.rollout_group import FinishedGroup
from megarl.megatron.losses.policy import ClippedLoss
from megarl.run.rl_run import RLRun
from megarl.run.rollout_batch import RolloutBatch

SAMPLED_REWARD = "reward/sampled_mean"
"""Metric name: mean of the reward (DAPO: of `filter_metric`) over all sampled completions, before filtering."""


class Dapo(Algorithm[DapoConfig]):
    """GRPO with dynamic sampling and a penalty on overlong completions."""

    Config = DapoConfig

    @override
    def train(self, run: RLRun, config: DapoConfig) -> None:
        """Run the GRPO loop on informative groups only; sample up to `max_batches` batches per step to find them."""
        run.begin()
        metric = config.filter_metric or run.config.reward.eval_name
        for prompts in run.steps():
            kept: list[FinishedGroup] = []
            sampled_values: list[float] = []
            for attempt in range(config.max_batches):
                batch = run.sample(run.prompts() if attempt else prompts, attempt=attempt)
                kept += filter_informative(batch, metric)
                sampled_values += batch.reward_term(metric)
                if len(kept) >= config.prompts_per_step:
                    break
            run.add_metrics(
                {
                    "dapo/batches": attempt + 1,
                    "dapo/informative_groups": len(kept),
                    **({SAMPLED_REWARD: sum(sampled_values) / len(sampled_values)} if sampled_values else {}),
                }
            )
            if len(kept) < config.prompts_per_step:
                run.notify(
                    f"step {run.step}: {len(kept)} of {config.prompts_per_step} informative groups in "
                    f"{config.max_batches} batches (algorithm.max_batches)"
                )
            if not kept:
                run.finish_step(batch, None)
                continue
            batch = RolloutBatch(groups=kept[: config.prompts_per_step])
            apply_overlong_penalty(batch, config, run.config.rollout.max_new_tokens)
            run.add_reference_logprobs(batch)
            run.estimate(group_estimates, batch, config, run.kl_coefficient)
            run.finish_step(batch, run.train_policy(batch, ClippedLoss.of(config)))


def filter_informative(batch: RolloutBatch, metric: str) -> list[FinishedGroup]:
    """Return the groups in which the metric differs between completions.

    Call it before the overlong penalty, which would make almost every group look informative.
    """
    keep_N = keep_informative_groups(torch.tensor(batch.reward_term(metric)), torch.tensor(batch.group_ids))
    offsets = batch.group_offsets
    return [group for group, n in zip(batch.groups, offsets, strict=True) if bool(keep_N[n])]


def apply_overlong_penalty(batch: RolloutBatch, algorithm: DapoConfig, max_new_tokens: int) -> None:
    """Add the (negative) overlong penalty to the rewards of long completions, as the reward term `overlong`."""
    if algorithm.overlong is None:
        return
    lengths_N = torch.tensor([summary.response_length for summary in batch.summaries])
    max_length, buffer = algorithm.overlong.bounds(max_new_tokens)
    penalty_N = overlong_penalty(lengths_N, max_length=max_length, buffer=buffer, factor=algorithm.overlong.factor)
    batch.add_to_rewards("overlong", penalty_N.tolist())
