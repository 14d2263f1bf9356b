"""Estimates of KL(policy || reference) from sampled tokens, and what weight they get. Shapes: T packed tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megarl.config.algorithms.algorithm import KlKind
from megarl.functional.losses import MAX_LOG_RATIO

MAX_ERROR = 0.2
"""Relative distance from the target that counts at most in one update."""


def kl_penalty(logprobs_T: Tensor, ref_logprobs_T: Tensor, *, kind: KlKind) -> Tensor:
    """[T] an estimate per token from d = log pi - log pi_ref: `k1` d, `k2` d^2 / 2, `k3` e^-d - 1 + d.

    Differentiable in `logprobs_T` (Schulman, "Approximating KL Divergence", joschu.net/blog/kl-approx.html).
    """
    log_ratio_T = logprobs_T - ref_logprobs_T
    match kind:
        case "k1":
            return log_ratio_T
        case "k2":
            return log_ratio_T.square() / 2
        case "k3":
            log_ratio_T = log_ratio_T.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
            return torch.expm1(-log_ratio_T) + log_ratio_T


@dataclass(slots=True)
class AdaptiveKl:
    """A KL coefficient that follows a target (Ziegler et al., arXiv 1909.08593, section 2.2).

    >>> AdaptiveKl().update(kl=0.2, num_samples=256)
    0.00100512
    """

    coefficient: float = 1e-3
    """The state: the only field that changes."""

    target: float = 0.1
    """The KL to hold, in the unit of what `update` is given."""

    horizon: float = 10_000
    """Samples in which a KL far off changes the coefficient by about a fifth."""

    def update(self, kl: float, num_samples: int) -> float:
        """The new coefficient: times 1 + clip(kl / target - 1, -0.2, 0.2) * samples / horizon, and never below 0."""
        error = min(max(kl / self.target - 1, -MAX_ERROR), MAX_ERROR)
        self.coefficient *= max(1 + error * num_samples / self.horizon, 0.0)
        return self.coefficient
