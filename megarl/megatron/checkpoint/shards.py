"""A rank's training state as boxes of the full stored tensors, for both weights and optimizer state.

A parameter is stored as one or more tensors (gate and up are two), and the rank's part of each is contiguous. The
distributed optimizer shards its state by ranges of the flattened parameter. The part of such a range that lies in a
stored tensor is cut into boxes:

    rows of a part of shape [4, 5]      . . . x x   1 box: the rest of a row
    range 3:17                          x x x x x   1 box: all full rows
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

from megarl.megatron.checkpoint.model_state import CONTENT_METADATA, sharded_state_dict
from megarl.megatron.checkpoint.optimizer_state import OptimizerShard
from megarl.megatron.modeling.megatron_model import MegatronModel

Shape = tuple[int, ...]

MAX_SHARD_BYTES = 2**26
"""Largest shard that is written as one item.

    It bounds the host copy of a shard, and what a reader reads of a shard beyond what it needs.
    """


OPTIMIZER_STATE = "optimizer.state."
"""Prefix of the names of the optimizer's tensors in a checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CheckpointShard:
    """A box of a stored tensor and this rank's values of it."""

    key: str
    """Name of the tensor in the checkpoint."""
    global_shape: Shape
    """Shape of the full tensor."""
    offset: Shape
    """Position of the box in the full tensor."""
    data: Tensor
    """Values of the box, contiguous: a view of the memory that training uses."""
    is_padded: bool = False
    """The number of rows depends on the layout: rows after the vocabulary are padding, with value 0."""

    @property
    def sizes(self) -> Shape:
        """Shape of the box."""
        return tuple(self.data.shape)

    @property
    def num_bytes(self) -> int:
        """Size of the box in bytes."""
        return self.data.numel() * self.data.itemsize

    def cut(self, max_bytes: int) -> Iterator[CheckpointShard]:
        """Yield the same values in shards of at most `max_bytes` bytes."""
        if self.num_bytes <= max_bytes:
            yield self
            return
        axis = next(axis for axis, size in enumerate(self.sizes) if size > 1)
        rows = max(1, max_bytes * self.sizes[axis] // self.num_bytes)
        for first in range(0, self.sizes[axis], rows):
            data = self.data.narrow(axis, first, min(rows, self.sizes[axis] - first))
            offset = (*self.offset[:axis], self.offset[axis] + first, *self.offset[axis + 1 :])
            yield from replace(self, offset=offset, data=data).cut(max_bytes)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _ParameterPart:
    """This rank's part of a stored tensor, which corresponds to a parameter or a part of one."""

    owner: int
    """`id` of the parameter tensor."""
    start: int
    """Offset of the part in the flattened parameter."""
    stored: ShardedTensor
    """megatron-core's description of the part: name, global shape and offset."""
    values: Tensor
    """Values of the part as a 1-D tensor."""

    @property
    def stop(self) -> int:
        """End of the part in the flattened parameter."""
        return self.start + len(self.values)

    @property
    def is_main_replica(self) -> bool:
        """The part is the main replica, except for data parallelism: no other data-parallel group writes it."""
        *others, _ = self.stored.replica_id
        return not any(others)

    @property
    def is_expert(self) -> bool:
        """The stored tensor stacks all experts; the part is one expert's row."""
        return bool(self.stored.prepend_axis_num)

    def boxes(self, start: int, stop: int, values: Tensor, *, prefix: str = "") -> Iterator[CheckpointShard]:
        """Yield the shards in range `start:stop` of the flattened parameter, which has the values `values`."""
        first, last = max(start, self.start), min(stop, self.stop)
        shape = (1,) * self.stored.prepend_axis_num + tuple(self.stored.local_shape)
        for box in cut_range(shape, first - self.start, last - self.start):
            position = self.start + box.start - start
            yield CheckpointShard(
                key=prefix + self.stored.key,
                global_shape=tuple(self.stored.global_shape),
                offset=tuple(a + b for a, b in zip(self.stored.global_offset, box.offset, strict=True)),
                data=values[position : position + prod(box.sizes)].view(box.sizes),
                is_padded=self.stored.allow_shape_mismatch,
            )


@dataclass(frozen=True, slots=True)
class FlatBox:
    """A box of a tensor whose values are contiguous in the flattened tensor."""

    offset: Shape
    sizes: Shape
    start: int
    """Offset in the flattened tensor."""


def cut_range(shape: Sequence[int], start: int, stop: int) -> Iterator[FlatBox]:
    """Cut range `start:stop` of a flattened tensor of `shape` into the fewest boxes, in order; at most 2 ndim - 1."""
    if start >= stop:
        return
    if len(shape) <= 1:
        yield FlatBox((start,) * len(shape), (stop - start,) * len(shape), start)
        return
    row = prod(shape[1:])
    first_full, end = -(-start // row), stop // row
    if start % row:
        yield from _in_row(shape, start // row, start, min(stop, first_full * row))
    if first_full < end:
        rest = tuple(shape[1:])
        yield FlatBox((first_full, *(0 for _ in rest)), (end - first_full, *rest), first_full * row)
    if stop % row and end * row >= start:  # else the range ends in the row in which it starts
        yield from _in_row(shape, end, end * row, stop)


def _in_row(shape: Sequence[int], number: int, start: int, stop: int) -> Iterator[FlatBox]:
    begin = number * prod(shape[1:])
    for box in cut_range(shape[1:], start - begin, stop - begin):
        yield FlatBox((number, *box.offset), (1, *box.sizes), begin + box.start)


def shards_to_save(model: MegatronModel, optim_shards: Mapping[int, OptimizerShard]) -> list[CheckpointShard]:
    """Return the shards that this rank writes; all ranks together write every value once.

    A data-parallel rank that holds a range of a parameter's optimizer state also writes this range of the parameter.
    Values that all data-parallel ranks hold are divided evenly by bytes.
    """
    shards: list[CheckpointShard] = []
    parts = [part for part in _parts(model, optim_shards) if part.is_main_replica]
    replicated = [part for part in parts if not _is_distributed(part, optim_shards)]
    ranges = {id(part): (part.start, part.stop) for part in parts}
    for group, is_expert in ((model.groups.dp_cp, False), (model.groups.expt_dp, True)):
        group_parts = [part for part in replicated if part.is_expert == is_expert]
        values = [(len(part.values), _bytes_per_value(part, optim_shards)) for part in group_parts]
        for part, (first, last) in zip(group_parts, split_evenly(values, group.rank(), group.size()), strict=True):
            ranges[id(part)] = part.start + first, part.start + last
    for part in parts:
        first, last = ranges[id(part)]
        optim_shard = optim_shards.get(part.owner)
        if optim_shard is not None:
            first, last = max(first, optim_shard.start), min(last, optim_shard.stop)
        if first < last:
            shards += part.boxes(first, last, part.values[first - part.start : last - part.start])
            shards += _optimizer_boxes(part, optim_shard, first, last)
    return [small for shard in shards for small in shard.cut(MAX_SHARD_BYTES)]


def split_evenly(values: Sequence[tuple[int, int]], rank: int, size: int) -> list[tuple[int, int]]:
    """Divide consecutive runs of values evenly over `size` ranks; return `rank`'s range of each run.

    Args:
        values: (number of values, bytes per value) of each run.
    """
    total = sum(count * each for count, each in values)
    first, last = total * rank // size, total * (rank + 1) // size
    ranges = []
    position = 0
    for count, each in values:
        start, stop = (min(max(-(-(bound - position) // each), 0), count) for bound in (first, last))
        ranges.append((start, stop))
        position += count * each
    return ranges


def held_shards(model: MegatronModel, optim_shards: Mapping[int, OptimizerShard]) -> list[CheckpointShard]:
    """Return all shards that this rank holds."""
    shards: list[CheckpointShard] = []
    for part in _parts(model, optim_shards):
        shards += part.boxes(part.start, part.stop, part.values)
        shards += _optimizer_boxes(part, optim_shards.get(part.owner), part.start, part.stop)
    return shards


def shards_to_load(model: MegatronModel, optim_shards: Mapping[int, OptimizerShard]) -> list[CheckpointShard]:
    """Return the shards that this rank reads: without ranges of its parameters that other ranks step.

    It receives these ranges from the other ranks, as after every optimizer step.
    """
    shards: list[CheckpointShard] = []
    for part in _parts(model, optim_shards):
        first, last = part.start, part.stop
        optim_shard = optim_shards.get(part.owner)
        if optim_shard is not None:
            first, last = max(first, optim_shard.start), min(last, optim_shard.stop)
        if first < last:
            shards += part.boxes(first, last, part.values[first - part.start : last - part.start])
            shards += _optimizer_boxes(part, optim_shard, first, last)
    return shards


def _is_distributed(part: _ParameterPart, optim_shards: Mapping[int, OptimizerShard]) -> bool:
    optim_shard = optim_shards.get(part.owner)
    return optim_shard is not None and optim_shard.is_distributed


def _bytes_per_value(part: _ParameterPart, optim_shards: Mapping[int, OptimizerShard]) -> int:
    optim_shard = optim_shards.get(part.owner)
    states = optim_shard.tensors.values() if optim_shard is not None else ()
    return part.values.itemsize + sum(tensor.itemsize for tensor in states)


def _optimizer_boxes(
    part: _ParameterPart, optim_shard: OptimizerShard | None, start: int, stop: int
) -> Iterator[CheckpointShard]:
    """Yield the optimizer-state shards in range `start:stop` of the flattened parameter."""
    if optim_shard is None:
        return
    first, last = max(start, optim_shard.start), min(stop, optim_shard.stop)
    for name, values in optim_shard.tensors.items():
        if first < last:
            here = values[first - optim_shard.start : last - optim_shard.start]
            yield from part.boxes(first, last, here, prefix=f"{OPTIMIZER_STATE}{name}.")


def _parts(model: MegatronModel, optim_shards: Mapping[int, OptimizerShard]) -> list[_ParameterPart]:
    parts = [part for each in nested_values(sharded_state_dict(model, CONTENT_METADATA)) for part in _parts_of(each)]
    known = {part.owner for part in parts}
    assert known >= optim_shards.keys(), f"{len(optim_shards.keys() - known)} parameters are trained and not stored"
    return parts


def _parts_of(sharded: ShardedBase) -> Iterator[_ParameterPart]:
    """Yield the parts of one parameter or buffer; none for Transformer Engine's FP8 extra state, which is no tensor."""
    if not isinstance(sharded, ShardedTensor | ShardedTensorFactory):
        return
    parameter = sharded.data.detach()
    stored = nested_values(sharded.build()) if isinstance(sharded, ShardedTensorFactory) else [sharded]
    for each in stored:
        data = each.data.detach()
        assert data.is_contiguous(), f"{each.key}: the stored part is not contiguous"
        yield _ParameterPart(
            owner=id(sharded.data),
            start=data.storage_offset() - parameter.storage_offset(),
            stored=each,
            values=data.view(-1),
        )
