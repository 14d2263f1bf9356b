"""Check that both sides of a sync have the same dtypes: boxes are moved as raw bytes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from megarl.errors import WeightSyncError
from megarl.reshard.layout.boxes import Ints
from megarl.reshard.layout.layout import TensorSpec, WeightLayout


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
