"""Overlap in bytes between what each engine rank needs and what each trainer rank holds, for all pairs at once.

There are few distinct layouts even for many ranks, and a trainer rank's layout is small where an engine rank's is
large: the engine ranks' boxes are sorted by tensor once, and each distinct trainer layout looks its tensors up there.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np

from megarl.model_files.header import itemsize
from megarl.reshard.layout.boxes import Boxes, Ints, extents, intersections
from megarl.reshard.layout.layout import WeightLayout, widen


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
        shared = (high - low).prod(axis=1, dtype=np.int64) * sizes[every.tensor[of]]
        return np.bincount(of_need[of], shared, len(needs)).astype(np.int64)

    by_layout = {key: of_source(layout) for key, layout in distinct.items()}
    return np.array([by_layout[id(layout)] for layout in sources])


def layout_bytes(layout: WeightLayout) -> int:
    """Return the bytes of all boxes of the layout; a box that it has twice counts twice."""
    table, sizes = layout.pieces, layout.tensors.itemsizes
    return int(((table.boxes[..., 1] - table.boxes[..., 0]).prod(axis=1, dtype=np.int64) * sizes[table.tensor]).sum())


def _boxes(layout: WeightLayout, numbers: Ints, width: int) -> Boxes:
    """Return the layout's boxes.

    Args:
        numbers: by tensor of the layout's model, its index in the result; -1: left out.
    """
    table = layout.pieces
    tensor = numbers[table.tensor]
    rows = np.flatnonzero(tensor >= 0)
    box = widen(table.boxes, width)[rows]
    return _bare(tensor[rows], box[..., 0], box[..., 1])


def _bare(tensor: Ints, start: Ints, stop: Ints) -> Boxes:
    """Return boxes without their location in local tensors."""
    nothing = np.zeros(0, np.int64)
    return Boxes(tensor, start, stop, nothing, nothing, nothing)
