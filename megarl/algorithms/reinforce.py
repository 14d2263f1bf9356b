"""Policy gradients without a critic: REINFORCE++, REINFORCE++-baseline and ReMax."""

from __future__ import annotations

from typing import TypeVar, override

from megarl.algorithms.algorithm import Algorithm
from megarl.config.algorithm import (
    ReinforcePlusPlusBaselineConfig,
    ReinforcePlusPlusConfig,
    RemaxConfig,
)
from megarl.functional import discounted_returns, group_advantages, remax_advantages, spread_completions
from megarl.losses.policy_loss import ClippedLoss
from megarl.rollout.estimation.estimators import EstimatorOutput, TokenBatch, by_groups, reward_kl_penalty
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


@by_groups
def reinforce_estimates(
    tokens: TokenBatch, algorithm: ReinforcePlusPlusConfig | ReinforcePlusPlusBaselineConfig, kl_coefficient: float
) -> EstimatorOutput:
    """Return the whitened advantage of each token."""
    penalty_T, metrics = reward_kl_penalty(tokens, algorithm, kl_coefficient)
    if isinstance(algorithm, ReinforcePlusPlusConfig):
        rewards_T = tokens.token_rewards(penalty_T)
        advantages_T = discounted_returns(rewards_T, tokens.mask_T, tokens.cu_seqlens_N, gamma=algorithm.gamma)
    elif tokens.turn_rewards_T is not None:
        advantages_T = tokens.turn_advantages("dr_grpo", penalty_T)
    else:
        centred_N = group_advantages(tokens.sequence_rewards(penalty_T), tokens.group_ids_N, kind="dr_grpo")
        advantages_T = spread_completions(centred_N, tokens.mask_T, tokens.cu_seqlens_N)
    return tokens.with_advantages(advantages_T, metrics, whiten=True, unbiased=algorithm.whiten_unbiased)


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
            batch.scalars["greedy_rewards"] = [greedy_rewards[group] for group in batch.group_ids]
            if greedy_rewards:
                run.add_metrics({"remax/greedy_reward": sum(greedy_rewards) / len(greedy_rewards)})
            run.estimate(remax_estimates, batch, config, run.kl_coefficient, outputs=("advantages",))
            run.finish_step(batch, run.train_policy(batch, ClippedLoss.of(config)))


@by_groups
def remax_estimates(tokens: TokenBatch, algorithm: RemaxConfig, kl_coefficient: float) -> EstimatorOutput:
    """Return the advantage of each token: its return minus the reward of its prompt's greedy completion.

    The scalar `greedy_rewards` has that reward for each completion.
    """
    penalty_T, metrics = reward_kl_penalty(tokens, algorithm, kl_coefficient)
    advantages_T = remax_advantages(
        tokens.token_rewards(penalty_T), tokens.scalars["greedy_rewards"], tokens.mask_T, tokens.cu_seqlens_N
    )
    return tokens.with_advantages(advantages_T, metrics)
