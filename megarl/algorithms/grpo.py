"""Critic-free algorithms with a group baseline: GRPO, Dr.GRPO, RLOO, GSPO, CISPO, GMPO.

A group is the `group_size` completions of one prompt; the rewards of the group give the baseline of each of them.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TypeVar, override

from megarl.algorithms.algorithm import Algorithm
from megarl.config.algorithms.group_baseline import (
    CispoConfig,
    ClippedGroupPolicyConfig,
    DrGrpoConfig,
    GmpoConfig,
    GroupPolicyConfig,
    GrpoConfig,
    GspoConfig,
    RlooConfig,
)
from megarl.functional import group_advantages
from megarl.groups.estimation.estimators import (
    CompletionBatch,
    EstimatorOutput,
    TokenBatch,
    by_completions,
    by_groups,
)
from megarl.groups.estimation.grouped_metrics import Metric
from megarl.megatron.losses.loss import TokenLoss
from megarl.megatron.losses.policy import CispoLoss, ClippedLoss, GmpoLoss, GspoLoss
from megarl.run.kl_penalty import reward_kl_penalty
from megarl.run.rl_run import RLRun

C = TypeVar("C", bound=GroupPolicyConfig)


class GroupAlgorithm(Algorithm[C]):
    """The GRPO loop, for any group baseline and token loss."""

    @abstractmethod
    def token_loss(self, config: C) -> TokenLoss:
        """Return the loss per token."""

    @override
    def train(self, run: RLRun, config: C) -> None:
        """Run the GRPO loop: sample groups, estimate advantages, train the policy, sync weights to the engines.

        Optimizer states, gradients and weights are offloaded during sampling, as configured by `trainer.offload`.
        """
        run.begin()
        for prompts in run.steps():
            batch = run.sample(prompts)
            run.add_reference_logprobs(batch)
            run.estimate(group_estimates, batch, config, run.kl_coefficient, outputs=group_outputs(config))
            run.finish_step(batch, run.train_policy(batch, self.token_loss(config)))


class ClippedGroupAlgorithm(GroupAlgorithm[ClippedGroupPolicyConfig]):
    """The GRPO loop with the clipped loss of PPO."""

    @override
    def token_loss(self, config: ClippedGroupPolicyConfig) -> TokenLoss:
        return ClippedLoss.of(config)


class Grpo(ClippedGroupAlgorithm):
    """GRPO: rewards normalized by the mean and standard deviation of the group."""

    Config = GrpoConfig


class DrGrpo(ClippedGroupAlgorithm):
    """GRPO without its length bias and difficulty bias."""

    Config = DrGrpoConfig


class Rloo(ClippedGroupAlgorithm):
    """RLOO: the baseline is the mean reward of the other completions of the group."""

    Config = RlooConfig


class Gspo(GroupAlgorithm[GspoConfig]):
    """Group sequence policy optimization."""

    Config = GspoConfig

    @override
    def token_loss(self, config: GspoConfig) -> TokenLoss:
        return GspoLoss.of(config)


class Cispo(GroupAlgorithm[CispoConfig]):
    """Clipped importance weights that keep the gradient of every token."""

    Config = CispoConfig

    @override
    def token_loss(self, config: CispoConfig) -> TokenLoss:
        return CispoLoss.of(config)


class Gmpo(GroupAlgorithm[GmpoConfig]):
    """GMPO: the loss takes the geometric mean of a sequence's importance ratios."""

    Config = GmpoConfig

    @override
    def token_loss(self, config: GmpoConfig) -> TokenLoss:
        return GmpoLoss.of(config)


def group_outputs(algorithm: GroupPolicyConfig) -> tuple[str, ...]:
    """Return the columns per token of `group_estimates`."""
    return ("advantages",) if algorithm.advantages_per == "turn" else ()


@by_groups
@by_completions
def group_estimates(batch: CompletionBatch, algorithm: GroupPolicyConfig, kl_coefficient: float) -> EstimatorOutput:
    """Return one advantage per completion, or per turn, computed from its reward and the rewards of its group.

    With `kl_reward`, the KL penalty against the reference policy is first subtracted from the reward.
    """
    rewards_N, metrics = batch.rewards_N, dict[str, Metric]()
    if isinstance(batch, TokenBatch):
        penalty_T, metrics = reward_kl_penalty(batch, algorithm, kl_coefficient)
        if batch.turn_rewards_T is not None:
            return batch.with_advantages(batch.turn_advantages(algorithm.group_baseline, penalty_T), metrics)
        rewards_N = batch.sequence_rewards(penalty_T)
    advantages_N = group_advantages(rewards_N, batch.group_ids_N, kind=algorithm.group_baseline)
    return EstimatorOutput(scalars={"advantages": advantages_N}, metrics=metrics)
