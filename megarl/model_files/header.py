"""Read and write headers of the safetensors format. No tensor data is read and torch is not imported.

    8 bytes      length of the header, little-endian
    header       JSON, padded with spaces to a multiple of 8: name -> dtype, shape, data_offsets from the header's end
    data         row-major tensors, contiguous, without gaps

Source: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

from megarl.errors import DataError
from megarl.model_files.json_object import JsonObject, refuse_lfs_pointer

MAX_HEADER_BYTES = 100_000_000
"""Maximum header length that the format allows."""

_TORCH_NAMES = {
    "F64": ("float64", 8),
    "F32": ("float32", 4),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E5M2": ("float8_e5m2", 1),
    "F8_E8M0": ("float8_e8m0fnu", 1),
    "I64": ("int64", 8),
    "I32": ("int32", 4),
    "I16": ("int16", 2),
    "I8": ("int8", 1),
    "U64": ("uint64", 8),
    "U32": ("uint32", 4),
    "U16": ("uint16", 2),
    "U8": ("uint8", 1),
    "BOOL": ("bool", 1),
}
"""Dtype name in the format -> dtype name in torch, bytes per element."""

_FORMAT_NAMES = {torch: (name, size) for name, (torch, size) in _TORCH_NAMES.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """Location, shape and dtype of a tensor in a safetensors file."""

    file: Path
    shape: tuple[int, ...]
    dtype: str
    """Dtype name in torch, such as `float32`."""
    offset: int
    """Offset of the first byte from the start of the file."""

    @property
    def itemsize(self) -> int:
        """Number of bytes per element."""
        return itemsize(self.dtype)

    @property
    def num_bytes(self) -> int:
        """Size of the tensor in bytes."""
        return prod(self.shape) * self.itemsize


def itemsize(dtype: str) -> int:
    """Return the bytes per element of a dtype, given by its name in torch."""
    return _FORMAT_NAMES[dtype][1]


def read_header(file: Path) -> dict[str, StoredTensor]:
    """Read the header of a safetensors file; return its tensors by name.

    Raises:
        DataError: the file is missing, truncated, or not in safetensors format.
    """
    try:
        with file.open("rb") as f:
            size = os.fstat(f.fileno()).st_size
            length = _header_length(f.read(8), size)
            text = f.read(length)
    except OSError as e:
        raise DataError(f"{file} is not readable as safetensors: {e.strerror}") from e
    except _MalformedError as e:
        refuse_lfs_pointer(file)
        raise DataError(f"{file} is not readable as safetensors: {e}") from e
    try:
        return _parse(file, text, 8 + length, size)
    except _MalformedError as e:
        raise DataError(f"{file} is not readable as safetensors: {e}") from e


def encode_header(
    tensors: Mapping[str, tuple[tuple[int, ...], str]], file: Path
) -> tuple[bytes, dict[str, StoredTensor]]:
    """Return the header bytes of a file with these tensors (shape and torch dtype name), and their locations.

    Dtypes with more bytes per element come first, so that every tensor is aligned to its element size.
    """
    tree: JsonObject = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in sorted(tensors, key=lambda name: (-itemsize(tensors[name][1]), name)):
        shape, dtype = tensors[name]
        begin, end = end, end + prod(shape) * itemsize(dtype)
        tree[name] = {"dtype": _FORMAT_NAMES[dtype][0], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(tree, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    header = struct.pack("<Q", len(text)) + text
    del tree["__metadata__"]
    return header, {
        name: StoredTensor(
            file=file,
            shape=tensors[name][0],
            dtype=tensors[name][1],
            offset=len(header) + info["data_offsets"][0],
        )
        for name, info in tree.items()
    }


class _MalformedError(ValueError):
    """Describes what is wrong with a file, without its name."""


def _header_length(start: bytes, size: int) -> int:
    if len(start) < 8:
        raise _MalformedError(f"its header length needs 8 bytes, got {len(start)}")
    (length,) = struct.unpack("<Q", start)
    if length > MAX_HEADER_BYTES:
        raise _MalformedError(f"its header has at most {MAX_HEADER_BYTES} bytes, got {length}")
    if 8 + length > size:
        raise _MalformedError(f"it is truncated, its header needs 8 + {length} = {8 + length} bytes, got {size}")
    return int(length)


def _parse(file: Path, text: bytes, data_start: int, size: int) -> dict[str, StoredTensor]:
    try:
        tree = json.loads(text)
    except ValueError as e:
        raise _MalformedError(f"its header is not valid JSON: {e}") from e
    if not isinstance(tree, dict):
        raise _MalformedError(f"its header needs a JSON object, got {type(tree).__name__}")
    tree.pop("__metadata__", None)
    tensors = {name: _parse_tensor(file, name, info, data_start) for name, info in tree.items()}
    needs = max((t.offset + t.num_bytes for t in tensors.values()), default=data_start)
    if needs > size:
        cut = min((t.offset, name) for name, t in tensors.items() if t.offset + t.num_bytes > size)[1]
        raise _MalformedError(
            f"it is truncated, its tensors need {needs} bytes, got {size}, {needs - size} less; the first truncated "
            f"tensor is {cut}"
        )
    return tensors


def _parse_tensor(file: Path, name: str, info: object, data_start: int) -> StoredTensor:
    match info:
        case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [int(begin), int(end)]} if all(
            isinstance(n, int) and n >= 0 for n in shape
        ):
            pass
        case _:
            raise _MalformedError(f"tensor {name} needs dtype, shape and data_offsets, got {info}")
    if dtype not in _TORCH_NAMES:
        raise _MalformedError(f"tensor {name} has the unknown dtype {dtype}; known are {', '.join(_TORCH_NAMES)}")
    stored = StoredTensor(file=file, shape=tuple(shape), dtype=_TORCH_NAMES[dtype][0], offset=data_start + begin)
    if begin < 0 or end - begin != stored.num_bytes:
        raise _MalformedError(
            f"tensor {name} needs {stored.num_bytes} bytes for {dtype} {list(shape)}, its data_offsets give "
            f"{end} - {begin} = {end - begin}"
        )
    return stored
