"""Pure tensor functions; each cites its source."""

from megarl.algorithms.advantages import group_advantages
from megarl.algorithms.losses import Denominators, PolicyLoss, aggregate, clipped_policy_loss

__all__ = ["Denominators", "PolicyLoss", "aggregate", "clipped_policy_loss", "group_advantages"]
