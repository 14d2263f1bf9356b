"""Constrained RL with a Lagrange multiplier: Safe RLHF (arXiv 2310.12773). Shapes: T packed tokens."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass

from torch import Tensor


def safe_rlhf_advantages(reward_adv_T: Tensor, cost_adv_T: Tensor, *, multiplier: float) -> Tensor:
    """[T] combined advantages (A_R - lambda A_C) / (1 + lambda) of PPO-Lagrangian; lambda is the multiplier.

    Examples:
        >>> safe_rlhf_advantages(torch.tensor([1.0, -1.0]), torch.tensor([0.5, 0.5]), multiplier=1.0).tolist()
        [0.25, -0.75]
    """
    return (reward_adv_T - multiplier * cost_adv_T) / (1 + multiplier)


@dataclass(slots=True)
class LagrangeMultiplier:
    """Weight of the cost against the reward; it grows while the mean cost is above the limit.

    Gradient ascent on log(value) as in the paper, but without the factor `value` of its gradient: the step in
    log(value) does not depend on the value.

    Examples:
        >>> round(LagrangeMultiplier().update(mean_cost=0.5), 4)
        1.0513
    """

    value: float = 1.0
    """Current multiplier, positive: the only field that `update` changes."""

    lr: float = 0.1
    """Learning rate of log(value)."""

    maximum: float = 5.0

    limit: float = 0.0
    """Upper bound of the mean cost."""

    def __post_init__(self) -> None:
        if not 0 < self.value <= self.maximum:
            raise ValueError(f"LagrangeMultiplier needs a value above 0 and at most {self.maximum}, got {self.value}")

    def update(self, mean_cost: float) -> float:
        """Add lr * (mean_cost - limit) to log(value), clamp the value to `maximum`, and return it."""
        log_value = math.log(self.value) + self.lr * (mean_cost - self.limit)
        # In log space a product cannot overflow. Keep the value above 0: from 0 it could never grow again.
        value = math.exp(min(log_value, math.log(self.maximum)))
        self.value = min(max(value, sys.float_info.min), self.maximum)
        return self.value
