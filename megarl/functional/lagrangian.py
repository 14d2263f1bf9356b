"""Rewards to gain under a bound on costs: Safe RLHF (arXiv 2310.12773). Shapes: T packed tokens."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass

from torch import Tensor


def safe_rlhf_advantages(reward_adv_T: Tensor, cost_adv_T: Tensor, *, multiplier: float) -> Tensor:
    """[T] (A_R - lambda A_C) / (1 + lambda) as its PPO-Lagrangian has it; lambda is the multiplier."""
    return (reward_adv_T - multiplier * cost_adv_T) / (1 + multiplier)


@dataclass(slots=True)
class LagrangeMultiplier:
    """What costs weigh against rewards: more while the mean cost is above the limit.

    The paper's ascent on the logarithm, without the factor `value` that its gradient has: log value moves by equal
    steps however large it is.

    >>> round(LagrangeMultiplier().update(mean_cost=0.5), 4)
    1.0513
    """

    value: float = 1.0
    """The state: the only field that changes. Positive."""

    lr: float = 0.1
    """Of log value."""

    maximum: float = 5.0

    limit: float = 0.0
    """The mean cost to stay below."""

    def __post_init__(self) -> None:
        if not 0 < self.value <= self.maximum:
            raise ValueError(f"a multiplier needs a value above 0 and at most {self.maximum}, got {self.value}")

    def update(self, mean_cost: float) -> float:
        """The new value: log value += lr * (mean_cost - limit), at most `maximum`."""
        log_value = math.log(self.value) + self.lr * (mean_cost - self.limit)
        # A product would overflow; and 0 would stay 0, whatever costs follow.
        value = math.exp(min(log_value, math.log(self.maximum)))
        self.value = min(max(value, sys.float_info.min), self.maximum)
        return self.value
