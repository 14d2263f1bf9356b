"""Weight layouts: the location of weights as boxes in Hugging Face coordinates.

    Hugging Face tensor  model.layers.0.self_attn.q_proj.weight   [512, 128]
    a rank's piece       rows 256:512, all columns                 Box ((256, 512), (0, 128))
    local tensor         decoder.layers.0.self_attention.linear_qkv.weight   at Box ((0, 256), (0, 128))

Every holder of weights describes them this way; moving weights needs no other information.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import overload

import numpy as np
from numpy.typing import NDArray

from megarl.model_files.file_boxes import Box as Box
from megarl.model_files.file_boxes import extent as extent


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One Hugging Face tensor of the model."""

    shape: tuple[int, ...]
    dtype: str
    """Torch's name of the dtype, such as `float32`."""

    @property
    def box(self) -> Box:
        """The box of the full tensor."""
        return tuple((0, n) for n in self.shape)


@dataclass(frozen=True, slots=True)
class ShardPiece:
    """A box of a Hugging Face tensor, and the box of the same elements in a rank's local tensor."""

    tensor: str
    box: Box
    local: str
    local_box: Box


class PieceTable(Sequence[ShardPiece]):
    """Shard pieces stored as arrays: a large model has tens of thousands per rank, and planning joins many ranks'."""

    def __init__(
        self,
        tensors: Sequence[str],
        locals_: Sequence[str],
        tensor: NDArray[np.int32],
        local: NDArray[np.int32],
        dims: NDArray[np.int8],
        boxes: NDArray[np.int32],
        local_boxes: NDArray[np.int32],
    ) -> None:
        """Store N pieces of at most D dimensions.

        Args:
            tensors: names that `tensor` indexes.
            locals_: names that `local` indexes.
            tensor: int32 [N].
            local: int32 [N].
            dims: int8 [N], number of dimensions of each piece.
            boxes: int32 [N, D, 2]; (0, 1) in dimensions that a piece does not have.
            local_boxes: int32 [N, D, 2], like `boxes`.
        """
        self.tensors, self.locals = tuple(tensors), tuple(locals_)
        self.tensor, self.local, self.dims = tensor, local, dims
        self.boxes, self.local_boxes = boxes, local_boxes

    @classmethod
    def pack(cls, pieces: Iterable[ShardPiece]) -> PieceTable:
        """Return a table of the same pieces in the same order."""
        if isinstance(pieces, PieceTable):
            return pieces
        pieces = tuple(pieces)
        tensors: dict[str, int] = {}
        locals_: dict[str, int] = {}
        tensor = np.array([tensors.setdefault(p.tensor, len(tensors)) for p in pieces], np.int32)
        local = np.array([locals_.setdefault(p.local, len(locals_)) for p in pieces], np.int32)
        dims = np.array([len(p.box) for p in pieces], np.int8)
        width = int(dims.max(initial=1))
        boxes, local_boxes = _stack([p.box for p in pieces], width), _stack([p.local_box for p in pieces], width)
        return cls(tuple(tensors), tuple(locals_), tensor, local, dims, boxes, local_boxes)

    @classmethod
    def join(cls, parts: Sequence[PieceTable]) -> PieceTable:
        """Return a table with the pieces of all tables, in order."""
        tensors: dict[str, int] = {}
        locals_: dict[str, int] = {}
        width = max((p.boxes.shape[1] for p in parts), default=1)
        tensor = [np.array([tensors.setdefault(n, len(tensors)) for n in p.tensors], np.int32)[p.tensor] for p in parts]
        local = [np.array([locals_.setdefault(n, len(locals_)) for n in p.locals], np.int32)[p.local] for p in parts]
        return cls(
            tuple(tensors),
            tuple(locals_),
            np.concatenate(tensor),
            np.concatenate(local),
            np.concatenate([p.dims for p in parts]),
            np.concatenate([widen(p.boxes, width) for p in parts]),
            np.concatenate([widen(p.local_boxes, width) for p in parts]),
        )

    def __len__(self) -> int:
        return len(self.tensor)

    @overload
    def __getitem__(self, index: int) -> ShardPiece: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[ShardPiece]: ...
    def __getitem__(self, index: int | slice) -> ShardPiece | Sequence[ShardPiece]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        dims = self.dims[index]
        return ShardPiece(
            self.tensors[self.tensor[index]],
            _box(self.boxes[index, :dims].tolist()),
            self.locals[self.local[index]],
            _box(self.local_boxes[index, :dims].tolist()),
        )

    def __eq__(self, other: object) -> bool:
        if isinstance(other, PieceTable):
            return self is other or (
                self.tensors == other.tensors
                and self.locals == other.locals
                and all(np.array_equal(a, b) for a, b in zip(self._arrays, other._arrays, strict=True))
            )
        return isinstance(other, tuple) and tuple(self) == other

    @cached_property
    def _hash(self) -> int:
        return hash((self.tensors, self.locals, *(a.tobytes() for a in self._arrays)))

    def __hash__(self) -> int:
        return self._hash

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in self.__dict__.items() if name != "_hash"}

    @property
    def _arrays(self) -> tuple[NDArray[np.int32 | np.int8], ...]:
        return self.tensor, self.local, self.dims, self.boxes, self.local_boxes


