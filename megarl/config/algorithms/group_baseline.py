"""Algorithms whose baseline is the group: GRPO, Dr. GRPO, RLOO, GSPO, CISPO, GMPO, DAPO."""

from __future__ import annotations

from typing import ClassVar, Literal, override

from pydantic import Field

from megarl.config.algorithms.policy import (
    Aggregation,
    ClippedPolicyConfig,
    ClipRatioConfig,
    KlLossConfig,
    KlRewardConfig,
    PolicyConfig,
)
from megarl.config.reward import RewardsConfig
from megarl.config.section import Section


class GroupPolicyConfig(PolicyConfig):
    """Algorithms that compare a completion's reward with those of the other completions of its prompt."""

    needs_group: ClassVar[bool] = True

    group_baseline: ClassVar[Literal["grpo", "dr_grpo", "rloo"]] = "grpo"
    """The advantage estimator: `kind` of `megarl.functional.group_advantages`."""


class ClippedGroupPolicyConfig(ClippedPolicyConfig, GroupPolicyConfig):
    """Algorithms with a group baseline and the policy loss of PPO."""


class GrpoConfig(ClippedGroupPolicyConfig):
    """Group-relative policy optimization (arXiv 2402.03300)."""

    type: str = "grpo"
    kl_loss: KlLossConfig | None = KlLossConfig()


class DrGrpoConfig(ClippedGroupPolicyConfig):
    """GRPO without its length bias and difficulty bias (arXiv 2503.20783)."""

    group_baseline = "dr_grpo"
    type: str = "dr_grpo"
    aggregation: Aggregation = "seq-mean-token-sum-norm"


class RlooConfig(ClippedGroupPolicyConfig):
    """REINFORCE leave-one-out (arXiv 2402.14740)."""

    group_baseline = "rloo"
    type: str = "rloo"
    kl_reward: KlRewardConfig | None = KlRewardConfig()


class GspoConfig(ClipRatioConfig, GroupPolicyConfig):
    """Group sequence policy optimization: one importance ratio per sequence (arXiv 2507.18071)."""

    sequence_level: ClassVar[str | None] = "importance ratios"
    type: str = "gspo"
    clip_ratio_low: float = Field(default=3e-4, gt=0)
    clip_ratio_high: float = Field(default=4e-4, gt=0)
    aggregation: Aggregation = "seq-mean-token-mean"


class CispoConfig(GroupPolicyConfig):
    """Clipped importance weights that keep the gradient of every token (arXiv 2506.13585)."""

    type: str = "cispo"
    clip_ratio_high: float = Field(default=4.0, gt=0)
    """The importance weight is clipped at 1 + clip_ratio_high, from above only. Values from 4 to 8 perform similarly
    (arXiv 2510.13786)."""


class GmpoConfig(GroupPolicyConfig):
    """Geometric-mean policy optimization (arXiv 2507.20673)."""

    sequence_level: ClassVar[str | None] = "geometric means of ratios"
    type: str = "gmpo"
    clip_log_ratio_low: float = Field(default=0.4, gt=0)
    """The logarithm of a token's importance ratio is clipped below at -clip_log_ratio_low."""

    clip_log_ratio_high: float = Field(default=0.4, gt=0)
    """The logarithm of a token's importance ratio is clipped above at clip_log_ratio_high."""

    aggregation: Aggregation = "seq-mean-token-mean"


class OverlongConfig(Section):
    """DAPO's soft penalty on long completions (arXiv 2503.14476, equation 13)."""

    max_length: int | None = Field(default=None, ge=1)
    """Number of sampled tokens at which the penalty reaches `factor`. Default: `rollout.max_new_tokens`."""

    buffer: int | None = Field(default=None, ge=1)
    """Number of tokens before `max_length` over which the penalty grows linearly from 0. Default: a fifth of
    `max_length`, as in the paper."""

    factor: float = Field(default=1.0, ge=0)
    """The largest penalty, subtracted from the reward."""

    def bounds(self, max_new_tokens: int) -> tuple[int, int]:
        """`max_length` and `buffer` in tokens, with defaults filled in."""
        max_length = self.max_length or max_new_tokens
        return max_length, self.buffer or max(1, max_length // 5)


class DapoConfig(ClippedGroupPolicyConfig):
    """Decoupled clip and dynamic sampling policy optimization (arXiv 2503.14476)."""

    type: str = "dapo"
    clip_ratio_high: float = Field(default=0.28, gt=0)

    overlong: OverlongConfig | None = OverlongConfig()
    """Penalty on long completions. null: none."""

    filter_metric: str | None = None
    """The reward term that dynamic sampling looks at: groups whose completions all have the same value are replaced by
    new prompts. Default: the term of `reward.eval_term`."""

    max_batches: int = Field(default=10, ge=1)
    """Largest number of batches of prompts that one step samples to fill itself with informative groups."""

    @override
    def terms_of_every_completion(self, reward: RewardsConfig) -> frozenset[str]:
        return frozenset({self.filter_metric or reward.eval_name})

    @override
    def check_rewards(self, reward: RewardsConfig) -> None:
        terms = sorted(reward.terms)
        if self.filter_metric is None and not reward.rules:
            raise ValueError(f"algorithm.filter_metric needs to be one of {terms}, as no term is a rule, got null")
        if self.filter_metric not in (None, *terms):
            raise ValueError(f"algorithm.filter_metric needs to be one of {terms}, got {self.filter_metric!r}")


class ReinforcePlusPlusConfig(ClippedPolicyConfig):
    """REINFORCE++: discounted returns, whitened over the batch (arXiv 2501.03262)."""

    type: str = "reinforce_pp"
    gamma: float = Field(default=1.0, gt=0, le=1)
    """Discount factor per token."""

    whiten_unbiased: bool = False
    """Whitening divides by the standard deviation with n - 1 instead of n."""

    kl_reward: KlRewardConfig | None = KlRewardConfig()


class ReinforcePlusPlusBaselineConfig(ClippedGroupPolicyConfig):
    """REINFORCE++ with the group's mean as baseline, whitened over the batch (arXiv 2501.03262, section 3)."""

    type: str = "reinforce_pp_baseline"
    whiten_unbiased: bool = False
    """Whitening divides by the standard deviation with n - 1 instead of n."""

    kl_loss: KlLossConfig | None = KlLossConfig(kind="k2")


class RemaxConfig(ClippedPolicyConfig):
    """ReMax: the baseline is the reward of the greedy completion (arXiv 2310.10505)."""

    needs_greedy_baseline: ClassVar[bool] = True

    type: str = "remax"
    kl_reward: KlRewardConfig | None = KlRewardConfig()
