"""Reads a box of a tensor from a checkpoint file without reading the rest of the tensor."""

from __future__ import annotations

import io
import struct
from collections.abc import Sequence
from math import prod
from typing import BinaryIO, override
from zipfile import ZIP_STORED, BadZipFile, ZipFile

import torch
from torch import Tensor

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
