"""Overlap in bytes between what each engine rank needs and what each trainer rank holds, for all pairs at once.

There are few distinct layouts even for many ranks, and a trainer rank's layout is small where an engine rank's is
large: the engine ranks' boxes are sorted by tensor once, and each distinct trainer layout looks its tensors up there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain

import numpy as np

from megarl.model_files.header import itemsize
from megarl.reshard.layout.layout import (
    Boxes,
    Ints,
    WeightLayout,
    concatenate,
    extents,
    hash_rows,
    intersections,
    volumes,
    widen,
)
from megarl.reshard.layout.relay_tree import Ranks

HASH_BITS = 22
"""Leading hash bits compared first: enough that few of a million boxes collide by chance."""


def group_ranks(
    layouts: Sequence[WeightLayout], ranks: Sequence[int], key: Callable[[WeightLayout], bytes]
) -> list[tuple[WeightLayout, Ranks]]:
    """Return the first layout of each key with the ranks of all layouts that have it, in order of appearance."""
    keys: dict[int, bytes] = {}  # by identity first: ranks with the same shards mostly share the object
    found: dict[bytes, tuple[WeightLayout, list[int]]] = {}
    for layout, rank in zip(layouts, ranks, strict=True):
        if id(layout) not in keys:
            keys[id(layout)] = key(layout)
        found.setdefault(keys[id(layout)], (layout, []))[1].append(rank)
    return [(layout, tuple(members)) for layout, members in found.values()]


def find_rank_sets(of_layout: Ints, starts: Ints, ranks: Sequence[Ranks]) -> tuple[Ints, list[Ranks]]:
    """Return, by run of `of_layout`, the index of the set of ranks of its layouts; and the sets."""
    if not len(starts):
        return np.zeros(0, np.int64), []
    mark = hash_rows([np.arange(1, len(ranks) + 1)])
    sums = np.add.reduceat(mark[of_layout], starts)  # the sum, modulo 2**64, is a hash of the set
    _, first, number = np.unique(sums, return_index=True, return_inverse=True)
    stops = np.r_[starts[1:], len(of_layout)]
    sets = []
    for run in first:
        members = set(of_layout[starts[run] : stops[run]].tolist())
        sets.append(tuple(sorted(rank for layout in members for rank in ranks[layout])))
    return number.reshape(-1).astype(np.int64), sets


def find_receiver_sets(tables: Sequence[Boxes], ranks: Sequence[Ranks], width: int) -> tuple[list[Ints], list[Ranks]]:
    """Return, by class and box, the index of the set of ranks that need exactly this box; and the distinct sets.

    Args:
        tables: by class, the boxes that its ranks need.
        ranks: by class, its ranks.
        width: the largest number of dimensions of a box.
    """
    of_class = np.repeat(np.arange(len(tables)), [len(t.tensor) for t in tables])
    every = concatenate(tables, width)
    keys = hash_rows([every.tensor, *every.start.T, *every.stop.T])
    receivers, sets = of_class.copy(), list(ranks)
    # most boxes are needed by one class only: sort just those whose short hash is shared
    short = (keys >> np.uint64(64 - HASH_BITS)).astype(np.int64)
    some = np.flatnonzero((np.bincount(short) > 1)[short])
    order = some[np.argsort(keys[some], kind="stable")]
    if len(order):
        first = np.r_[True, keys[order][1:] != keys[order][:-1]]
        found, more = find_rank_sets(of_class[order], np.flatnonzero(first), ranks)
        receivers[order] = len(sets) + found[np.cumsum(first) - 1]
        sets += more
    number: dict[Ranks, int] = {}
    receivers = np.array([number.setdefault(members, len(number)) for members in sets], np.int64)[receivers]
    return np.split(receivers, np.cumsum([len(t.tensor) for t in tables])[:-1]), list(number)


def overlap_bytes(sources: Sequence[WeightLayout], needs: Sequence[WeightLayout]) -> Ints:
    """Return int64 [len(sources), len(needs)]: bytes that a layout of `needs` needs and one of `sources` holds.

    A box that a layout has twice counts twice.
    """
    distinct = {id(layout): layout for layout in sources}
    width = max(layout.pieces.columns.width for layout in (*distinct.values(), *needs))
    models = {id(layout.tensors): layout.tensors for layout in needs}
    specs = dict(chain.from_iterable(tensors.items() for tensors in models.values()))
    number = {name: i for i, name in enumerate(specs)}
    sizes = np.array([itemsize(spec.dtype) for spec in specs.values()], np.int64)
    numbers: dict[int, Ints] = {}
    for layout in (*distinct.values(), *needs):
        if id(layout.tensors) not in numbers:
            numbers[id(layout.tensors)] = np.array([number.get(name, -1) for name in layout.tensors], np.int64)
    wanted = [_boxes(layout, numbers[id(layout.tensors)], width) for layout in needs]
    order = np.argsort(np.concatenate([boxes.tensor for boxes in wanted]), kind="stable")
    of_need = np.repeat(np.arange(len(needs)), [len(boxes.tensor) for boxes in wanted])[order]
    every = _bare(*(np.concatenate([getattr(b, name) for b in wanted])[order] for name in ("tensor", "start", "stop")))
    start, count = extents(every.tensor, len(number))

    def of_source(layout: WeightLayout) -> Ints:
        held = _boxes(layout, numbers[id(layout.tensors)], width)
        _, of, low, high = intersections(held, every, start, count)
        shared = volumes(low, high) * sizes[every.tensor[of]]
        return np.bincount(of_need[of], shared, len(needs)).astype(np.int64)

    by_layout = {key: of_source(layout) for key, layout in distinct.items()}
    return np.array([by_layout[id(layout)] for layout in sources])


def layout_bytes(layout: WeightLayout) -> int:
    """Return the bytes of all boxes of the layout; a box that it has twice counts twice."""
    return int((layout.pieces.num_elements * layout.tensors.itemsizes[layout.pieces.columns.tensor]).sum())


def _boxes(layout: WeightLayout, numbers: Ints, width: int) -> Boxes:
    """Return the layout's boxes.

    Args:
        numbers: by tensor of the layout's model, its index in the result; -1: left out.
    """
    columns = layout.pieces.columns
    tensor = numbers[columns.tensor]
    rows = np.flatnonzero(tensor >= 0)
    box = widen(columns.boxes, width)[rows]
    return _bare(tensor[rows], box[..., 0], box[..., 1])


def _bare(tensor: Ints, start: Ints, stop: Ints) -> Boxes:
    """Return boxes without their location in local tensors."""
    nothing = np.zeros(0, np.int64)
    return Boxes(tensor, start, stop, nothing, nothing)
