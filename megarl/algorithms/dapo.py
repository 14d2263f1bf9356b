"""DAPO: GRPO with dynamic sampling.

Groups with zero reward variance carry no gradient; prompts are resampled until the batch is full.
"""

from __future__ import annotations

from functools import partial
from typing import override

import torch

from megarl.algorithms.algorithm import Algorithm
from megarl.algorithms.grpo import group_estimates, group_outputs
from megarl.config.algorithms.group_baseline import DapoConfig
from megarl.functional import keep_informative_groups, overlong_penalty
from megarl.groups.group_stream import FinishedGroup
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
        is_informative = partial(differs_in, metric)
        for prompts in run.steps():
            found = run.sample_kept(prompts, is_informative, max_batches=config.max_batches)
            batch, num_kept = found.batch, sum(map(is_informative, found.groups))
            values = [value for sampled in found.sampled for value in sampled.reward_term(metric)]
            run.add_metrics(
                {
                    "dapo/batches": found.num_batches,
                    "dapo/informative_groups": num_kept,
                    **({SAMPLED_REWARD: sum(values) / len(values)} if values else {}),
                }
            )
            if num_kept < config.prompts_per_step:
                run.notify(
                    f"step {run.step}: {num_kept} of {config.prompts_per_step} informative groups in "
                    f"{config.max_batches} batches (algorithm.max_batches)"
                )
            if not batch.groups:
                run.finish_step(found.sampled[-1], None)
                continue
            apply_overlong_penalty(batch, config, run.config.rollout.max_new_tokens)
            run.add_reference_logprobs(batch)
            run.estimate(group_estimates, batch, config, run.kl_coefficient, outputs=group_outputs(config))
            run.finish_step(batch, run.train_policy(batch, ClippedLoss.of(config)))


def differs_in(metric: str, group: FinishedGroup) -> bool:
    """Return whether a reward term differs between the completions of the group (arXiv 2503.14476, equation 11).

    Call it before the overlong penalty, which would make almost every group look informative.
    """
    values_n = torch.tensor([group.summary.trajectories[i].rewards[metric] for i in group.summary.kept])
    return bool(keep_informative_groups(values_n, torch.zeros(len(values_n), dtype=torch.int64)).any())


def apply_overlong_penalty(batch: RolloutBatch, algorithm: DapoConfig, max_new_tokens: int) -> None:
    """Add the (negative) overlong penalty to the rewards of long completions, as the reward term `overlong`."""
    if algorithm.overlong is None:
        return
    lengths_N = torch.tensor([summary.response_length for summary in batch.summaries])
    max_length, buffer = algorithm.overlong.bounds(max_new_tokens)
    penalty_N = overlong_penalty(lengths_N, max_length=max_length, buffer=buffer, factor=algorithm.overlong.factor)
    batch.add_to_rewards("overlong", penalty_N.tolist())
