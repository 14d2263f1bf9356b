"""Weight layouts: the location of weights as boxes in Hugging Face coordinates.

    Hugging Face tensor  model.layers.0.self_attn.q_proj.weight   [512, 128]
    a rank's piece       rows 256:512, all columns                 Box ((256, 512), (0, 128))
    local tensor         decoder.layers.0.self_attention.linear_qkv.weight   at Box ((0, 256), (0, 128))

Every holder of weights describes them this way; moving weights needs no other information. `Boxes` has boxes of many
tensors in arrays, from which plans are computed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megarl.errors import WeightSyncError
from megarl.model_files.file_plan import Box as Box
from megarl.model_files.file_plan import extent as extent
from megarl.reshard.layout.model_tensors import Digested, ModelTensors, Names, digest_of
from megarl.reshard.layout.model_tensors import TensorSpec as TensorSpec
from megarl.reshard.layout.piece_table import ArrayTable as ArrayTable
from megarl.reshard.layout.piece_table import Columns as Columns
from megarl.reshard.layout.piece_table import PieceTable as PieceTable
from megarl.reshard.layout.piece_table import ShardPiece as ShardPiece
from megarl.reshard.layout.piece_table import widen as widen


class WeightLayout(Digested):
    """The shard of a model that one process holds."""

    def __init__(self, tensors: Mapping[str, TensorSpec], pieces: Iterable[ShardPiece]) -> None:
        """Describe `pieces`.

        Args:
            tensors: every Hugging Face tensor of the model in order, including those that this process holds no part
                of. Layouts of a model should be given the same `ModelTensors`: it is stored and pickled once.
            pieces: the pieces held. A `PieceTable` is not checked here: its creator does that.
        """
        self.tensors = ModelTensors.of(tensors)
        table = PieceTable.pack(pieces).renumbered(self.tensors.names)
        if not isinstance(pieces, PieceTable):
            _check_pieces(self.tensors, table)
        self.pieces = table
        """The pieces held; the table's column `tensor` indexes the model's tensors."""

    @property
    def box_digest(self) -> bytes:
        """A digest of all but the names of local tensors, equal in all processes for equal layouts."""
        return digest_of([self.tensors.digest, self.pieces.box_digest])

    @property
    def digest(self) -> bytes:
        """A digest of everything, equal in all processes for equal layouts."""
        return digest_of([self.tensors.digest, self.pieces.digest])

    def __repr__(self) -> str:
        return f"WeightLayout({len(self.pieces)} pieces of {len(self.tensors)} tensors)"


def _check_pieces(tensors: ModelTensors, table: PieceTable) -> None:
    """Assert that every piece lies in its tensor, and has the same extent in its local tensor."""
    bounds = {name: tensors[name].box for name in {table.tensors[i] for i in np.unique(table.columns.tensor).tolist()}}
    sizes, local_sizes = (boxes[..., 1] - boxes[..., 0] for boxes in (table.columns.boxes, table.columns.local_boxes))
    same = (sizes == local_sizes).all(axis=1)
    for piece, is_same in zip(table, same.tolist(), strict=True):
        assert is_same, piece
        assert contains(bounds[piece.tensor], piece.box), piece


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightNeeds:
    """What an engine needs of the weights."""

    layouts: tuple[WeightLayout, ...]
    """By TP rank."""
    full_tensors: tuple[str, ...]
    """Tensors that the engine loads in full, because it computes other values from them."""

    def received(self) -> tuple[WeightLayout, ...]:
        """Return, by TP rank, the layout of what it receives: `layouts`, but with each full tensor as one piece.

        The piece is all of a tensor beside the parameters, named by `full_local`.
        """
        return tuple(_with_full_tensors(layout, self.full_tensors) for layout in self.layouts)

    @property
    def digest(self) -> bytes:
        """A digest that is equal in all processes for equal needs."""
        return digest_of([*(layout.digest for layout in self.layouts), repr(self.full_tensors).encode()])


def once_each[T](function: Callable[[WeightLayout], T], layouts: Sequence[WeightLayout]) -> list[T]:
    """Return the function's result for each layout; it is called once for each object: replicas share theirs."""
    results = {key: function(layout) for key, layout in {id(layout): layout for layout in layouts}.items()}
    return [results[id(layout)] for layout in layouts]


def share_tensors(layouts: Sequence[WeightLayout]) -> list[WeightLayout]:
    """Return the same layouts with one object for equal tensors and equal names, so that each is pickled once."""
    tensors: dict[ModelTensors, ModelTensors] = {}
    locals_: dict[Names, Names] = {}
    return [
        WeightLayout(
            tensors.setdefault(layout.tensors, layout.tensors),
            layout.pieces.with_locals(locals_.setdefault(layout.pieces.locals, layout.pieces.locals)),
        )
        for layout in layouts
    ]


