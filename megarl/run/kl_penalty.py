"""What rewards lose where the policy leaves the reference model."""

from __future__ import annotations

from torch import Tensor

from megarl.config.algorithms.algorithm import PolicyConfig
from megarl.functional import kl_penalty
from megarl.groups.estimation import StepTokens

KL = "kl/reference"
"""Mean over tokens of the divergence's estimate."""


def penalty(
    tokens: StepTokens, algorithm: PolicyConfig, kl_coefficient: float
) -> tuple[Tensor | None, dict[str, float]]:
    """[T] of each token, None where rewards lose nothing; and its mean before the coefficient."""
    if algorithm.kl_reward is None:
        return None, {}
    logprobs_T, ref_logprobs_T = tokens.columns["old_logprobs"], tokens.columns["ref_logprobs"]
    kl_T = kl_penalty(logprobs_T, ref_logprobs_T, kind=algorithm.kl_reward.kind)
    return kl_coefficient * kl_T, {KL: tokens.mean(kl_T)}
