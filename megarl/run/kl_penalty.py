"""Per-token KL penalty subtracted from rewards."""

from __future__ import annotations

from torch import Tensor

from megarl.config.algorithms.policy import KlRewardConfig, PolicyConfig
from megarl.functional import AdaptiveKl, kl_penalty
from megarl.groups.estimation.estimators import TokenBatch
from megarl.groups.estimation.grouped_metrics import Metric

KL_METRIC = "kl/reference"
"""Metric name: mean KL estimate per token, before the coefficient."""


def reward_kl_penalty(
    tokens: TokenBatch, algorithm: PolicyConfig, kl_coefficient: float
) -> tuple[Tensor | None, dict[str, Metric]]:
    """Return the [T] penalty of each token, or None without `kl_reward`, and its metrics."""
    if algorithm.kl_reward is None:
        return None, {}
    logprobs_T, ref_logprobs_T = tokens.columns["old_logprobs"], tokens.columns["ref_logprobs"]
    kl_T = kl_penalty(logprobs_T, ref_logprobs_T, kind=algorithm.kl_reward.kind)
    return kl_coefficient * kl_T, {KL_METRIC: tokens.token_mean(kl_T)}


def make_adaptive_kl(config: KlRewardConfig | None) -> AdaptiveKl | None:
    """Return the coefficient of the penalty, which moves if `config` has a target; None without a penalty."""
    if config is None:
        return None
    return AdaptiveKl(coefficient=config.coefficient, target=config.target or 1.0, horizon=config.horizon)