@dataclass(frozen=True)
class WeightLayout:
    """The shard of a model that one process holds."""

    tensors: Mapping[str, TensorSpec]
    """Every Hugging Face tensor of the model in order, including those that this process holds no part of."""

    pieces: Sequence[ShardPiece]
    """The pieces held, as a tuple or a `PieceTable`."""

    def __post_init__(self) -> None:
        if isinstance(self.pieces, PieceTable):
            return  # checked by its creator: checking millions of pieces here would take long
        for piece in self.pieces:
            assert extent(piece.box) == extent(piece.local_box), piece
            assert contains(self.tensors[piece.tensor].box, piece.box), piece

    @cached_property
    def table(self) -> PieceTable:
        """The pieces as a `PieceTable`."""
        return PieceTable.pack(self.pieces)

    @cached_property
    def _hash(self) -> int:
        return hash(self.pieces)

    def __hash__(self) -> int:
        """Hash the pieces only: layouts of one model differ in nothing else."""
        return self._hash

    def __getstate__(self) -> dict[str, object]:
        # without the cached hash: hashes of strings differ between processes
        return {"tensors": self.tensors, "pieces": self.pieces}


def without(layout: WeightLayout, names: Collection[str]) -> WeightLayout:
    """Return the layout without its pieces of the tensors in `names`."""
    if not names:
        return layout
    table = layout.table
    rows = np.flatnonzero(~np.isin(table.tensor, [i for i, name in enumerate(table.tensors) if name in names]))
    columns = (getattr(table, name)[rows] for name in ("tensor", "local", "dims", "boxes", "local_boxes"))
    return WeightLayout(layout.tensors, PieceTable(table.tensors, table.locals, *columns))


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


def widen(boxes: NDArray[np.int32], width: int) -> NDArray[np.int32]:
    """Pad boxes [N, D, 2] to [N, width, 2]; added dimensions are (0, 1)."""
    n, have, _ = boxes.shape
    if have == width:
        return boxes
    out = np.empty((n, width, 2), boxes.dtype)
    out[:, :have], out[:, have:] = boxes, (0, 1)
    return out


def _stack(boxes: Sequence[Box], width: int) -> NDArray[np.int32]:
    lengths = {len(box) for box in boxes}
    if lengths != {width}:
        boxes = [(*box, *((0, 1),) * (width - len(box))) for box in boxes]
    flat = chain.from_iterable(chain.from_iterable(boxes))
    return np.fromiter(flat, np.int32, count=2 * width * len(boxes)).reshape(len(boxes), width, 2)


def _box(pairs: Sequence[Sequence[int]]) -> Box:
    return tuple((start, stop) for start, stop in pairs)
