"""Shard pieces as arrays: a large model has tens of thousands per rank, and planning joins those of many ranks."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import chain
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from megarl.model_files.file_plan import Box
from megarl.reshard.layout.model_tensors import (
    COMPRESSION_LEVEL,
    DIGEST_BYTES,
    Digested,
    Names,
    digest_of,
    numbers_among,
)

_HEADER = struct.Struct(f"<III{DIGEST_BYTES}s")
"""Of `PieceTable.to_bytes`: shape of `Columns.matrix`, number of local tensors, `box_digest`."""


@dataclass(frozen=True, slots=True)
class ShardPiece:
    """A box of a Hugging Face tensor, and the box of the same elements in a rank's local tensor."""

    tensor: str
    box: Box
    local: str
    local_box: Box


class ArrayTable:
    """Base of frozen, slotted dataclasses whose fields are arrays of N rows each."""

    __slots__: tuple[str, ...] = ()

    def take(self, rows: NDArray[Any]) -> Self:
        """Return the given rows."""
        return type(self)(*(getattr(self, name)[rows] for name in self.__slots__))

    @classmethod
    def join(cls, tables: Sequence[Self]) -> Self:
        """Return the rows of all tables, one table after another."""
        return cls(*(np.concatenate([getattr(each, name) for each in tables]) for name in cls.__slots__))


@dataclass(frozen=True, slots=True)
class Columns(ArrayTable):
    """N pieces of at most D dimensions, as arrays."""

    tensor: NDArray[np.int32]
    """[N], index of the tensor's name."""
    local: NDArray[np.int32]
    """[N], index of the local tensor's name."""
    dims: NDArray[np.int8]
    """[N], number of dimensions of each piece."""
    boxes: NDArray[np.int32]
    """[N, D, 2]; (0, 1) in dimensions that a piece does not have."""
    local_boxes: NDArray[np.int32]
    """[N, D, 2], like `boxes`."""

    @property
    def width(self) -> int:
        """The largest number of dimensions D."""
        return int(self.boxes.shape[1])

    def matrix(self) -> NDArray[np.int32]:
        """Return all arrays as one, int32 [3 + 4 D, N]."""
        flat = [boxes.reshape(-1, 2 * self.width).T for boxes in (self.boxes, self.local_boxes)]
        return np.concatenate([[self.tensor, self.local, self.dims], *flat]).astype(np.int32)

    @classmethod
    def of_matrix(cls, matrix: NDArray[np.int32]) -> Columns:
        """Return the columns of which `matrix` returns the arrays."""
        boxes, local_boxes = np.split(matrix[3:], 2)
        shape = matrix.shape[1], len(boxes) // 2, 2
        return cls(
            matrix[0],
            matrix[1],
            matrix[2].astype(np.int8),
            np.ascontiguousarray(boxes.T).reshape(shape),
            np.ascontiguousarray(local_boxes.T).reshape(shape),
        )


