"""Log-probability and entropy from logits that are not needed afterwards.

Shapes: t tokens, v columns of the vocabulary on this rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from megarl_kernels.backend import jit, tl, triton, uses_triton
from megarl_kernels.softmax_statistics import (
    OutputGradients,
    add_tile_,
    empty_statistics,
    finish,
    gradient_,
    merge_ranks,
)
from megarl_kernels.vocab_shard import VocabShard

TILE_ELEMENTS = 2**21
"""The reference converts so many logits to float32 at a time: 8 MiB."""
LOWEST = torch.finfo(torch.float32).min
BLOCK = 4096
"""Number of columns that a Triton program reads at a time."""


def logprob_entropy_(
    logits: Tensor,
    targets: Tensor,
    *,
    vocab_start: int,
    valid_columns: int,
    inv_temperature: float = 1.0,
    softcap: float | None = None,
    group: dist.ProcessGroup | None = None,
) -> tuple[Tensor, Tensor]:
    """Return log-probabilities and entropies in nats, float32 [t] each, of the softmax of the logits' scores.

    Differentiable in both results. Takes over the memory of `logits`: the backward pass writes their gradient into it,
    in their dtype, so that no second tensor [t, v] is made. A second backward pass is an error. The computation is in
    float32, in float64 for float64 logits.

    Under tensor parallelism, each rank passes its own columns, and all ranks get the same results, with one all-gather.

    Args:
        logits: [t, v], before softcap and temperature; finite where not padding.
        targets: int64 [t], vocabulary ids below the size of the vocabulary; each is in one rank's valid columns.
        vocab_start: vocabulary id of this rank's first column.
        valid_columns: number of this rank's columns that are not padding; the others have gradient 0.
        inv_temperature: factor of the logits, after the softcap.
        softcap: logits become softcap * tanh(logits / softcap).
        group: ranks that hold the other columns.

    Raises:
        ValueError: shapes or dtypes of the tensors do not fit together.
    """
    shard = VocabShard(
        start=vocab_start,
        valid_columns=valid_columns,
        inv_temperature=inv_temperature,
        softcap=softcap,
        group=group,
    )
    if logits.ndim != 2:
        raise ValueError(f"logits need to be [t, v], got {list(logits.shape)}")
    shard.check(logits.shape[1], targets, len(logits))
    logprobs, entropy = _LogprobEntropy.apply(logits, targets, shard)  # type: ignore[no-untyped-call]
    return logprobs, entropy


class _LogprobEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, shard: VocabShard) -> tuple[Tensor, Tensor]:
        logprobs, entropy, log_z = finish(merge_ranks(statistics_of(logits, targets, shard), shard.group))
        ctx.save_for_backward(logits, targets, entropy, log_z)
        ctx.shard = shard
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, None, None]:
        grad_logprobs, grad_entropy = grads
        if grad_logprobs is None and grad_entropy is None:
            return None, None, None
        logits, targets, entropy, log_z = ctx.saved_tensors  # raises if a backward pass has overwritten the logits
        outputs = OutputGradients(entropy=entropy, log_z=log_z, grad_logprobs=grad_logprobs, grad_entropy=grad_entropy)
        write_gradient(logits, logits, targets, ctx.shard, outputs)
        return logits, None, None


def statistics_of(logits: Tensor, targets: Tensor, shard: VocabShard) -> Tensor:
    """Return the softmax statistics [t, 4] of the shard's columns."""
    return (_triton_statistics if uses_triton(logits) else _reference_statistics)(logits, targets, shard)


def write_gradient(out: Tensor, logits: Tensor, targets: Tensor, shard: VocabShard, outputs: OutputGradients) -> None:
    """Write the gradient by the logits to `out`, [t, v] in its own dtype; it may be `logits` itself."""
    write = _triton_gradient if uses_triton(logits) else _reference_gradient
    write(out, logits, targets, shard, outputs)


def _reference_statistics(logits: Tensor, targets: Tensor, shard: VocabShard) -> Tensor:
    dtype = torch.promote_types(logits.dtype, torch.float32)
    statistics = empty_statistics(len(logits), dtype=dtype, device=logits.device)
    for rows in _row_ranges(logits, shard):
        scores = shard.scores_(logits[rows, : shard.valid_columns].to(dtype, copy=True))
        add_tile_(statistics[rows], scores, targets[rows] - shard.start)
    return statistics


def _reference_gradient(
    out: Tensor, logits: Tensor, targets: Tensor, shard: VocabShard, outputs: OutputGradients
) -> None:
    out[:, shard.valid_columns :] = 0.0
    for rows in _row_ranges(logits, shard):
        tile = logits[rows, : shard.valid_columns].to(outputs.log_z.dtype, copy=out is not logits)
        grad = gradient_(shard.scores_(tile), targets[rows] - shard.start, shard, outputs[rows])
        out[rows, : shard.valid_columns] = grad


