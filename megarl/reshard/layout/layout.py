"""Weight layouts: the location of weights as boxes in Hugging Face coordinates.

    Hugging Face tensor  model.layers.0.self_attn.q_proj.weight   [512, 128]
    a rank's piece       rows 256:512, all columns                 Box ((256, 512), (0, 128))
    local tensor         decoder.layers.0.self_attention.linear_qkv.weight   at Box ((0, 256), (0, 128))

Every holder of weights describes them this way; moving weights needs no other information.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from megarl.model_files.file_plan import Box as Box
from megarl.model_files.file_plan import extent as extent
from megarl.reshard.layout.model_tensors import ModelTensors, Names, digest_of
from megarl.reshard.layout.model_tensors import TensorSpec as TensorSpec
from megarl.reshard.layout.piece_table import Columns as Columns
from megarl.reshard.layout.piece_table import PieceTable as PieceTable
from megarl.reshard.layout.piece_table import ShardPiece as ShardPiece
from megarl.reshard.layout.piece_table import widen as widen


class WeightLayout:
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

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, WeightLayout):
            return NotImplemented
        return self is other or (self.tensors == other.tensors and self.pieces == other.pieces)

    def __hash__(self) -> int:
        return hash(self.pieces)

    def __repr__(self) -> str:
        return f"WeightLayout({len(self.pieces)} pieces of {len(self.tensors)} tensors)"


def _check_pieces(tensors: ModelTensors, table: PieceTable) -> None:
    """Assert that every piece lies in its tensor, and has the same extent in its local tensor."""
    bounds = {name: tensors[name].box for name in {table.tensors[i] for i in np.unique(table.tensor).tolist()}}
    same = ((table.boxes[..., 1] - table.boxes[..., 0]) == (table.local_boxes[..., 1] - table.local_boxes[..., 0])).all(
        axis=1
    )
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


def full_local(tensor: str) -> str:
    """Return the local name of a tensor that an engine rank receives in full, before it loads it."""
    return f"full tensor {tensor}"


def _with_full_tensors(layout: WeightLayout, names: Collection[str]) -> WeightLayout:
    """Return the layout with one piece for each of these tensors, in place of those that it has."""
    if not names:
        return layout
    numbers = [layout.tensors.names.number[name] for name in names]
    others = layout.pieces.take(np.flatnonzero(~np.isin(layout.pieces.tensor, numbers)))
    boxes = {name: layout.tensors[name].box for name in names}
    full = (ShardPiece(name, box, full_local(name), box) for name, box in boxes.items())
    return WeightLayout(layout.tensors, (*others, *full))


def volume(box: Box) -> int:
    """Return the number of elements of the box."""
    n = 1
    for start, stop in box:
        n *= max(0, stop - start)
    return n


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
