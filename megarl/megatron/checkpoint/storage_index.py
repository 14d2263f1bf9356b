"""The index of a checkpoint: by it torch's and megatron-core's readers find the tensors in its files, and so do we."""

from __future__ import annotations

import io
import json
import pickle
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.core import CheckpointingConfig
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
from megarl.megatron.checkpoint.shard_reader import read_box
from megarl.megatron.checkpoint.shards import Piece, Shape

INDEX, COMMON, KIND = ".metadata", "common.pt", "metadata.json"


@dataclass(frozen=True, slots=True)
class StoredPiece:
    """Where a piece is."""

    key: str
    dtype: torch.dtype
    global_shape: Shape
    offset: Shape
    sizes: Shape
    file: str
    at: int
    """Bytes from the file's start."""
    length: int


def make_index(pieces: Iterable[StoredPiece]) -> bytes:
    """What the file `INDEX` holds, for the pieces of all ranks."""
    tensors: dict[str, TensorStorageMetadata] = {}
    places: dict[MetadataIndex, _StorageInfo] = {}
    for piece in pieces:
        whole = tensors.setdefault(
            piece.key,
            TensorStorageMetadata(TensorProperties(dtype=piece.dtype), torch.Size(piece.global_shape), []),
        )
        assert whole.size == piece.global_shape, f"{piece.key}: {whole.size} on one rank, {piece.global_shape} on one"
        place = MetadataIndex(piece.key, piece.offset, len(whole.chunks))
        places[place] = _StorageInfo(piece.file, piece.at, piece.length)
        whole.chunks.append(ChunkStorageMetadata(torch.Size(piece.offset), torch.Size(piece.sizes)))
    for key, whole in tensors.items():
        held = sum(prod(chunk.sizes) for chunk in whole.chunks)
        assert held == prod(whole.size), f"{key}: ranks write {held} values of {list(whole.size)}"
    stored: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {**tensors}
    index = Metadata(stored, planner_data={}, storage_data=places, storage_meta=StorageMeta())
    index.version = CURRENT_DCP_VERSION
    return pickle.dumps(index)


def serialized(value: Mapping[str, Any]) -> bytes:
    """As `torch.save` writes it."""
    out = io.BytesIO()
    torch.save(dict(value), out)
    return out.getvalue()


def kind() -> bytes:
    """What the file `KIND` holds."""
    return json.dumps(asdict(CheckpointingConfig("torch_dist"))).encode()


class StoredTensors:
    """The tensors of a checkpoint."""

    def __init__(self, folder: Path) -> None:
        """Raise `DataError` where `folder` is no whole checkpoint."""
        read_index(folder)
        self._folder = folder
        self._index = FileSystemReader(folder).read_metadata()

    @property
    def names(self) -> list[str]:
        """Of its tensors, sorted."""
        metadata = self._index.state_dict_metadata.items()
        return sorted(name for name, stored in metadata if isinstance(stored, TensorStorageMetadata))

    def problems(self, pieces: Sequence[Piece], *, vocab_size: int) -> list[str]:
        """Why `pieces` cannot be read; nothing where they can."""
        found = []
        for key, of_key in _by_key(pieces).items():
            stored = self._index.state_dict_metadata.get(key)
            needed = of_key[0]
            shape = list(needed.global_shape)
            if not isinstance(stored, TensorStorageMetadata):
                found.append(f"{key} is missing")
            elif stored.properties.dtype != needed.data.dtype:
                found.append(f"{key} needs dtype {_name(needed.data.dtype)}, got {_name(stored.properties.dtype)}")
            elif needed.is_padded and list(stored.size[1:]) == shape[1:] and stored.size[0] >= vocab_size:
                continue
            elif list(stored.size) != shape:
                found.append(f"{key} needs shape {shape}, got {list(stored.size)}")
        return found

    def read(self, pieces: Sequence[Piece]) -> int:
        """Fill `pieces`; bytes read. Rows that pad the vocabulary and are not stored become 0.

        Raises:
            DataError: a file cannot be read, or does not hold all of a tensor. Some pieces have been filled then.
        """
        by_key = _by_key(pieces)
        items: list[ReadItem] = []
        for key, of_key in by_key.items():
            stored = self._index.state_dict_metadata[key]
            assert isinstance(stored, TensorStorageMetadata), key
            chunks = [ChunkStorageMetadata(torch.Size(each.offset), torch.Size(each.sizes)) for each in of_key]
            found = create_read_items_for_chunk_list(key, stored, chunks)
            rows = stored.size[0] if of_key[0].is_padded else None
            if sum(prod(item.lengths) for item in found) != sum(_values_before(each, rows) for each in of_key):
                raise DataError(f"{self._folder / INDEX} says where a part of {key} is, needs to of all of it")
            items += found
            for each in of_key:
                if each.is_padded:
                    each.data.zero_()
        try:
            self._read_items(items, by_key)
        except (OSError, ValueError) as e:
            raise DataError(f"{self._folder} cannot be read: {e}") from e
        return sum(prod(item.lengths) * by_key[item.dest_index.fqn][0].data.itemsize for item in items)

    def _read_items(self, items: Iterable[ReadItem], by_key: Mapping[str, Sequence[Piece]]) -> None:
        """To where training itself keeps the values; file after file, from its start to its end."""
        by_file: dict[str, list[tuple[_StorageInfo, ReadItem]]] = defaultdict(list)
        for item in items:
            place = self._index.storage_data[item.storage_index]
            by_file[place.relative_path].append((place, item))
        for name, of_file in by_file.items():
            # what stands before and behind values is little, and read for each
            with (self._folder / name).open("rb", buffering=1024) as file:
                for place, item in sorted(of_file, key=lambda each: each[0].offset):
                    stored, dest = item.storage_index, item.dest_index
                    assert stored.index is not None
                    assert dest.index is not None
                    whole = self._index.state_dict_metadata[stored.fqn]
                    assert isinstance(whole, TensorStorageMetadata), stored.fqn
                    sizes = whole.chunks[stored.index].sizes
                    data = by_key[dest.fqn][dest.index].data
                    at, length = place.offset, place.length
                    box = read_box(file, at, length, data.dtype, sizes, item.storage_offsets, item.lengths)
                    narrow_tensor_by_index(data, item.dest_offsets, item.lengths).copy_(box)


def _by_key(pieces: Sequence[Piece]) -> dict[str, list[Piece]]:
    found = defaultdict(list)
    for piece in pieces:
        found[piece.key].append(piece)
    return dict(found)


def _values_before(piece: Piece, rows: int | None) -> int:
    """How many values of the piece are in the tensor's first `rows` rows; None: all are."""
    if rows is None:
        return prod(piece.sizes)
    return max(0, min(piece.sizes[0], rows - piece.offset[0])) * prod(piece.sizes[1:])


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
