"""Overlap in bytes between what each engine rank needs and what each trainer rank holds, for all pairs at once.

There are few distinct layouts even for many ranks, and a trainer rank's layout is small where an engine rank's is
large: the engine ranks' boxes are sorted by tensor once, and each distinct trainer layout looks its tensors up there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megarl.model_files.header import itemsize
from megarl.reshard.layout.box_index import Boxes, extents, intersections
from megarl.reshard.layout.layout import WeightLayout, widen

Ints = NDArray[Any]


def overlap_bytes(sources: Sequence[WeightLayout], needs: Sequence[WeightLayout]) -> Ints:
    """Return int64 [len(sources), len(needs)]: bytes that a layout of `needs` needs and one of `sources` holds.

    A box that a layout has twice counts twice.
    """
    distinct = {id(layout): layout for layout in sources}
    width = max(layout.table.boxes.shape[1] for layout in (*distinct.values(), *needs))
    number: dict[str, int] = {}
    wanted = [_boxes(layout, number, width, add=True) for layout in needs]
    specs = {name: spec for layout in needs for name, spec in layout.tensors.items() if name in number}
    sizes = np.array([itemsize(specs[name].dtype) for name in number], np.int64)
    order = np.argsort(np.concatenate([boxes.tensor for boxes in wanted]), kind="stable")
    of_need = np.repeat(np.arange(len(needs)), [len(boxes.tensor) for boxes in wanted])[order]
    every = _bare(*(np.concatenate([getattr(b, name) for b in wanted])[order] for name in ("tensor", "start", "stop")))
    start, count = extents(every.tensor, len(number))

    def of_source(layout: WeightLayout) -> Ints:
        held = _boxes(layout, number, width, add=False)
        _, of, low, high = intersections(held, every, start, count)
        shared = (high - low).prod(axis=1, dtype=np.int64) * sizes[every.tensor[of]]
        return np.bincount(of_need[of], shared, len(needs)).astype(np.int64)

    by_layout = {key: of_source(layout) for key, layout in distinct.items()}
    return np.array([by_layout[id(layout)] for layout in sources])


def layout_bytes(layout: WeightLayout) -> int:
    """Return the bytes of all boxes of the layout; a box that it has twice counts twice."""
    table = layout.table
    sizes = np.array([itemsize(layout.tensors[name].dtype) for name in table.tensors], np.int64)
    return int(((table.boxes[..., 1] - table.boxes[..., 0]).prod(axis=1, dtype=np.int64) * sizes[table.tensor]).sum())


def _boxes(layout: WeightLayout, number: dict[str, int], width: int, *, add: bool) -> Boxes:
    """Return the layout's boxes of the tensors in `number`.

    Args:
        number: by tensor name, its index.
        add: add the layout's tensors to `number`.
    """
    table = layout.table
    numbers = [number.setdefault(name, len(number)) if add else number.get(name, -1) for name in table.tensors]
    tensor = np.array(numbers, np.int64)[table.tensor]
    rows = np.flatnonzero(tensor >= 0)
    box = widen(table.boxes, width)[rows]
    return _bare(tensor[rows], box[..., 0], box[..., 1])


def _bare(tensor: Ints, start: Ints, stop: Ints) -> Boxes:
    """Return boxes without their location in local tensors."""
    nothing = np.zeros(0, np.int64)
    return Boxes(tensor, start, stop, nothing, nothing, nothing)
