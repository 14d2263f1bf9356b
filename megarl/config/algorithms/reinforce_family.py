"""REINFORCE algorithms without a critic: REINFORCE++, REINFORCE++ with a group baseline, ReMax."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from megarl.config.algorithms.group_baseline import ClippedGroupPolicyConfig
from megarl.config.algorithms.policy import ClippedPolicyConfig, KlConfig, KlRewardConfig


class ReinforcePlusPlusConfig(ClippedPolicyConfig):
    """REINFORCE++: discounted returns, whitened over the batch (arXiv 2501.03262)."""

    type: Literal["reinforce_pp"] = "reinforce_pp"
    gamma: float = Field(default=1.0, gt=0, le=1)
    """Discount factor per token."""

    kl_reward: KlRewardConfig | None = KlRewardConfig()


class ReinforcePlusPlusBaselineConfig(ClippedGroupPolicyConfig):
    """REINFORCE++ with the group's mean as baseline, whitened over the batch (arXiv 2501.03262, section 3)."""

    type: Literal["reinforce_pp_baseline"] = "reinforce_pp_baseline"
    kl_loss: KlConfig | None = KlConfig(kind="k2")


class RemaxConfig(ClippedPolicyConfig):
    """ReMax: the baseline is the reward of the greedy completion (arXiv 2310.10505)."""

    type: Literal["remax"] = "remax"
    kl_reward: KlRewardConfig | None = KlRewardConfig()
