"""Mapping of one megatron-core parameter to Hugging Face tensors; loading, export and weight sync derive from it.

A parameter consists of one or more *parts*, each sharded over the tensor-parallel ranks separately: gate and up of a
gated MLP are two parts, and rank r holds [gate_r; up_r]. A part is a sequence of row ranges of Hugging Face tensors,
stacked along dimension 0: query, key and value, interleaved by key-value group. Rows after these are padding.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod

from megarl.reshard.layout.layout import Box, ShardPiece

_LAYER = re.compile(r"(?<=decoder\.layers\.)\d+")
_EXPERT = re.compile(r"(?<=mlp\.experts\.local_experts\.)\d+|(?<=mlp\.experts\.linear_fc[12]\.weight)\d+")


def global_name(name: str, layers: range, first_expert: int) -> str:
    """Return `name` with global layer and expert numbers instead of those of the rank.

    Args:
        name: megatron-core's parameter name in the model chunk.
        layers: global numbers of the chunk's layers.
        first_expert: global number of the rank's first routed expert.
    """
    name = _LAYER.sub(lambda found: str(layers[int(found[0])]), name)
    return _EXPERT.sub(lambda found: str(first_expert + int(found[0])), name)


@dataclass(frozen=True, slots=True)
class RowRange:
    """Rows `start:stop` of a Hugging Face tensor of shape `shape`."""

    tensor: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @classmethod
    def all(cls, tensor: str, shape: tuple[int, ...]) -> RowRange:
        """Return the range of all rows of `tensor`."""
        return cls(tensor, shape, 0, shape[0])


@dataclass(frozen=True, slots=True)
class ParameterMap:
    """One megatron-core parameter in terms of Hugging Face tensors.

    Examples:
        >>> [piece.box for piece in shard_pieces("w", split_columns("w", 8, 16), (8, 8), rank=1, size=2)]
        [((0, 8), (8, 16))]
    """

    parts: tuple[tuple[RowRange, ...], ...]
    """Row ranges of each part; parts are sharded separately and stacked in each rank's shard."""
    shard_dim: int | None
    """Dimension of the tensors that tensor-parallel ranks split; None: the parameter is replicated."""
    expert: int | None = None
    """Global number of the routed expert; None: not an expert's parameter.

    One expert-parallel rank holds it, and the *expert* tensor-parallel ranks split it.
    """
    dtype: str | None = None
    """Torch dtype name, e.g. "float32", of the parameter and its tensors; None: the model's dtype."""
    frozen: bool = False
    """The parameter or buffer is loaded, synced and saved, and has no gradient."""
    stack_size: int = 0
    """Number of experts whose parameters each tensor has, one after another; 0: the tensors are this parameter's alone.

    `parts` then describe the rows of this expert's part, and shards are viewed as stacks of one
    (`local_layout.local_view`).
    """
    transposed: bool = False
    """Each expert's part of a stack is the parameter transposed (gpt-oss)."""

    @property
    def num_elements(self) -> int:
        """Number of elements of the parameter, without padding."""
        return sum((rows.stop - rows.start) * prod(rows.shape[1:]) for part in self.parts for rows in part)

    @property
    def of_expert(self) -> ParameterMap:
        """The map to the expert's part of each tensor, without the dimension of experts."""
        shard_dim = None if self.shard_dim is None else self.shard_dim - 1
        return replace(self, shard_dim=shard_dim, stack_size=0) if self.stack_size else self

    def tensor_shape(self, rows: RowRange) -> tuple[int, ...]:
        """Return the shape of the tensor that has `rows`."""
        return (self.stack_size, *rows.shape) if self.stack_size else rows.shape


def replicated(tensor: str, *shape: int, dtype: str | None = None, frozen: bool = False) -> ParameterMap:
    """Map a parameter to a tensor of `shape` that every tensor-parallel rank holds in full.

    Examples:
        >>> replicated("model.norm.weight", 8).shard_dim is None
        True
    """
    return ParameterMap(((RowRange.all(tensor, shape),),), None, dtype=dtype, frozen=frozen)


def split_rows(
    *tensors: str, height: int, width: int | None = None, expert: int | None = None, dtype: str | None = None
) -> ParameterMap:
    """Map a parameter to tensors [height, width], or [height], split by rows; each rank stacks its shards of all.

    Examples:
        >>> fc1 = split_rows("mlp.gate_proj.weight", "mlp.up_proj.weight", height=16, width=8)
        >>> local_shape(fc1, 2)  # on each of two ranks: 8 rows of each tensor
        (16, 8)
    """
    shape = (height,) if width is None else (height, width)
    return ParameterMap(tuple((RowRange.all(tensor, shape),) for tensor in tensors), 0, expert, dtype)


