"""Linear recurrence from the end to the start, as in generalized advantage estimation. Shape: t elements."""

from __future__ import annotations

import torch
from torch import Tensor

from megarl_kernels.backend import jit, tl, triton, uses_triton

BLOCK = 2048
"""Elements of a Triton program."""


def segmented_reverse_scan(b: Tensor, a: Tensor) -> Tensor:
    """Return x [t] with x_i = b_i + a_i x_{i+1}, and x = 0 after the last element.

    A factor of 0 at the last element of each segment, such as a sequence, separates it from the next one. The result
    is as exact as the dtype: factors are multiplied, never divided by.

    Args:
        b: [t], float32 or float64.
        a: [t], of the same dtype.

    Raises:
        ValueError: `b` and `a` are not vectors of one length and dtype.
    """
    if b.ndim != 1 or a.shape != b.shape or a.dtype != b.dtype or b.dtype not in (torch.float32, torch.float64):
        raise ValueError(
            f"b and a need one shape [t] and dtype, float32 or float64, got {list(b.shape)} {b.dtype} and "
            f"{list(a.shape)} {a.dtype}"
        )
    return (_triton_scan if uses_triton(b) else _reference_scan)(b, a)


def _reference_scan(b: Tensor, a: Tensor) -> Tensor:
    """Double the distance of the element that each x includes, log2(t) times."""
    x, product, step = b.clone(), a, 1
    while step < len(x):
        x = torch.cat([x[:-step] + product[:-step] * x[step:], x[-step:]])
        product = torch.cat([product[:-step] * product[step:], torch.zeros_like(x[-step:])])
        step *= 2
    return x


def _triton_scan(b: Tensor, a: Tensor) -> Tensor:
    """Solve each block as if nothing followed, then the recurrence over blocks, then each block with what follows."""
    t = len(b)
    num_blocks = triton.cdiv(t, BLOCK)
    b, a, x = b.contiguous(), a.contiguous(), torch.empty_like(b)
    heads = torch.empty(2, num_blocks, dtype=b.dtype, device=b.device)
    if num_blocks > 1:
        _block_heads_kernel[(num_blocks,)](b, a, heads, t, num_blocks, BLOCK=BLOCK)
        following = _triton_scan(heads[0], heads[1])
    else:
        following = heads[0]
    if t:
        _scan_kernel[(num_blocks,)](b, a, following, x, t, num_blocks, BLOCK=BLOCK)
    return x


@jit
def _combine(x: tl.tensor, product: tl.tensor, x_before: tl.tensor, product_before: tl.tensor) -> tl.tensor:
    """Return the solution at an earlier element, given that of the elements between it and a later one."""
    return x_before + product_before * x, product_before * product


@jit
def _local_scan(b: tl.tensor, a: tl.tensor, t: tl.tensor, BLOCK: tl.constexpr) -> tl.tensor:
    """Return positions, solutions and products of factors to the end of the block."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < t
    x, product = tl.associative_scan(
        (tl.load(b + at, mask=inside, other=0.0), tl.load(a + at, mask=inside, other=0.0)), 0, _combine, reverse=True
    )
    return at, x, product


@jit
def _block_heads_kernel(
    b: tl.tensor, a: tl.tensor, heads: tl.tensor, t: tl.tensor, num_blocks: tl.tensor, BLOCK: tl.constexpr
) -> None:
    """Write the first solution and product of a block."""
    at, x, product = _local_scan(b, a, t, BLOCK)
    first = at == tl.program_id(0).to(tl.int64) * BLOCK
    place = heads + tl.program_id(0)
    tl.store(place, tl.sum(tl.where(first, x, 0.0), axis=0))
    tl.store(place + num_blocks, tl.sum(tl.where(first, product, 0.0), axis=0))


@jit
def _scan_kernel(
    b: tl.tensor,
    a: tl.tensor,
    following: tl.tensor,
    x: tl.tensor,
    t: tl.tensor,
    num_blocks: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Write the solutions of a block; `following` has the first of each block."""
    at, local, product = _local_scan(b, a, t, BLOCK)
    block = tl.program_id(0)
    carry = tl.load(following + block + 1, mask=block + 1 < num_blocks, other=0.0)
    tl.store(x + at, local + product * carry, mask=at < t)
