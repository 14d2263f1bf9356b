"""REINFORCE algorithms without a critic: REINFORCE++, REINFORCE++ with a group baseline, ReMax."""

from __future__ import annotations

from pydantic import Field

from megarl.config.algorithms.group_baseline import ClippedGroupPolicyConfig
from megarl.config.algorithms.policy import ClippedPolicyConfig, KlLossConfig, KlRewardConfig


class ReinforcePlusPlusConfig(ClippedPolicyConfig):
    """REINFORCE++: discounted returns, whitened over the batch (arXiv 2501.03262)."""

    type: str = "reinforce_pp"
    gamma: float = Field(default=1.0, gt=0, le=1)
    """Discount factor per token."""

    kl_reward: KlRewardConfig | None = KlRewardConfig()


class ReinforcePlusPlusBaselineConfig(ClippedGroupPolicyConfig):
    """REINFORCE++ with the group's mean as baseline, whitened over the batch (arXiv 2501.03262, section 3)."""

    type: str = "reinforce_pp_baseline"
    kl_loss: KlLossConfig | None = KlLossConfig(kind="k2")


class RemaxConfig(ClippedPolicyConfig):
    """ReMax: the baseline is the reward of the greedy completion (arXiv 2310.10505)."""

    type: str = "remax"
    kl_reward: KlRewardConfig | None = KlRewardConfig()