def _row_ranges(logits: Tensor, shard: VocabShard) -> Iterator[slice]:
    """Yield the rows of each tile of about `TILE_ELEMENTS`; none if all columns are padding."""
    step = max(1, TILE_ELEMENTS // max(1, shard.valid_columns))
    starts = range(0, len(logits), step) if shard.valid_columns else ()
    return (slice(start, start + step) for start in starts)


def _triton_statistics(logits: Tensor, targets: Tensor, shard: VocabShard) -> Tensor:
    """Read the logits once."""
    statistics = empty_statistics(len(logits), dtype=torch.float32, device=logits.device)
    if len(logits) and shard.valid_columns:
        assert logits.stride(1) == 1, logits.stride()
        _statistics_kernel[(len(logits),)](
            logits,
            targets - shard.start,
            statistics,
            logits.stride(0),
            shard.valid_columns,
            shard.inv_temperature,
            shard.softcap or 0.0,
            HAS_SOFTCAP=shard.softcap is not None,
            LOWEST=LOWEST,
            BLOCK=BLOCK,
            num_warps=8,
        )
    return statistics


def _triton_gradient(out: Tensor, logits: Tensor, targets: Tensor, shard: VocabShard, outputs: OutputGradients) -> None:
    """Read the logits and write their gradient once."""
    out[:, shard.valid_columns :] = 0.0
    if not (len(logits) and shard.valid_columns):
        return
    assert logits.stride(1) == out.stride(1) == 1, (logits.stride(), out.stride())
    _gradient_kernel[(len(logits), triton.cdiv(shard.valid_columns, BLOCK))](
        out,
        logits,
        targets - shard.start,
        *outputs.tensors(),
        out.stride(0),
        logits.stride(0),
        shard.valid_columns,
        shard.inv_temperature,
        shard.softcap or 0.0,
        HAS_SOFTCAP=shard.softcap is not None,
        BLOCK=BLOCK,
        num_warps=8,
    )


@jit
def _score_logits(
    logits: tl.tensor, inv_temperature: tl.tensor, softcap: tl.tensor, HAS_SOFTCAP: tl.constexpr
) -> tl.tensor:
    """Return the scores of float32 logits."""
    if HAS_SOFTCAP:
        # tanh(y) = 2 sigmoid(2 y) - 1
        logits = softcap * (2.0 * tl.sigmoid(2.0 * logits / softcap) - 1.0)
    return logits * inv_temperature


@jit
def _score_slopes(
    scores: tl.tensor, inv_temperature: tl.tensor, softcap: tl.tensor, HAS_SOFTCAP: tl.constexpr
) -> tl.tensor:
    """Return the derivatives of the scores by the logits."""
    slope = inv_temperature
    if HAS_SOFTCAP:
        tanh = scores / (softcap * inv_temperature)
        slope = (1.0 - tanh * tanh) * inv_temperature
    return slope


@jit
def _score_gradients(
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


@jit
def _statistics_kernel(
    logits: tl.tensor,
    targets: tl.tensor,
    statistics: tl.tensor,
    row_stride: tl.tensor,
    columns: tl.tensor,
    inv_temperature: tl.tensor,
    softcap: tl.tensor,
    HAS_SOFTCAP: tl.constexpr,
    LOWEST: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Write the statistics of one row; `targets` are relative to this rank's first column.

    Each lane has the statistics of its own columns, which are reduced once, at the end of the row.
    """
    row = tl.program_id(0).to(tl.int64)
    logits += row * row_stride
    m = tl.full((BLOCK,), LOWEST, tl.float32)
    s = tl.zeros((BLOCK,), tl.float32)
    u = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, columns, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < columns
        x = tl.load(logits + at, mask=inside, other=0.0).to(tl.float32)
        x = _score_logits(x, inv_temperature, softcap, HAS_SOFTCAP)
        rise = x - m
        is_top = inside & (rise > 0)
        # of the old largest score or of this one, relative to the other
        weight = tl.exp(-tl.abs(rise))
        u = tl.where(is_top, weight * (u - rise * s), tl.where(inside, u + rise * weight, u))
        s = tl.where(is_top, weight * s + 1.0, tl.where(inside, s + weight, s))
        m = tl.where(is_top, x, m)
    top = tl.max(m, axis=0)
    change = m - top
    decay = tl.exp(change)
    target = tl.load(targets + row)
    is_here = (target >= 0) & (target < columns)
    found = tl.load(logits + target, mask=is_here, other=0.0).to(tl.float32)
    out = statistics + row * 4
    tl.store(out, top)
    tl.store(out + 1, tl.sum(decay * s, axis=0))
    tl.store(out + 2, tl.sum(decay * (u + change * s), axis=0))
    tl.store(out + 3, _score_logits(found, inv_temperature, softcap, HAS_SOFTCAP))


@jit
def _gradient_kernel(
    out: tl.tensor,
    logits: tl.tensor,
    targets: tl.tensor,
    entropy: tl.tensor,
    log_z: tl.tensor,
    grad_logprobs: tl.tensor,
    grad_entropy: tl.tensor,
    out_stride: tl.tensor,
    row_stride: tl.tensor,
    columns: tl.tensor,
    inv_temperature: tl.tensor,
    softcap: tl.tensor,
    HAS_SOFTCAP: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Write the gradient by a block of one row of the logits."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < columns
    x = tl.load(logits + row * row_stride + at, mask=inside, other=0.0).to(tl.float32)
    x = _score_logits(x, inv_temperature, softcap, HAS_SOFTCAP)
    grad = _score_gradients(
        x,
        at == tl.load(targets + row),
        tl.load(entropy + row),
        tl.load(log_z + row),
        tl.load(grad_logprobs + row),
        tl.load(grad_entropy + row),
    )
    grad *= _score_slopes(x, inv_temperature, softcap, HAS_SOFTCAP)
    tl.store(out + row * out_stride + at, grad.to(out.dtype.element_ty), mask=inside)
