"""Policy gradients without a critic: REINFORCE++, REINFORCE++-baseline and ReMax."""

from __future__ import annotations

from typing import TypeVar

import torch
from typing_extensions import override

from megarl.algorithms.algorithm import Algorithm
from megarl.config.algorithms.reinforce_family import (
    ReinforcePlusPlusBaselineConfig,
    ReinforcePlusPlusConfig,
    RemaxConfig,
)
from megarl.functional import (
    reinforce_pp_advantages,
    reinforce_pp_baseline_advantages,
    remax_advantages,
    whiten,
)
from megarl.groups.estimation import EstimatorOutput, TokenBatch
from megarl.megatron.losses.policy import ClippedLoss
from megarl.run.kl_penalty import reward_kl_penalty
from megarl.run.rl_run import RLRun

C = TypeVar("C", ReinforcePlusPlusConfig, ReinforcePlusPlusBaselineConfig)


class ReinforceAlgorithm(Algorithm[C]):
    """The REINFORCE++ loop: advantages are returns whitened over all tokens of the step."""

    @override
    def train(self, run: RLRun, config: C) -> None:
        run.begin()
        for prompts in run.steps():
            batch = run.sample(prompts)
            run.add_reference_logprobs(batch)
            run.estimate(reinforce_estimates, batch, config, run.kl_coefficient, outputs=("advantages",))
            run.finish_step(batch, run.train_policy(batch, ClippedLoss.of(config)))


class ReinforcePlusPlus(ReinforceAlgorithm[ReinforcePlusPlusConfig]):
    """REINFORCE++: discounted returns as advantages, whitened over the batch."""

    Config = ReinforcePlusPlusConfig


class ReinforcePlusPlusBaseline(ReinforceAlgorithm[ReinforcePlusPlusBaselineConfig]):
    """REINFORCE++ with the group's mean as baseline."""

    Config = ReinforcePlusPlusBaselineConfig


def reinforce_estimates(
    tokens: TokenBatch, algorithm: ReinforcePlusPlusConfig | ReinforcePlusPlusBaselineConfig, kl_coefficient: float
) -> EstimatorOutput:
    """Return the whitened advantage of each token."""
    penalty_T, metrics = reward_kl_penalty(tokens, algorithm, kl_coefficient)
    if isinstance(algorithm, ReinforcePlusPlusConfig):
        advantages_T = reinforce_pp_advantages(
            tokens.token_rewards(penalty_T),
            tokens.mask_T,
            tokens.cu_seqlens_N,
            gamma=algorithm.gamma,
            unbiased=algorithm.whiten_unbiased,
        )
    elif tokens.turn_rewards_T is not None:
        advantages_T = tokens.turn_advantages("dr_grpo", penalty_T)
        advantages_T = whiten(advantages_T, tokens.mask_T, unbiased=algorithm.whiten_unbiased)
    else:
        advantages_T = reinforce_pp_baseline_advantages(
            tokens.sequence_rewards(penalty_T),
            tokens.group_ids_N,
            tokens.mask_T,
            tokens.cu_seqlens_N,
            unbiased=algorithm.whiten_unbiased,
        )
    return tokens.with_advantages(advantages_T, metrics)


class Remax(Algorithm[RemaxConfig]):
    """ReMax: the baseline is the reward of the greedy completion."""

    Config = RemaxConfig

    @override
    def train(self, run: RLRun, config: RemaxConfig) -> None:
        """Run the ReMax loop: the reward of a prompt's greedy completion is the baseline of its sampled completions."""
        run.begin()
        for prompts in run.steps():
            batch, greedy_rewards = run.sample_with_baselines(prompts)
            run.add_reference_logprobs(batch)
            baselines = [greedy_rewards[group] for group in batch.group_ids]
            if greedy_rewards:
                run.add_metrics({"remax/greedy_reward": sum(greedy_rewards) / len(greedy_rewards)})
            run.estimate(remax_estimates, batch, config, run.kl_coefficient, baselines, outputs=("advantages",))
            run.finish_step(batch, run.train_policy(batch, ClippedLoss.of(config)))


def remax_estimates(
    tokens: TokenBatch, algorithm: RemaxConfig, kl_coefficient: float, baselines: list[float]
) -> EstimatorOutput:
    """Return the advantage of each token: its return minus the greedy completion's reward.

    Args:
        baselines: N greedy rewards, one per completion.
    """
    penalty_T, metrics = reward_kl_penalty(tokens, algorithm, kl_coefficient)
    advantages_T = remax_advantages(
        tokens.token_rewards(penalty_T), torch.tensor(baselines), tokens.mask_T, tokens.cu_seqlens_N
    )
    return tokens.with_advantages(advantages_T, metrics)
