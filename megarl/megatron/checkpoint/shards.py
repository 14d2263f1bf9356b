"""A rank's training state as boxes of the stored tensors, and the index by which they are found in files.

A parameter is stored as one or more tensors (gate and up are two), and the rank's part of each is contiguous. The
distributed optimizer shards its state by ranges of the flattened parameter. The part of such a range that lies in a
stored tensor is cut into boxes:

    rows of a part of shape [4, 5]      . . . x x   1 box: the rest of a row
    range 3:17                          x x x x x   1 box: all full rows
                                        x x x x x
                                        x x . . .   1 box: the start of a row
"""

from __future__ import annotations

import io
import json
import pickle
import struct
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import prod
from pathlib import Path
from typing import BinaryIO, override
from zipfile import ZIP_STORED, BadZipFile, ZipFile

import torch
from megatron.core.dist_checkpointing.core import CheckpointingConfig
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedBase, ShardedTensor, ShardedTensorFactory
from torch import Tensor
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from megarl.errors import DataError
from megarl.megatron.checkpoint.checkpoint_files import read_index
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


LOCAL_HEADER = struct.Struct("<26xHH")
"""Header of a zip member: lengths of the file name and of the extra field, which lie between header and data."""


def read_box(
    file: BinaryIO,
    at: int,
    length: int,
    dtype: torch.dtype,
    sizes: Sequence[int],
    offset: Sequence[int],
    lengths: Sequence[int],
) -> Tensor:
    """Read the box of shape `lengths` at `offset` in a contiguous tensor of shape `sizes`, which `torch.save` wrote.

    Args:
        file: the file that contains the archive written by `torch.save`.
        at: offset of the archive in `file`, in bytes.
        length: length of the archive, in bytes.
        dtype: dtype of the tensor.
        sizes: shape of the stored tensor.
        offset: position of the box in the tensor.
        lengths: shape of the box.

    Raises:
        ValueError: the archive does not contain such a tensor.
    """
    strides = [prod(sizes[axis + 1 :]) for axis in range(len(sizes))]
    first = sum(a * b for a, b in zip(offset, strides, strict=True))
    count = 1 + sum((n - 1) * b for n, b in zip(lengths, strides, strict=True))
    begin = at + _data_offset(_FileSlice(file, at, length), prod(sizes) * dtype.itemsize) + first * dtype.itemsize
    values = torch.empty(count, dtype=dtype)
    memory = memoryview(values.view(torch.uint8).numpy())
    file.seek(begin)
    found = file.readinto(memory)  # type: ignore[attr-defined]  # binary files opened with `open` have it
    if found != len(memory):
        raise ValueError(f"needs {len(memory)} bytes from byte {begin}, got {found}")
    return values.as_strided(tuple(lengths), tuple(strides))


def _data_offset(archive: _FileSlice, num_bytes: int) -> int:
    """Return the offset of the tensor data in the archive, in bytes."""
    try:
        with ZipFile(archive) as members:
            (member,) = (each for each in members.infolist() if each.filename.endswith("/data/0"))
    except BadZipFile as e:
        raise ValueError(f"no tensor begins at byte {archive.begin}: {e}") from e
    if member.compress_type != ZIP_STORED or member.file_size != num_bytes:
        raise ValueError(f"the tensor at byte {archive.begin} needs {num_bytes} bytes, got {member.file_size}")
    archive.seek(member.header_offset)
    name_and_extra: tuple[int, int] = LOCAL_HEADER.unpack(archive.read(LOCAL_HEADER.size))
    return member.header_offset + LOCAL_HEADER.size + sum(name_and_extra)


class _FileSlice(io.RawIOBase):
    """A byte range of a file, as a read-only file."""

    def __init__(self, file: BinaryIO, begin: int, length: int) -> None:
        self._file, self.begin, self._length = file, begin, length
        self._at = 0

    @override
    def seekable(self) -> bool:
        return True

    @override
    def readable(self) -> bool:
        return True

    @override
    def tell(self) -> int:
        return self._at

    @override
    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        if base + offset < 0:
            raise OSError(f"seek position must not be negative, got {base + offset}")
        self._at = base + offset
        return self._at

    @override
    def read(self, size: int = -1) -> bytes:
        left = max(0, self._length - self._at)
        self._file.seek(self.begin + self._at)
        data = self._file.read(left if size < 0 else min(size, left))
        self._at += len(data)
        return data


INDEX, COMMON, METADATA_JSON = ".metadata", "common.pt", "metadata.json"


@dataclass(frozen=True, slots=True)
class StoredShard:
    """A shard's position in the full tensor and in the checkpoint's files."""

    key: str
    dtype: torch.dtype
    global_shape: Shape
    offset: Shape
    sizes: Shape
    file: str
    at: int
    """Offset in the file, in bytes."""
    length: int
    """Length in the file, in bytes."""


def make_index(shards: Iterable[StoredShard]) -> bytes:
    """Return the content of the file `INDEX` for the shards of all ranks."""
    tensors: dict[str, TensorStorageMetadata] = {}
    locations: dict[MetadataIndex, _StorageInfo] = {}
    for shard in shards:
        metadata = tensors.setdefault(
            shard.key,
            TensorStorageMetadata(TensorProperties(dtype=shard.dtype), torch.Size(shard.global_shape), []),
        )
        assert metadata.size == shard.global_shape, (
            f"{shard.key}: {metadata.size} on one rank, {shard.global_shape} on another"
        )
        place = MetadataIndex(shard.key, shard.offset, len(metadata.chunks))
        locations[place] = _StorageInfo(shard.file, shard.at, shard.length)
        metadata.chunks.append(ChunkStorageMetadata(torch.Size(shard.offset), torch.Size(shard.sizes)))
    for key, metadata in tensors.items():
        held = sum(prod(chunk.sizes) for chunk in metadata.chunks)
        assert held == prod(metadata.size), (
            f"{key}: ranks write {held} values, the tensor has shape {list(metadata.size)}"
        )
    stored: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {**tensors}
    index = Metadata(stored, planner_data={}, storage_data=locations, storage_meta=StorageMeta())
    index.version = CURRENT_DCP_VERSION
    return pickle.dumps(index)


