"""How one megatron-core parameter is made of Hugging Face tensors; everything else follows from it.

A parameter is one or more *parts*, each sharded over the tensor-parallel ranks on its own (gate and up of a gated MLP
are two parts: rank r holds [gate_r; up_r]). A part is row ranges of Hugging Face tensors, stacked along dimension 0
(query, key and value, interleaved by group). Rows past the stacked ones are padding.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megarl.reshard.layout.layout import Box, Piece


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows `start:stop` of a Hugging Face tensor of shape `shape`."""

    tensor: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @classmethod
    def all(cls, tensor: str, shape: tuple[int, ...]) -> Rows:
        """The whole tensor."""
        return cls(tensor, shape, 0, shape[0])


@dataclass(frozen=True, slots=True)
class ParameterMap:
    """One megatron-core parameter in Hugging Face terms."""

    parts: tuple[tuple[Rows, ...], ...]
    shard_dim: int | None
    """Dimension that tensor-parallel ranks split; None: every rank holds all of it."""
    expert: int | None = None
    """The routed expert that it belongs to, counted over all expert-parallel ranks: it lies on one of these, where the
    *expert* tensor-parallel ranks split it."""
    dtype: str | None = None
    """As torch names it; None: the model's."""


def whole(tensor: str, *shape: int, dtype: str | None = None) -> ParameterMap:
    """A tensor that every tensor-parallel rank holds all of."""
    return ParameterMap(((Rows.all(tensor, shape),),), None, dtype=dtype)


def split_rows(*tensors: str, height: int, width: int, expert: int | None = None) -> ParameterMap:
    """Tensors [height, width] of which every rank holds its share of rows, one tensor's after another's."""
    return ParameterMap(tuple((Rows.all(tensor, (height, width)),) for tensor in tensors), 0, expert)


def split_columns(tensor: str, height: int, width: int, expert: int | None = None) -> ParameterMap:
    """A tensor [height, width] of which every rank holds its share of columns."""
    return ParameterMap(((Rows.all(tensor, (height, width)),),), 1, expert)


def local_shape(mapping: ParameterMap, size: int, *, rows: int | None = None) -> tuple[int, ...]:
    """Of the parameter on one of `size` ranks that split it.

    Args:
        rows: over all ranks where padding makes them more than the tensors have.
    """
    first = mapping.parts[0][0]
    held = sum(r.stop - r.start for part in mapping.parts for r in part)
    shape = [rows or held, *first.shape[1:]]
    if mapping.shard_dim is not None:
        shape[mapping.shard_dim] //= size
    return tuple(shape)


def pieces(local: str, mapping: ParameterMap, local_shape: tuple[int, ...], *, rank: int, size: int) -> Iterator[Piece]:
    """The pieces that tensor-parallel rank `rank` of `size` holds in its parameter `local` of shape `local_shape`.

    Of a routed expert, `rank` and `size` are those of expert tensor parallelism.
    """
    if mapping.shard_dim == 1:
        yield from _column_pieces(local, mapping, local_shape, rank)
        return
    shards = size if mapping.shard_dim == 0 else 1
    index = rank if mapping.shard_dim == 0 else 0
    assert local_shape[0] % len(mapping.parts) == 0, (local, local_shape)
    rows_per_part = local_shape[0] // len(mapping.parts)
    for p, part in enumerate(mapping.parts):
        first, last = index * rows_per_part, (index + 1) * rows_per_part
        at = 0
        for rows in part:
            lo, hi = max(at, first), min(at + rows.stop - rows.start, last)
            if lo < hi:
                source = (rows.start + lo - at, rows.start + hi - at)
                target = (p * rows_per_part + lo - first, p * rows_per_part + hi - first)
                rest: Box = tuple((0, n) for n in rows.shape[1:])
                yield Piece(rows.tensor, (source, *rest), local, (target, *rest))
            at += rows.stop - rows.start
        assert at <= shards * rows_per_part, f"{local}: {at} rows do not fit {shards} shards of {rows_per_part}"


def _column_pieces(local: str, mapping: ParameterMap, local_shape: tuple[int, ...], rank: int) -> Iterator[Piece]:
    ((rows,),) = mapping.parts
    height, width = local_shape
    assert rows.shape[0] == height, (local, rows.shape, local_shape)
    yield Piece(rows.tensor, ((0, height), (rank * width, (rank + 1) * width)), local, ((0, height), (0, width)))
