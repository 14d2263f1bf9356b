"""A rank's training state as boxes of whole tensors, the same for weights and for what the optimizer remembers.

A parameter is stored as one tensor or several (gate and up are two), and a rank's part of each is contiguous. Of what
the optimizer remembers it holds a range of the flattened parameter, whose part of a stored tensor is cut into boxes:

    rows of a part of shape [4, 5]      . . . x x   1 box: the rest of a row
    range 3:17                          x x x x x   1 box: all whole rows
                                        x x x x x
                                        x x . . .   1 box: the start of a row
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedBase, ShardedTensor, ShardedTensorFactory
from torch import Tensor

from megarl.megatron.checkpoint.model_state import CONTENT, sharded_model
from megarl.megatron.checkpoint.optimizer_state import OptimizerShard
from megarl.megatron.modeling.megatron_model import ModelRank

Shape = tuple[int, ...]

LARGEST_BYTES = 2**26
"""Of a piece to save: a copy on the host of one is little, and so is what a reader reads of one in vain."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Piece:
    """A box of a stored tensor that this rank holds."""

    key: str
    """The tensor's name in the checkpoint."""
    global_shape: Shape
    offset: Shape
    """Of the box in the tensor."""
    data: Tensor
    """Contiguous, of the box's shape; where training itself keeps it."""
    is_padded: bool = False
    """How many rows the tensor has depends on the layout: those behind the vocabulary are 0."""

    @property
    def sizes(self) -> Shape:
        """The box's shape."""
        return tuple(self.data.shape)

    @property
    def num_bytes(self) -> int:
        """Of the box."""
        return self.data.numel() * self.data.itemsize

    def cut(self, most_bytes: int) -> Iterator[Piece]:
        """The same values in pieces of at most so many bytes."""
        if self.num_bytes <= most_bytes:
            yield self
            return
        axis = next(axis for axis, size in enumerate(self.sizes) if size > 1)
        rows = max(1, most_bytes * self.sizes[axis] // self.num_bytes)
        for first in range(0, self.sizes[axis], rows):
            data = self.data.narrow(axis, first, min(rows, self.sizes[axis] - first))
            offset = (*self.offset[:axis], self.offset[axis] + first, *self.offset[axis + 1 :])
            yield from replace(self, offset=offset, data=data).cut(most_bytes)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Part:
    """What this rank holds of a stored tensor, which is part of a parameter or all of it."""

    owner: int
    """The parameter's `id`."""
    start: int
    """Where in the flattened parameter the part begins."""
    stored: ShardedTensor
    values: Tensor
    """Flat."""

    @property
    def stop(self) -> int:
        """Where it ends."""
        return self.start + len(self.values)

    @property
    def is_first(self) -> bool:
        """No other rank has it but data-parallel ones."""
        *others, _ = self.stored.replica_id
        return not any(others)

    @property
    def is_expert(self) -> bool:
        """It is stored as a row of all experts'."""
        return bool(self.stored.prepend_axis_num)

    def boxes(self, start: int, stop: int, values: Tensor, *, prefix: str = "") -> Iterator[Piece]:
        """What lies in the parameter's range `start:stop`, whose values are `values`."""
        first, last = max(start, self.start), min(stop, self.stop)
        shape = (1,) * self.stored.prepend_axis_num + tuple(self.stored.local_shape)
        for box in cut_range(shape, first - self.start, last - self.start):
            at = self.start + box.start - start
            yield Piece(
                key=prefix + self.stored.key,
                global_shape=tuple(self.stored.global_shape),
                offset=tuple(a + b for a, b in zip(self.stored.global_offset, box.offset, strict=True)),
                data=values[at : at + prod(box.sizes)].view(box.sizes),
                is_padded=self.stored.allow_shape_mismatch,
            )


@dataclass(frozen=True, slots=True)
class Box:
    """A box of a tensor whose values are neighbours in the flattened tensor."""

    offset: Shape
    sizes: Shape
    start: int
    """In the flattened tensor."""


def cut_range(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """The range `start:stop` of a flattened tensor of `shape` as boxes: fewest, in order, at most 2 ndim - 1."""
    if start >= stop:
        return
    if len(shape) <= 1:
        yield Box((start,) * len(shape), (stop - start,) * len(shape), start)
        return
    row = prod(shape[1:])
    whole, end = -(-start // row), stop // row
    if start % row:
        yield from _in_row(shape, start // row, start, min(stop, whole * row))
    if whole < end:
        rest = tuple(shape[1:])
        yield Box((whole, *(0 for _ in rest)), (end - whole, *rest), whole * row)
    if stop % row and end * row >= start:  # else it ends in the row that it starts in
        yield from _in_row(shape, end, end * row, stop)


def _in_row(shape: Sequence[int], number: int, start: int, stop: int) -> Iterator[Box]:
    begin = number * prod(shape[1:])
    for box in cut_range(shape[1:], start - begin, stop - begin):
        yield Box((number, *box.offset), (1, *box.sizes), begin + box.start)


def pieces_to_save(rank: ModelRank, shards: Mapping[int, OptimizerShard]) -> list[Piece]:
    """What this rank writes: all ranks together write every value once.

    Data-parallel ranks that divide the optimizer's state of a parameter divide the parameter too. Of what all of them
    have each writes as much as the others.
    """
    pieces: list[Piece] = []
    parts = [part for part in _parts(rank, shards) if part.is_first]
    alike = [part for part in parts if not _is_divided(part, shards)]
    ranges = {id(part): (part.start, part.stop) for part in parts}
    for group, is_expert in ((rank.groups.dp_cp, False), (rank.groups.expt_dp, True)):
        of_group = [part for part in alike if part.is_expert == is_expert]
        values = [(len(part.values), _bytes_of_value(part, shards)) for part in of_group]
        for part, (first, last) in zip(of_group, share(values, group.rank(), group.size()), strict=True):
            ranges[id(part)] = part.start + first, part.start + last
    for part in parts:
        first, last = ranges[id(part)]
        shard = shards.get(part.owner)
        if shard is not None:
            first, last = max(first, shard.start), min(last, shard.stop)
        if first < last:
            pieces += part.boxes(first, last, part.values[first - part.start : last - part.start])
            pieces += _remembered(part, shard, first, last)
    return [small for piece in pieces for small in piece.cut(LARGEST_BYTES)]


def share(values: Sequence[tuple[int, int]], rank: int, size: int) -> list[tuple[int, int]]:
    """Of each run of values, the range that is `rank`'s where `size` ranks have equal parts of all, run after run.

    Args:
        values: how many, and bytes of each.
    """
    total = sum(count * each for count, each in values)
    first, last = total * rank // size, total * (rank + 1) // size
    ranges = []
    at = 0
    for count, each in values:
        start, stop = (min(max(-(-(bound - at) // each), 0), count) for bound in (first, last))
        ranges.append((start, stop))
        at += count * each
    return ranges


def pieces_held(rank: ModelRank, shards: Mapping[int, OptimizerShard]) -> list[Piece]:
    """Everything that this rank holds."""
    pieces: list[Piece] = []
    for part in _parts(rank, shards):
        pieces += part.boxes(part.start, part.stop, part.values)
        pieces += _remembered(part, shards.get(part.owner), part.start, part.stop)
    return pieces


def pieces_to_load(rank: ModelRank, shards: Mapping[int, OptimizerShard]) -> list[Piece]:
    """The same without what other ranks step of this rank's parameters: they have it, as after every step."""
    pieces: list[Piece] = []
    for part in _parts(rank, shards):
        first, last = part.start, part.stop
        shard = shards.get(part.owner)
        if shard is not None:
            first, last = max(first, shard.start), min(last, shard.stop)
        if first < last:
            pieces += part.boxes(first, last, part.values[first - part.start : last - part.start])
            pieces += _remembered(part, shard, first, last)
    return pieces


def _is_divided(part: _Part, shards: Mapping[int, OptimizerShard]) -> bool:
    shard = shards.get(part.owner)
    return shard is not None and shard.is_divided


def _bytes_of_value(part: _Part, shards: Mapping[int, OptimizerShard]) -> int:
    shard = shards.get(part.owner)
    remembered = shard.tensors.values() if shard is not None else ()
    return part.values.itemsize + sum(tensor.itemsize for tensor in remembered)


def _remembered(part: _Part, shard: OptimizerShard | None, start: int, stop: int) -> Iterator[Piece]:
    """In the parameter's range `start:stop`, as far as it is the shard's."""
    if shard is None:
        return
    first, last = max(start, shard.start), min(stop, shard.stop)
    for name, values in shard.tensors.items():
        if first < last:
            here = values[first - shard.start : last - shard.start]
            yield from part.boxes(first, last, here, prefix=f"optimizer.state.{name}.")


def _parts(rank: ModelRank, shards: Mapping[int, OptimizerShard]) -> list[_Part]:
    parts = [part for each in nested_values(sharded_model(rank, CONTENT)) for part in _parts_of(each)]
    known = {part.owner for part in parts}
    assert known >= shards.keys(), f"{len(shards.keys() - known)} parameters are trained and not stored"
    return parts


def _parts_of(sharded: ShardedBase) -> Iterator[_Part]:
    """Of one parameter, or buffer; none of what is no tensor: Transformer Engine's calibration of 8-bit arithmetic."""
    if not isinstance(sharded, ShardedTensor | ShardedTensorFactory):
        return
    whole = sharded.data.detach()
    stored = nested_values(sharded.build()) if isinstance(sharded, ShardedTensorFactory) else [sharded]
    for each in stored:
        data = each.data.detach()
        assert data.is_contiguous(), f"{each.key} is stored in parts that are not contiguous"
        yield _Part(
            owner=id(sharded.data),
            start=data.storage_offset() - whole.storage_offset(),
            stored=each,
            values=data.view(-1),
        )