def serialize(value: Mapping[str, object]) -> bytes:
    """Return `value` in the format of `torch.save`."""
    out = io.BytesIO()
    torch.save(dict(value), out)
    return out.getvalue()


def metadata_json() -> bytes:
    """Return the content of the file `METADATA_JSON`."""
    return json.dumps(asdict(CheckpointingConfig("torch_dist"))).encode()


class StoredTensors:
    """Reader of a checkpoint's tensors."""

    def __init__(self, folder: Path) -> None:
        """Read the index; raise `DataError` if `folder` is not a complete checkpoint."""
        read_index(folder)
        self._folder = folder
        self._index = FileSystemReader(folder).read_metadata()

    @property
    def names(self) -> list[str]:
        """Names of the stored tensors, sorted."""
        metadata = self._index.state_dict_metadata.items()
        return sorted(name for name, stored in metadata if isinstance(stored, TensorStorageMetadata))

    def problems(self, shards: Sequence[CheckpointShard], *, vocab_size: int) -> list[str]:
        """Return one message for each tensor of `shards` that cannot be read."""
        found = []
        for key, key_shards in _by_key(shards).items():
            stored = self._index.state_dict_metadata.get(key)
            needed = key_shards[0]
            shape = list(needed.global_shape)
            if not isinstance(stored, TensorStorageMetadata):
                found.append(f"{key} is missing")
            elif stored.properties.dtype != needed.data.dtype:
                found.append(
                    f"{key} needs dtype {_dtype_name(needed.data.dtype)}, got {_dtype_name(stored.properties.dtype)}"
                )
            elif needed.is_padded and list(stored.size[1:]) == shape[1:] and stored.size[0] >= vocab_size:
                continue
            elif list(stored.size) != shape:
                found.append(f"{key} needs shape {shape}, got {list(stored.size)}")
        return found

    def read(self, shards: Sequence[CheckpointShard]) -> int:
        """Read the values of `shards` into their memory and return the number of bytes.

        Padding rows of the vocabulary that are not stored become 0.

        Raises:
            DataError: a file cannot be read, or a tensor is incomplete. Some shards may have been read already.
        """
        by_key = _by_key(shards)
        items: list[ReadItem] = []
        for key, key_shards in by_key.items():
            stored = self._index.state_dict_metadata[key]
            assert isinstance(stored, TensorStorageMetadata), key
            chunks = [ChunkStorageMetadata(torch.Size(each.offset), torch.Size(each.sizes)) for each in key_shards]
            found = create_read_items_for_chunk_list(key, stored, chunks)
            rows = stored.size[0] if key_shards[0].is_padded else None
            if sum(prod(item.lengths) for item in found) != sum(_num_stored_values(each, rows) for each in key_shards):
                raise DataError(f"{self._folder / INDEX} lacks parts of {key}")
            items += found
            for each in key_shards:
                if each.is_padded:
                    each.data.zero_()
        try:
            self._read_items(items, by_key)
        except (OSError, ValueError) as e:
            raise DataError(f"{self._folder} cannot be read: {e}") from e
        return sum(prod(item.lengths) * by_key[item.dest_index.fqn][0].data.itemsize for item in items)

    def _read_items(self, items: Iterable[ReadItem], by_key: Mapping[str, Sequence[CheckpointShard]]) -> None:
        """Read `items` into the memory that training uses, file by file in order of offset."""
        by_file: dict[str, list[tuple[_StorageInfo, ReadItem]]] = defaultdict(list)
        for item in items:
            place = self._index.storage_data[item.storage_index]
            by_file[place.relative_path].append((place, item))
        for name, of_file in by_file.items():
            # headers around the values are small and read for each item
            with (self._folder / name).open("rb", buffering=1024) as file:
                for place, item in sorted(of_file, key=lambda each: each[0].offset):
                    stored, dest = item.storage_index, item.dest_index
                    assert stored.index is not None
                    assert dest.index is not None
                    metadata = self._index.state_dict_metadata[stored.fqn]
                    assert isinstance(metadata, TensorStorageMetadata), stored.fqn
                    sizes = metadata.chunks[stored.index].sizes
                    data = by_key[dest.fqn][dest.index].data
                    at, length = place.offset, place.length
                    box = read_box(file, at, length, data.dtype, sizes, item.storage_offsets, item.lengths)
                    narrow_tensor_by_index(data, item.dest_offsets, item.lengths).copy_(box)


def _by_key(shards: Sequence[CheckpointShard]) -> dict[str, list[CheckpointShard]]:
    found = defaultdict(list)
    for shard in shards:
        found[shard.key].append(shard)
    return dict(found)


def _num_stored_values(shard: CheckpointShard, rows: int | None) -> int:
    """Return how many values of the shard lie in the tensor's first `rows` rows; None: all."""
    if rows is None:
        return prod(shard.sizes)
    return max(0, min(shard.sizes[0], rows - shard.offset[0])) * prod(shard.sizes[1:])


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
