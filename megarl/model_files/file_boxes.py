"""Byte ranges of a box of a tensor that is stored in row-major order.

tensor [3, 8], box ((1, 3), (2, 6))      runs (10, 4), (18, 4)

. . . . . . . .
. . x x x x . .
. . x x x x . .
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from math import prod

Box = tuple[tuple[int, int], ...]
"""Half-open (start, stop) per dimension."""


def extent(box: Box) -> tuple[int, ...]:
    """Return the shape of the box."""
    return tuple(stop - start for start, stop in box)


def contiguous_runs(shape: tuple[int, ...], box: Box) -> Iterator[tuple[int, int]]:
    """Yield first element and length, in elements, of each contiguous run of `box` in a row-major tensor of `shape`."""
    lengths = extent(box)
    if not all(lengths):
        return
    strides = [prod(shape[dim + 1 :]) for dim in range(len(shape))]
    partial = [dim for dim, n in enumerate(shape) if lengths[dim] < n]
    last = partial[-1] if partial else 0  # the box covers every later dimension completely
    first = sum(box[dim][0] * strides[dim] for dim in range(last, len(shape)))
    outer = [range(box[dim][0] * strides[dim], box[dim][1] * strides[dim], strides[dim]) for dim in range(last)]
    for start in product(*outer):
        yield first + sum(start), prod(lengths[last:])


def split_box(box: Box, limit: int) -> Iterator[Box]:
    """Split `box` into boxes of at most `limit` elements, in row-major order."""
    lengths = extent(box)
    if prod(lengths) <= limit:
        yield box
        return
    dim = next(dim for dim, n in enumerate(lengths) if n > 1)
    start, stop = box[dim]
    step = max(1, limit // prod(lengths[dim + 1 :]))
    for low in range(start, stop, step):
        yield from split_box((*box[:dim], (low, min(low + step, stop)), *box[dim + 1 :]), limit)


def relative_slices(box: Box, outer: Box) -> tuple[slice, ...]:
    """Return the slices that select `box` from a tensor that holds `outer`, which contains it."""
    return tuple(slice(start - low, stop - low) for (start, stop), (low, _) in zip(box, outer, strict=True))