class PieceTable(Digested):
    """Shard pieces stored as arrays, pickled compressed and decoded when they are first used.

    The differences between consecutive pieces are compressed: most pieces of a rank differ from the one before by the
    number of their tensor only, so that 45,000 pieces take 100 kB.
    """

    def __init__(self, tensors: Iterable[str], locals_: Iterable[str], columns: Columns) -> None:
        """Args:
        tensors: names that `columns.tensor` indexes.
        locals_: names that `columns.local` indexes.
        """
        self.tensors = tensors if isinstance(tensors, Names) else Names(tensors)
        self.locals = locals_ if isinstance(locals_, Names) else Names(locals_)
        self.columns = columns

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
        return cls(tensors, locals_, Columns(tensor, local, dims, boxes, local_boxes))

    @classmethod
    def join(cls, parts: Sequence[PieceTable]) -> PieceTable:
        """Return a table with the pieces of all tables, in order."""
        tensors, tensor_numbers = _merge([p.tensors for p in parts])
        locals_, local_numbers = _merge([p.locals for p in parts])
        columns = [p.columns for p in parts]
        width = max(each.width for each in columns)
        renumbered = [
            Columns(tensor[c.tensor], local[c.local], c.dims, widen(c.boxes, width), widen(c.local_boxes, width))
            for c, tensor, local in zip(columns, tensor_numbers, local_numbers, strict=True)
        ]
        return cls(tensors, locals_, Columns.join(renumbered))

    @cached_property
    def columns(self) -> Columns:
        """The pieces as arrays."""
        num_rows, num_pieces, data = self._encoded
        deltas = np.frombuffer(zlib.decompress(data), np.int32).reshape(num_rows, num_pieces)
        return Columns.of_matrix(np.cumsum(deltas, axis=1, dtype=np.int32))

    def release_columns(self) -> None:
        """Drop the arrays of a table that has been pickled: they are decoded again when they are next used."""
        if "_encoded" in self.__dict__:
            self.__dict__.pop("columns", None)

    def to_bytes(self) -> bytes:
        """Return the pieces as bytes, without the names of tensors and local tensors."""
        num_rows, num_pieces, data = self._encoded
        return _HEADER.pack(num_rows, num_pieces, len(self.locals), self.box_digest) + data

    @classmethod
    def from_bytes(cls, data: bytes, tensors: Names) -> PieceTable:
        """Return the table of which `to_bytes` returned `data`, with empty names of local tensors.

        Args:
            tensors: the names of its tensors.
        """
        num_rows, num_pieces, num_locals, box_digest = _HEADER.unpack_from(data)
        table = cls.__new__(cls)
        encoded = num_rows, num_pieces, data[_HEADER.size :]
        table.__dict__.update(tensors=tensors, locals=empty_names(num_locals), _encoded=encoded, box_digest=box_digest)
        return table

    @property
    def num_elements(self) -> NDArray[np.int64]:
        """[N], by piece, the number of elements of its box."""
        boxes = self.columns.boxes
        found: NDArray[np.int64] = (boxes[..., 1] - boxes[..., 0]).prod(axis=1, dtype=np.int64)
        return found

    @cached_property
    def box_digest(self) -> bytes:
        """A digest of all but the names of local tensors, equal in all processes for equal pieces in equal order."""
        return digest_of([self.tensors.digest, b"%d\n" % len(self), self.columns.matrix().tobytes()])

    @property
    def digest(self) -> bytes:
        """A digest of everything, equal in all processes for equal pieces in equal order."""
        return digest_of([self.box_digest, self.locals.digest])

    def take(self, rows: NDArray[Any]) -> PieceTable:
        """Return a table of the pieces of the given rows."""
        return PieceTable(self.tensors, self.locals, self.columns.take(rows))

    def renumbered(self, tensors: Names) -> PieceTable:
        """Return a table of the same pieces whose column `tensor` indexes `tensors`, which contains all its names."""
        if self.tensors is tensors:
            return self
        tensor = numbers_among(self.tensors, tensors)[self.columns.tensor].astype(np.int32)
        if (tensor < 0).any():
            raise KeyError(self.tensors[int(self.columns.tensor[tensor.argmin()])])
        return PieceTable(tensors, self.locals, replace(self.columns, tensor=tensor))

    def with_locals(self, locals_: Names) -> PieceTable:
        """Return the same pieces with other names of local tensors, as many."""
        other = PieceTable.__new__(PieceTable)
        other.__dict__.update(self.__dict__, locals=locals_)
        return other

    def __len__(self) -> int:
        return len(self.columns.tensor) if "columns" in self.__dict__ else self._encoded[1]

    def __getitem__(self, index: int) -> ShardPiece:
        return next(iter(self.take(np.array([index]))))

    def __iter__(self) -> Iterator[ShardPiece]:
        tensors, locals_ = self.tensors.strings, self.locals.strings
        columns = self.columns
        rows = zip(
            columns.tensor.tolist(),
            columns.local.tolist(),
            columns.dims.tolist(),
            columns.boxes.tolist(),
            columns.local_boxes.tolist(),
            strict=True,
        )
        for tensor, local, dims, box, local_box in rows:
            yield ShardPiece(
                tensors[tensor],
                tuple([(start, stop) for start, stop in box[:dims]]),
                locals_[local],
                tuple([(start, stop) for start, stop in local_box[:dims]]),
            )

    @cached_property
    def _encoded(self) -> tuple[int, int, bytes]:
        """The shape of `Columns.matrix`, and the differences between its columns, compressed."""
        matrix = self.columns.matrix()
        deltas = np.diff(matrix, axis=1, prepend=np.int32(0))
        return *matrix.shape, zlib.compress(deltas.tobytes(), COMPRESSION_LEVEL)

    def __getstate__(self) -> dict[str, object]:
        return {name: getattr(self, name) for name in ("tensors", "locals", "_encoded", "box_digest")}


@lru_cache
def empty_names(count: int) -> Names:
    """Return `count` empty names: those of local tensors that only another rank knows."""
    return Names([""] * count)


def widen(boxes: NDArray[np.int32], width: int) -> NDArray[np.int32]:
    """Pad boxes [N, D, 2] to [N, width, 2]; added dimensions are (0, 1)."""
    n, have, _ = boxes.shape
    if have == width:
        return boxes
    out = np.empty((n, width, 2), boxes.dtype)
    out[:, :have], out[:, have:] = boxes, (0, 1)
    return out


def _merge(parts: Sequence[Names]) -> tuple[Names, list[NDArray[np.int32]]]:
    """Return all names, each once, and the indices [number of names] of those of each part among them."""
    if all(part is parts[0] for part in parts):
        return parts[0], [np.arange(len(parts[0]), dtype=np.int32)] * len(parts)
    merged = Names(dict.fromkeys(chain.from_iterable(parts)))
    return merged, [numbers_among(part, merged).astype(np.int32) for part in parts]


def _stack(boxes: Sequence[Box], width: int) -> NDArray[np.int32]:
    lengths = {len(box) for box in boxes}
    if lengths != {width}:
        boxes = [(*box, *((0, 1),) * (width - len(box))) for box in boxes]
    flat = chain.from_iterable(chain.from_iterable(boxes))
    return np.fromiter(flat, np.int32, count=2 * width * len(boxes)).reshape(len(boxes), width, 2)
