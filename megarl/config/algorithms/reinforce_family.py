"""REINFORCE algorithms without a critic: REINFORCE++, REINFORCE++ with a group baseline, ReMax."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from megarl.config.algorithms.group_baseline import ClippedGroupPolicyConfig
from megarl.config.algorithms.policy import ClippedPolicyConfig, KlLossConfig, KlRewardConfig


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
