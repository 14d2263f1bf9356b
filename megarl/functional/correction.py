"""Importance weights that correct for the mismatch between rollout engine and trainer log-probs.

Shapes: T packed tokens, S sequences.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from megarl.functional.losses import clamp_log_ratio
from megarl.functional.sequences import Sequences

CorrectionKind = Literal["token_tis", "sequence_tis", "icepop", "geometric_mask"]


@dataclass(frozen=True, slots=True)
class CorrectionOutput:
    """Weights of the token losses. Means still divide by the token count of the loss mask, not of `keep_T`.

    Examples:
        >>> ratios_T, sequences = torch.tensor([1.0, 8.0]), Sequences.of(torch.tensor([0, 2]))
        >>> output = rollout_correction(
        ...     ratios_T.log(), torch.zeros(2), torch.tensor([True, True]), sequences, kind="icepop", low=0.5, high=5.0
        ... )
        >>> output.weights_T.tolist(), output.keep_T.tolist()
        ([1.0, 0.0], [True, False])
    """

    weights_T: Tensor
    """[T] weights, detached; 0 where `keep_T` is False."""

    keep_T: Tensor
    """bool [T] loss mask without the tokens that the correction drops."""


@torch.no_grad()
def rollout_correction(
    old_logprobs_T: Tensor,
    rollout_logprobs_T: Tensor,
    mask_T: Tensor,
    sequences: Sequences,
    *,
    kind: CorrectionKind,
    low: float,
    high: float,
) -> CorrectionOutput:
    """Weights from the ratio w = pi_old / pi_rollout of trainer to engine probability of each sampled token.

    `token_tis`: min(w, high), truncated importance sampling (fengyao.notion.site/off-policy-rl).
    `sequence_tis`: min(product of w over the sequence, high), on each of its tokens.
    `icepop`: w where low <= w <= high, else 0 (arXiv 2510.18855).
    `geometric_mask`: 1 in sequences whose geometric mean of w is within [low, high], else 0.

    Examples:
        >>> ratios_T, sequences = torch.tensor([0.5, 1.0, 8.0]), Sequences.of(torch.tensor([0, 3]))
        >>> output = rollout_correction(
        ...     ratios_T.log(), torch.zeros(3), torch.ones(3).bool(), sequences, kind="token_tis", low=0.0, high=2.0
        ... )
        >>> output.weights_T.tolist()
        [0.5, 1.0, 2.0]

    Args:
        low: lower bound of `icepop` and `geometric_mask`; the truncating kinds ignore it.
    """
    log_ratio_T = torch.where(mask_T, old_logprobs_T - rollout_logprobs_T, torch.zeros_like(old_logprobs_T))
    match kind:
        case "token_tis":
            weights_T, keep_T = _exp(log_ratio_T).clamp(max=high), mask_T
        case "sequence_tis":
            weights_T, keep_T = sequences.spread(_exp(sequences.sum(log_ratio_T)).clamp(max=high)), mask_T
        case "icepop":
            weights_T = _exp(log_ratio_T)
            keep_T = mask_T & _within(weights_T, low, high)
        case "geometric_mask":
            weights_T = torch.ones_like(log_ratio_T)
            mean_S = _exp(sequences.mean(log_ratio_T, mask_T))
            keep_T = mask_T & sequences.spread(_within(mean_S, low, high))
    return CorrectionOutput(torch.where(keep_T, weights_T, torch.zeros_like(weights_T)), keep_T)


def _exp(log_ratio: Tensor) -> Tensor:
    return clamp_log_ratio(log_ratio).exp()


def _within(ratio: Tensor, low: float, high: float) -> Tensor:
    return (ratio >= low) & (ratio <= high)
