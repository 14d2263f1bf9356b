"""The index of a distributed checkpoint, with which torch's, megatron-core's and our readers find tensors in files."""

from __future__ import annotations

import io
import json
import pickle
import struct
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import BinaryIO, override
from zipfile import ZIP_STORED, BadZipFile, ZipFile

import torch
from megatron.core.dist_checkpointing.core import CheckpointingConfig
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
from megarl.megatron.checkpoint.shards import CheckpointShard, Shape

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
