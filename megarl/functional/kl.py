"""KL(policy || reference) estimators on sampled tokens, and the adaptive KL coefficient. Shapes: T packed tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megarl.config.policy import KlKind
from megarl.functional.losses import clamp_log_ratio

MAX_ERROR = 0.2
"""Relative distance from the target is clipped to this in each update."""


def kl_penalty(logprobs_T: Tensor, ref_logprobs_T: Tensor, *, kind: KlKind) -> Tensor:
    """[T] KL estimate per token from d = log pi - log pi_ref: `k1` d, `k2` d^2 / 2, `k3` e^-d - 1 + d.

    Differentiable in `logprobs_T` (Schulman, "Approximating KL Divergence", joschu.net/blog/kl-approx.html).

    Examples:
        >>> kl_penalty(torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -2.0]), kind="k1").tolist()
        [0.5, 0.0]
    """
    log_ratio_T = logprobs_T - ref_logprobs_T
    match kind:
        case "k1":
            return log_ratio_T
        case "k2":
            return log_ratio_T.square() / 2
        case "k3":
            log_ratio_T = clamp_log_ratio(log_ratio_T)
            return torch.expm1(-log_ratio_T) + log_ratio_T


@dataclass(slots=True)
class AdaptiveKl:
    """A KL coefficient that adapts to a target KL (Ziegler et al., arXiv 1909.08593, section 2.2).

    Examples:
        >>> AdaptiveKl().update(kl=0.2, num_samples=256)
        0.00100512
    """

    coefficient: float = 1e-3
    """Current coefficient: the only field that `update` changes."""

    target: float = 0.1
    """Target KL, in the unit of the values passed to `update`."""

    horizon: float = 10_000
    """Number of samples after which a KL far from the target has changed the coefficient by about 20%."""

    def update(self, kl: float, num_samples: int) -> float:
        """Multiply `coefficient` by max(0, 1 + clip(kl / target - 1, -0.2, 0.2) * num_samples / horizon).."""
        error = min(max(kl / self.target - 1, -MAX_ERROR), MAX_ERROR)
        self.coefficient *= max(1 + error * num_samples / self.horizon, 0.0)
        return self.coefficient
