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
from megarl_kernels.softmax_triton import LOWEST, score_gradients, score_logits, score_slopes
from megarl_kernels.vocab_shard import VocabShard

TILE_ELEMENTS = 2**21
"""The reference converts so many logits to float32 at a time: 8 MiB."""
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
        statistics = merge_ranks(_statistics(logits, targets, shard), shard.group)
        logprobs, entropy, log_z = finish(statistics)
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
        write_gradient = triton_gradient_ if uses_triton(logits) else reference_gradient_
        write_gradient(logits, targets, ctx.shard, outputs)
        return logits, None, None


def _statistics(logits: Tensor, targets: Tensor, shard: VocabShard) -> Tensor:
    return (triton_statistics if uses_triton(logits) else reference_statistics)(logits, targets, shard)


def reference_statistics(logits: Tensor, targets: Tensor, shard: VocabShard) -> Tensor:
    """Return the softmax statistics [t, 4] of this rank's columns."""
    dtype = torch.promote_types(logits.dtype, torch.float32)
    statistics = empty_statistics(len(logits), dtype=dtype, device=logits.device)
    for rows in _row_ranges(logits, shard):
        scores = shard.scores_(logits[rows, : shard.valid_columns].to(dtype, copy=True))
        add_tile_(statistics[rows], scores, targets[rows] - shard.start)
    return statistics


def reference_gradient_(
    logits: Tensor,
    targets: Tensor,
    shard: VocabShard,
    outputs: OutputGradients,
) -> None:
    """Overwrite `logits` with their gradient."""
    logits[:, shard.valid_columns :] = 0.0
    for rows in _row_ranges(logits, shard):
        tile = logits[rows, : shard.valid_columns]
        grad = gradient_(
            shard.scores_(tile.to(outputs.log_z.dtype)),  # in place where the dtype is the same
            targets[rows] - shard.start,
            shard,
            outputs[rows],
        )
        tile.copy_(grad)


def _row_ranges(logits: Tensor, shard: VocabShard) -> Iterator[slice]:
    """Yield the rows of each tile of about `TILE_ELEMENTS`; none if all columns are padding."""
    step = max(1, TILE_ELEMENTS // max(1, shard.valid_columns))
    starts = range(0, len(logits), step) if shard.valid_columns else ()
    return (slice(start, start + step) for start in starts)


def triton_statistics(logits: Tensor, targets: Tensor, shard: VocabShard) -> Tensor:
    """Return the softmax statistics [t, 4] of this rank's columns; reads the logits once."""
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


def triton_gradient_(
    logits: Tensor,
    targets: Tensor,
    shard: VocabShard,
    outputs: OutputGradients,
) -> None:
    """Overwrite `logits` with their gradient; reads and writes them once."""
    logits[:, shard.valid_columns :] = 0.0
    if not (len(logits) and shard.valid_columns):
        return
    _gradient_kernel[(len(logits), triton.cdiv(shard.valid_columns, BLOCK))](
        logits,
        targets - shard.start,
        *outputs.tensors(),
        logits.stride(0),
        shard.valid_columns,
        shard.inv_temperature,
        shard.softcap or 0.0,
        HAS_SOFTCAP=shard.softcap is not None,
        BLOCK=BLOCK,
        num_warps=8,
    )


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
    """Write the statistics of one row; `targets` are relative to this rank's first column."""
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets + row)
    m = tl.full((), LOWEST, tl.float32)
    s = tl.zeros((), tl.float32)
    u = tl.zeros((), tl.float32)
    found = tl.zeros((), tl.float32)
    for start in range(0, columns, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < columns
        x = tl.load(logits + row * row_stride + at, mask=inside, other=0.0).to(tl.float32)
        x = score_logits(x, inv_temperature, softcap, HAS_SOFTCAP)
        found += tl.sum(tl.where(inside & (at == target), x, 0.0), axis=0)
        top = tl.maximum(m, tl.max(tl.where(inside, x, LOWEST), axis=0))
        shifted = tl.where(inside, x - top, 0.0)
        weights = tl.where(inside, tl.exp(shifted), 0.0)
        decay = tl.exp(m - top)
        u = decay * (u + (m - top) * s) + tl.sum(weights * shifted, axis=0)
        s = decay * s + tl.sum(weights, axis=0)
        m = top
    out = statistics + row * 4
    tl.store(out, m)
    tl.store(out + 1, s)
    tl.store(out + 2, u)
    tl.store(out + 3, found)


@jit
def _gradient_kernel(
    logits: tl.tensor,
    targets: tl.tensor,
    entropy: tl.tensor,
    log_z: tl.tensor,
    grad_logprobs: tl.tensor,
    grad_entropy: tl.tensor,
    row_stride: tl.tensor,
    columns: tl.tensor,
    inv_temperature: tl.tensor,
    softcap: tl.tensor,
    HAS_SOFTCAP: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Overwrite a block of one row of the logits with its gradient."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < columns
    pointers = logits + row * row_stride + at
    x = tl.load(pointers, mask=inside, other=0.0).to(tl.float32)
    x = score_logits(x, inv_temperature, softcap, HAS_SOFTCAP)
    grad = score_gradients(
        x,
        at == tl.load(targets + row),
        tl.load(entropy + row),
        tl.load(log_z + row),
        tl.load(grad_logprobs + row),
        tl.load(grad_entropy + row),
    )
    grad *= score_slopes(x, inv_temperature, softcap, HAS_SOFTCAP)
    tl.store(pointers, grad.to(logits.dtype.element_ty), mask=inside)
