"""The Triton kernels of `linear_logprob.py`.

The forward pass keeps a tile of logits in registers and adds it to the statistics of its rows. The backward pass
computes the tile again, and writes the gradient by some columns of the logits, for torch's matrix multiplications.

Shapes: t tokens, v columns of the vocabulary on this rank, h hidden size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megarl_kernels.backend import interpreted, jit, tl, triton
from megarl_kernels.softmax_statistics import OutputGradients, empty_statistics, merge
from megarl_kernels.softmax_triton import LOWEST, score_gradients, score_logits, score_slopes
from megarl_kernels.vocab_shard import VocabShard

BLOCK_T = BLOCK_V = 128
BLOCK_H = 64
"""Size of a tile of logits in a Triton program, and of a step along the hidden size in bfloat16. Not tuned."""
MIN_GRADIENT_COLUMNS = 1024
"""The backward pass multiplies matrices of at least so many columns."""


def triton_statistics(hidden: Tensor, weight: Tensor, targets: Tensor, shard: VocabShard) -> Tensor:
    """Return the softmax statistics [t, 4] of this rank's columns; the logits stay in registers."""
    t, columns = len(hidden), shard.valid_columns
    if not (t and columns):
        return empty_statistics(t, dtype=torch.float32, device=hidden.device)
    blocks = triton.cdiv(t, BLOCK_T)
    num_parts = min(triton.cdiv(columns, BLOCK_V), max(1, _num_programs(hidden.device) // blocks))
    columns_per_part = triton.cdiv(triton.cdiv(columns, num_parts), BLOCK_V) * BLOCK_V
    num_parts = triton.cdiv(columns, columns_per_part)
    parts = torch.empty(num_parts, t, 4, dtype=torch.float32, device=hidden.device)
    _statistics_kernel[(blocks, num_parts)](
        operand(hidden),
        operand(weight),
        targets - shard.start,
        parts,
        t,
        columns,
        hidden.shape[1],
        columns_per_part,
        shard.inv_temperature,
        shard.softcap or 0.0,
        HAS_SOFTCAP=shard.softcap is not None,
        PRECISION="ieee",
        LOWEST=LOWEST,
        BLOCK_T=BLOCK_T,
        BLOCK_V=BLOCK_V,
        BLOCK_H=BLOCK_H * 2 // hidden.element_size(),
        num_warps=8,
        num_stages=3,
    )
    return merge(parts)


def operand(matrix: Tensor) -> Tensor:
    """Return the matrix as the kernels read it: contiguous; float32 for the interpreter, whose dot has no bfloat16."""
    return matrix.float().contiguous() if interpreted() else matrix.contiguous()


def _num_programs(device: torch.device) -> int:
    """Return the number of programs that keep a device busy."""
    return 4 * torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 6


def triton_gradients_(
    weight_sum: Tensor | None,
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    shard: VocabShard,
    outputs: OutputGradients,
) -> Tensor:
    """Return the gradient of `hidden`, float32 [t, h], and add that of `weight` to `weight_sum` [v, h], if given.

    Computes the gradient by the logits for some columns at a time, in the dtype of the inputs, and multiplies it by
    torch's matrix multiplication.
    """
    t, h = hidden.shape
    hidden, weight, targets = hidden.contiguous(), weight.contiguous(), targets - shard.start
    grad_hidden = torch.zeros_like(hidden, dtype=torch.float32)
    if not t:
        return grad_hidden
    step = _gradient_columns(shard.valid_columns)
    for first in range(0, shard.valid_columns, step):
        columns = slice(first, min(first + step, shard.valid_columns))
        num_columns = columns.stop - first
        grad_logits = hidden.new_empty(t, num_columns)
        _gradient_kernel[(triton.cdiv(t, BLOCK_T), triton.cdiv(num_columns, BLOCK_V))](
            grad_logits,
            operand(hidden),
            operand(weight),
            targets,
            *outputs.tensors(),
            t,
            first,
            num_columns,
            h,
            shard.inv_temperature,
            shard.softcap or 0.0,
            HAS_SOFTCAP=shard.softcap is not None,
            PRECISION="ieee",
            BLOCK_T=BLOCK_T,
            BLOCK_V=BLOCK_V,
            BLOCK_H=BLOCK_H * 2 // hidden.element_size(),
            num_warps=8,
            num_stages=3,
        )
        _add_product_(grad_hidden, grad_logits, weight[columns])
        if weight_sum is not None:
            _add_product_(weight_sum[columns], grad_logits.t(), hidden)
    return grad_hidden


def _gradient_columns(columns: int) -> int:
    """Return the columns of a step of the backward pass: a 32nd of all, and at least `MIN_GRADIENT_COLUMNS`."""
    return max(MIN_GRADIENT_COLUMNS, -(-columns // (32 * BLOCK_V)) * BLOCK_V)


def _add_product_(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add the matrix product, accumulated in float32, to `total`; on CUDA in one step if that is float32."""
    if a.is_cuda and a.dtype != torch.float32 and total.dtype == torch.float32:
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    elif a.is_cuda and a.dtype != torch.float32:
        total.add_(torch.mm(a, b, out_dtype=torch.float32))
    else:
        total.add_(a.float() @ b.float())


@jit
def _tile_scores(
    hidden: tl.tensor,
    weight: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    num_rows: tl.tensor,
    num_columns: tl.tensor,
    h: tl.tensor,
    inv_temperature: tl.tensor,
    softcap: tl.tensor,
    HAS_SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_H: tl.constexpr,
) -> tl.tensor:
    """Return the float32 scores of a tile, [BLOCK_T, BLOCK_V]; rows and columns outside are those of logit 0."""
    logits = tl.zeros((BLOCK_T, BLOCK_V), tl.float32)
    for start in range(0, h, BLOCK_H):
        depth = start + tl.arange(0, BLOCK_H)
        x = tl.load(
            hidden + rows[:, None].to(tl.int64) * h + depth[None, :],
            mask=(rows < num_rows)[:, None] & (depth < h)[None, :],
            other=0.0,
        )
        w = tl.load(
            weight + columns[None, :].to(tl.int64) * h + depth[:, None],
            mask=(columns < num_columns)[None, :] & (depth < h)[:, None],
            other=0.0,
        )
        logits = tl.dot(x, w, logits, input_precision=PRECISION)
    return score_logits(logits, inv_temperature, softcap, HAS_SOFTCAP)


@jit
def _statistics_kernel(
    hidden: tl.tensor,
    weight: tl.tensor,
    targets: tl.tensor,
    parts: tl.tensor,
    num_rows: tl.tensor,
    num_columns: tl.tensor,
    h: tl.tensor,
    columns_per_part: tl.tensor,
    inv_temperature: tl.tensor,
    softcap: tl.tensor,
    HAS_SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
    LOWEST: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_H: tl.constexpr,
) -> None:
    """Write the statistics of a block of rows in one part of the columns.

    Programs of neighboring rows run at the same time, and read the same rows of the weight.
    """
    rows = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    part = tl.program_id(1)
    target = tl.load(targets + rows, mask=rows < num_rows, other=-1)
    m = tl.full((BLOCK_T,), LOWEST, tl.float32)
    s = tl.zeros((BLOCK_T,), tl.float32)
    u = tl.zeros((BLOCK_T,), tl.float32)
    found = tl.zeros((BLOCK_T,), tl.float32)
    end = tl.minimum((part + 1) * columns_per_part, num_columns)
    for start in range(part * columns_per_part, end, BLOCK_V):
        columns = start + tl.arange(0, BLOCK_V)
        x = _tile_scores(
            hidden, weight, rows, columns, num_rows, end, h, inv_temperature, softcap,
            HAS_SOFTCAP, PRECISION, BLOCK_T, BLOCK_V, BLOCK_H,
        )  # fmt: skip
        inside = (columns < end)[None, :]
        found += tl.sum(tl.where(inside & (columns[None, :] == target[:, None]), x, 0.0), axis=1)
        top = tl.maximum(m, tl.max(tl.where(inside, x, LOWEST), axis=1))
        shifted = tl.where(inside, x - top[:, None], 0.0)
        weights = tl.where(inside, tl.exp(shifted), 0.0)
        decay = tl.exp(m - top)
        u = decay * (u + (m - top) * s) + tl.sum(weights * shifted, axis=1)
        s = decay * s + tl.sum(weights, axis=1)
        m = top
    out = parts + (part * num_rows + rows).to(tl.int64) * 4
    tl.store(out, m, mask=rows < num_rows)
    tl.store(out + 1, s, mask=rows < num_rows)
    tl.store(out + 2, u, mask=rows < num_rows)
    tl.store(out + 3, found, mask=rows < num_rows)


@jit
def _gradient_kernel(
    grad_logits: tl.tensor,
    hidden: tl.tensor,
    weight: tl.tensor,
    targets: tl.tensor,
    entropy: tl.tensor,
    log_z: tl.tensor,
    grad_logprobs: tl.tensor,
    grad_entropy: tl.tensor,
    num_rows: tl.tensor,
    first: tl.tensor,
    num_columns: tl.tensor,
    h: tl.tensor,
    inv_temperature: tl.tensor,
    softcap: tl.tensor,
    HAS_SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_H: tl.constexpr,
) -> None:
    """Write a tile of the gradient by the logits of `num_columns` columns from `first` on."""
    rows = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    at = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    columns = first + at
    x = _tile_scores(
        hidden, weight, rows, columns, num_rows, first + num_columns, h, inv_temperature, softcap,
        HAS_SOFTCAP, PRECISION, BLOCK_T, BLOCK_V, BLOCK_H,
    )  # fmt: skip
    inside = rows < num_rows
    target = tl.load(targets + rows, mask=inside, other=-1)
    grad = score_gradients(
        x,
        columns[None, :] == target[:, None],
        tl.load(entropy + rows, mask=inside, other=0.0)[:, None],
        tl.load(log_z + rows, mask=inside, other=0.0)[:, None],
        tl.load(grad_logprobs + rows, mask=inside, other=0.0)[:, None],
        tl.load(grad_entropy + rows, mask=inside, other=0.0)[:, None],
    )
    grad *= score_slopes(x, inv_temperature, softcap, HAS_SOFTCAP)
    tl.store(
        grad_logits + rows[:, None].to(tl.int64) * num_columns + at[None, :],
        grad.to(grad_logits.dtype.element_ty),
        mask=inside[:, None] & (at < num_columns)[None, :],
    )
