"""Tables of boxes of many tensors, and what is computed from them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megarl.errors import WeightSyncError
from megarl.reshard.layout.layout import PieceTable, TensorSpec, WeightLayout, widen

Ints = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Boxes:
    """N boxes of many tensors, sorted by tensor: arrays [N], or [N, D] with D the largest number of dimensions."""

    tensor: Ints
    """Index of the tensor in `SyncIndex.names`."""
    start: Ints
    stop: Ints
    shift: Ints
    """Offset from the box's coordinates to its coordinates in the local tensor."""
    local: Ints
    """Index of the local tensor's name."""

    def take(self, rows: Ints) -> Boxes:
        """Return the boxes of the given rows."""
        return Boxes(*(getattr(self, name)[rows] for name in Boxes.__slots__))


def intersections(need: Boxes, held: Boxes, start: Ints, count: Ints) -> tuple[Ints, Ints, Ints, Ints]:
    """Return all pairs of boxes that share elements: rows of `need`, rows of `held`, start and stop of the overlap.

    Args:
        start: by tensor, its first row in `held`.
        count: by tensor, its number of rows in `held`.
    """
    at, of = pair_by_tensor(need, start, count)
    low = np.maximum(need.start[at], held.start[of])
    high = np.minimum(need.stop[at], held.stop[of])
    some = all_columns(low < high)
    return at[some], of[some], low[some], high[some]


def pair_by_tensor(boxes: Boxes, start: Ints, count: Ints) -> tuple[Ints, Ints]:
    """Pair every row of `boxes` with every row of the other table that belongs to the same tensor."""
    return count_up(start[boxes.tensor], count[boxes.tensor])


def count_up(first: Ints | int, count: Ints) -> tuple[Ints, Ints]:
    """Return, for all of N runs of consecutive numbers, the index of the run that each number is in, and the numbers.

    Args:
        first: [N], the first number of each run.
        count: [N], how many there are.
    """
    run = np.repeat(np.arange(len(count)), count)
    return run, np.arange(len(run)) + np.repeat(first + count - np.cumsum(count), count)


def extents(tensor: Ints, count: int) -> tuple[Ints, Ints]:
    """Return, by tensor, its first row in the sorted array `tensor` and its number of rows there."""
    starts = np.searchsorted(tensor, np.arange(count + 1))
    return starts[:-1], np.diff(starts)


def volumes(start: Ints, stop: Ints) -> Ints:
    """Return the number of elements [N] of boxes, whose start and stop are [N, D]."""
    return reduce(np.multiply, np.subtract(stop, start, dtype=np.int64).T)  # much faster than `prod` over few columns


def all_columns(mask: Ints) -> Ints:
    """Return, by row of a mask [N, D], whether all are true: bool."""
    return reduce(np.logical_and, mask.T)


def concatenate(tables: Sequence[Boxes], width: int) -> Boxes:
    """Return the boxes of all tables, one table after another; `width` is their number of dimensions."""
    if not tables:
        nothing, flat = np.zeros((0, width), np.int64), np.zeros(0, np.int64)
        return Boxes(flat, nothing, nothing, nothing, flat)
    return Boxes(*(np.concatenate([getattr(t, name) for t in tables]) for name in Boxes.__slots__))


def local_extents(table: PieceTable, width: int) -> Ints:
    """Return the sizes [num locals, width] of the local tensors of a layout, as far as its pieces reach."""
    extent = np.ones((len(table.locals), width), np.int64)
    np.maximum.at(extent, table.local, widen(table.local_boxes, width)[:, :width, 1])
    return extent


def hash_rows(columns: Sequence[Ints]) -> Ints:
    """Return a 64-bit hash per row of the columns."""
    out = np.zeros(len(columns[0]), np.uint64)
    for column in columns:
        x = out ^ column.astype(np.uint64)
        x = (x ^ (x >> np.uint64(33))) * np.uint64(0xFF51AFD7ED558CCD)
        x = (x ^ (x >> np.uint64(29))) * np.uint64(0x9E3779B97F4A7C15)
        out = x ^ (x >> np.uint64(32))
    return out


def check_dtypes(sides: Mapping[str, Iterable[WeightLayout]]) -> None:
    """Raise WeightSyncError if a tensor of which layouts hold pieces has another dtype in one of them.

    Args:
        sides: by name of a side, for messages, its layouts.
    """
    layouts_of = {side: list(layouts) for side, layouts in sides.items()}
    if len({layout.tensors.digest for layouts in layouts_of.values() for layout in layouts}) <= 1:
        return
    found: dict[str, tuple[str, str]] = {}
    for side, layouts in layouts_of.items():
        for tensors, names in _names_held(layouts):
            for name in names:
                dtype = tensors[name].dtype
                first_side, first_dtype = found.setdefault(name, (side, dtype))
                if dtype != first_dtype:
                    raise WeightSyncError(f"{name}: the {first_side} hold {first_dtype}, the {side} {dtype}")


def _names_held(layouts: Iterable[WeightLayout]) -> list[tuple[Mapping[str, TensorSpec], list[str]]]:
    """Return the distinct specs of the layouts, each with the names of the tensors that its layouts hold pieces of."""
    marks: dict[tuple[int, int], tuple[WeightLayout, Ints]] = {}
    for layout in layouts:
        table = layout.pieces
        _, held = marks.setdefault(
            (id(layout.tensors), id(table.tensors)), (layout, np.zeros(len(table.tensors), bool))
        )
        held[table.tensor] = True
    return [
        (layout.tensors, [layout.tensors.names[number] for number in np.flatnonzero(held).tolist()])
        for layout, held in marks.values()
    ]