def split_columns(tensor: str, height: int, width: int, expert: int | None = None) -> ParameterMap:
    """Map a parameter to a tensor [height, width] split by columns.

    Examples:
        >>> local_shape(split_columns("mlp.down_proj.weight", height=8, width=16), 2)
        (8, 8)
    """
    return ParameterMap(((RowRange.all(tensor, (height, width)),),), 1, expert)


def stacked(mapping: ParameterMap, num_experts: int, *, transposed: bool = False) -> ParameterMap:
    """Map an expert's parameter to its part of tensors that have the parameters of all experts.

    Args:
        mapping: how the parameter maps to this part.
        transposed: the part is the parameter transposed.

    Examples:
        >>> down = stacked(split_columns("mlp.experts.down_proj", height=8, width=16, expert=3), 4)
        >>> [piece.box for piece in shard_pieces("w", down, local_shape(down, 2), rank=1, size=2)]
        [((3, 4), (0, 8), (8, 16))]
    """
    shard_dim = None if mapping.shard_dim is None else mapping.shard_dim + 1
    return replace(mapping, shard_dim=shard_dim, stack_size=num_experts, transposed=transposed)


def local_shape(mapping: ParameterMap, size: int, *, rows: int | None = None) -> tuple[int, ...]:
    """Return the shape of the parameter's shard on each of `size` ranks that split it.

    Args:
        rows: number of rows over all ranks, if padding adds rows; None: no padding.
    """
    if mapping.stack_size:
        return (1, *local_shape(mapping.of_expert, size))
    first = mapping.parts[0][0]
    held = sum(r.stop - r.start for part in mapping.parts for r in part)
    shape = [rows or held, *first.shape[1:]]
    if mapping.shard_dim is not None:
        shape[mapping.shard_dim] //= size
    return tuple(shape)


def shard_pieces(
    local: str, mapping: ParameterMap, local_shape: tuple[int, ...], *, rank: int, size: int
) -> Iterator[ShardPiece]:
    """Yield the shard pieces in parameter `local` of tensor-parallel rank `rank` of `size`; its shape is `local_shape`.

    For a routed expert, `rank` and `size` are those of expert tensor parallelism.
    """
    if mapping.stack_size:
        assert mapping.expert is not None, local
        assert local_shape[0] == 1, (local, local_shape)
        for piece in shard_pieces(local, mapping.of_expert, local_shape[1:], rank=rank, size=size):
            box = ((mapping.expert, mapping.expert + 1), *piece.box)
            yield ShardPiece(piece.tensor, box, local, ((0, 1), *piece.local_box))
        return
    if mapping.shard_dim:
        yield _column_piece(local, mapping, local_shape, rank)
        return
    shards = size if mapping.shard_dim == 0 else 1
    index = rank if mapping.shard_dim == 0 else 0
    target_start = 0
    for part in mapping.parts:
        # only parameters of one part are padded
        own_rows = local_shape[0] if len(mapping.parts) == 1 else sum(r.stop - r.start for r in part) // shards
        first, last = index * own_rows, (index + 1) * own_rows
        at = 0
        for rows in part:
            lo, hi = max(at, first), min(at + rows.stop - rows.start, last)
            if lo < hi:
                source = (rows.start + lo - at, rows.start + hi - at)
                target = (target_start + lo - first, target_start + hi - first)
                rest: Box = tuple((0, n) for n in rows.shape[1:])
                yield ShardPiece(rows.tensor, (source, *rest), local, (target, *rest))
            at += rows.stop - rows.start
        assert at <= shards * own_rows, f"{local}: {at} rows do not fit {shards} shards of {own_rows}"
        target_start += own_rows
    assert target_start == local_shape[0], (local, local_shape)


def _column_piece(local: str, mapping: ParameterMap, local_shape: tuple[int, ...], rank: int) -> ShardPiece:
    """Return the piece of a parameter that ranks split along another dimension than the first."""
    ((rows,),) = mapping.parts
    assert rows.stop - rows.start == local_shape[0], (local, rows, local_shape)
    box = [(rows.start, rows.stop), *((0, n) for n in rows.shape[1:])]
    dim, width = mapping.shard_dim or 0, local_shape[mapping.shard_dim or 0]
    box[dim] = (rank * width, (rank + 1) * width)
    return ShardPiece(rows.tensor, tuple(box), local, tuple((0, n) for n in local_shape))
