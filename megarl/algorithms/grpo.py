"""Critic-free algorithms with a group baseline: GRPO, Dr.GRPO, DAPO, RLOO, GSPO, CISPO, GMPO.

A group is the `group_size` completions of one prompt; the rewards of the group give the baseline of each of them.

DAPO is GRPO with dynamic sampling: groups with zero reward variance carry no gradient, and prompts are resampled until
the batch is full.
"""

from __future__ import annotations

from abc import abstractmethod
from functools import partial
from typing import TypeVar, override

import torch

from megarl.algorithms.algorithm import Algorithm
from megarl.config.algorithm import (
    CispoConfig,
    ClippedGroupPolicyConfig,
    DapoConfig,
    DrGrpoConfig,
    GmpoConfig,
    GroupPolicyConfig,
    GrpoConfig,
    GspoConfig,
    RlooConfig,
)
from megarl.functional import group_advantages, keep_informative_groups, overlong_penalty
from megarl.losses.loss import TokenLoss
from megarl.losses.policy_loss import CispoLoss, ClippedLoss, GmpoLoss, GspoLoss
from megarl.rollout.estimation.estimators import (
    CompletionBatch,
    EstimatorOutput,
    Metric,
    TokenBatch,
    by_completions,
    by_groups,
    reward_kl_penalty,
)
from megarl.run.remote.group_stream import FinishedGroup
from megarl.run.rl_run import RLRun
from megarl.run.rollout_batch import RolloutBatch

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
        return GspoLoss(config)


class Cispo(GroupAlgorithm[CispoConfig]):
    """Clipped importance weights that keep the gradient of every token."""

    Config = CispoConfig

    @override
    def token_loss(self, config: CispoConfig) -> TokenLoss:
        return CispoLoss(config)


class Gmpo(GroupAlgorithm[GmpoConfig]):
    """GMPO: the loss takes the geometric mean of a sequence's importance ratios."""

    Config = GmpoConfig

    @override
    def token_loss(self, config: GmpoConfig) -> TokenLoss:
        return GmpoLoss(config)


def group_outputs(algorithm: GroupPolicyConfig) -> tuple[str, ...]:
    """Return the columns per token of `group_estimates`.

    Examples:
        >>> group_outputs(GrpoConfig()), group_outputs(GrpoConfig(advantages_per="turn"))
        ((), ('advantages',))
    """
    return ("advantages",) if algorithm.advantages_per == "turn" else ()


@by_groups
@by_completions
def group_estimates(batch: CompletionBatch, algorithm: GroupPolicyConfig, kl_coefficient: float) -> EstimatorOutput:
    """Return one advantage per completion, or per turn, computed from its reward and the rewards of its group.

    With `kl_reward`, the KL penalty against the reference policy is first subtracted from the reward.

    Examples:
        >>> batch = CompletionBatch.of([1.0, 0.0], [0, 0], scalars={})
        >>> group_estimates(batch, DrGrpoConfig(), 0.0).scalars["advantages"].tolist()
        [0.5, -0.5]
    """
    rewards_N, metrics = batch.rewards_N, dict[str, Metric]()
    if isinstance(batch, TokenBatch):
        penalty_T, metrics = reward_kl_penalty(batch, algorithm, kl_coefficient)
        if batch.turn_rewards_T is not None:
            return batch.with_advantages(batch.turn_advantages(algorithm.group_baseline, penalty_T), metrics)
        rewards_N = batch.sequence_rewards(penalty_T)
    advantages_N = group_advantages(rewards_N, batch.group_ids_N, kind=algorithm.group_baseline)
    return EstimatorOutput(scalars={"advantages": advantages_N}, metrics=metrics)


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
