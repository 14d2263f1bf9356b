"""The formulas of `softmax_statistics.py` and `vocab_shard.py` as device functions for Triton kernels."""

from __future__ import annotations

import torch

from megarl_kernels.backend import jit, tl

LOWEST = torch.finfo(torch.float32).min


@jit
def score_logits(
    logits: tl.tensor, inv_temperature: tl.tensor, softcap: tl.tensor, HAS_SOFTCAP: tl.constexpr
) -> tl.tensor:
    """Return the scores of float32 logits."""
    if HAS_SOFTCAP:
        # tanh(y) = 2 sigmoid(2 y) - 1
        logits = softcap * (2.0 * tl.sigmoid(2.0 * logits / softcap) - 1.0)
    return logits * inv_temperature


@jit
def score_slopes(
    scores: tl.tensor, inv_temperature: tl.tensor, softcap: tl.tensor, HAS_SOFTCAP: tl.constexpr
) -> tl.tensor:
    """Return the derivatives of the scores by the logits."""
    slope = inv_temperature
    if HAS_SOFTCAP:
        tanh = scores / (softcap * inv_temperature)
        slope = (1.0 - tanh * tanh) * inv_temperature
    return slope


@jit
def score_gradients(
    scores: tl.tensor,
    is_target: tl.tensor,
    entropy: tl.tensor,
    log_z: tl.tensor,
    grad_logprobs: tl.tensor,
    grad_entropy: tl.tensor,
) -> tl.tensor:
    """Return the gradients by the scores; all tensors broadcast."""
    logprobs = scores - log_z
    grad = -tl.exp(logprobs) * (grad_logprobs + grad_entropy * (logprobs + entropy))
    return grad + tl.where(is_target, grad_logprobs, 0.0)