def merge_specs(layouts: Iterable[WeightLayout]) -> dict[str, TensorSpec]:
    """Return the specs of the tensors of all layouts' models; of each, those of a layout that holds some of it.

    An engine rank may not know the dtype of a tensor that it holds nothing of.
    """
    layouts, specs = list(layouts), dict[str, TensorSpec]()
    models = {id(layout.tensors): layout.tensors for layout in layouts}
    for model in models.values():
        specs.update(zip(model.names, model.specs, strict=True))
    for layout in layouts if len(models) > 1 else ():
        names, of_names = layout.tensors.names, layout.tensors.specs
        specs.update((names[i], of_names[i]) for i in np.unique(layout.pieces.columns.tensor).tolist())
    return specs


def full_local(tensor: str) -> str:
    """Return the local name of a tensor that an engine rank receives in full, before it loads it."""
    return f"full tensor {tensor}"


def _with_full_tensors(layout: WeightLayout, names: Collection[str]) -> WeightLayout:
    """Return the layout with one piece for each of these tensors, in place of those that it has."""
    if not names:
        return layout
    numbers = [layout.tensors.names.number[name] for name in names]
    others = layout.pieces.take(np.flatnonzero(~np.isin(layout.pieces.columns.tensor, numbers)))
    boxes = {name: layout.tensors[name].box for name in names}
    full = (ShardPiece(name, box, full_local(name), box) for name, box in boxes.items())
    return WeightLayout(layout.tensors, (*others, *full))


def volume(box: Box) -> int:
    """Return the number of elements of the box."""
    return math.prod(max(0, stop - start) for start, stop in box)


def intersect(a: Box, b: Box) -> Box | None:
    """Return the box of the elements in both, or None if there are none."""
    box = tuple((max(s, u), min(t, v)) for (s, t), (u, v) in zip(a, b, strict=True))
    return box if all(start < stop for start, stop in box) else None


def contains(outer: Box, inner: Box) -> bool:
    """Return whether every element of `inner` is in `outer`."""
    return all(s <= u and v <= t for (s, t), (u, v) in zip(outer, inner, strict=True))


def slices(box: Box) -> tuple[slice, ...]:
    """Return the slices that index a tensor with the box."""
    return tuple(slice(start, stop) for start, stop in box)


Ints = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Boxes(ArrayTable):
    """N boxes of many tensors, sorted by tensor: arrays [N], or [N, D] with D the largest number of dimensions."""

    tensor: Ints
    """Index of the tensor in `SyncIndex.names`."""
    start: Ints
    stop: Ints
    shift: Ints
    """Offset from the box's coordinates to its coordinates in the local tensor."""
    local: Ints
    """Index of the local tensor's name."""


def intersections(need: Boxes, held: Boxes, start: Ints, count: Ints) -> tuple[Ints, Ints, Ints, Ints]:
    """Return all pairs of boxes that share elements: rows of `need`, rows of `held`, start and stop of the overlap.

    Args:
        start: by tensor, its first row in `held`.
        count: by tensor, its number of rows in `held`.
    """
    at, of = count_up(start[need.tensor], count[need.tensor])
    low = np.maximum(need.start[at], held.start[of])
    high = np.minimum(need.stop[at], held.stop[of])
    some = all_columns(low < high)
    return at[some], of[some], low[some], high[some]


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


def local_extents(table: PieceTable, width: int) -> Ints:
    """Return the sizes [num locals, width] of the local tensors of a layout, as far as its pieces reach."""
    sizes = np.ones((len(table.locals), width), np.int64)
    np.maximum.at(sizes, table.columns.local, widen(table.columns.local_boxes[:, :width], width)[..., 1])
    return sizes


def hash_rows(columns: Sequence[Ints]) -> Ints:
    """Return a 64-bit hash per row of the columns."""
    out = np.zeros(len(columns[0]), np.uint64)
    for column in columns:
        x = out ^ column.astype(np.uint64)
        x = (x ^ (x >> np.uint64(33))) * np.uint64(0xFF51AFD7ED558CCD)
        x = (x ^ (x >> np.uint64(29))) * np.uint64(0x9E3779B97F4A7C15)
        out = x ^ (x >> np.uint64(32))
    return out


def check_dtypes(sides: Mapping[str, Sequence[WeightLayout]]) -> None:
    """Raise WeightSyncError if a tensor of which layouts hold pieces has another dtype in one of them.

    Args:
        sides: by name of a side, for messages, its layouts.
    """
    if len({layout.tensors.digest for layouts in sides.values() for layout in layouts}) <= 1:
        return
    found: dict[str, tuple[str, str]] = {}
    for side, layouts in sides.items():
        held = {layout.tensors: np.zeros(len(layout.tensors), bool) for layout in layouts}
        for layout in layouts:
            held[layout.tensors][layout.pieces.columns.tensor] = True
        for tensors, is_held in held.items():
            for number in np.flatnonzero(is_held).tolist():
                name, dtype = tensors.names[number], tensors.specs[number].dtype
                first_side, first_dtype = found.setdefault(name, (side, dtype))
                if dtype != first_dtype:
                    raise WeightSyncError(f"{name}: the {first_side} hold {first_dtype}, the {side} {dtype}")
