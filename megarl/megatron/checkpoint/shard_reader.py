"""Reads parts of the pieces in a checkpoint's file: of one that is stored row by row, the rows that are needed."""

from __future__ import annotations

import io
import struct
from collections.abc import Sequence
from math import prod
from typing import BinaryIO
from zipfile import ZIP_STORED, BadZipFile, ZipFile

import torch
from torch import Tensor

LOCAL_HEADER = struct.Struct("<26xHH")
"""Of a zip archive's member: lengths of the name and the field that stand between it and the data."""


def read_box(
    file: BinaryIO,
    at: int,
    length: int,
    dtype: torch.dtype,
    sizes: Sequence[int],
    offset: Sequence[int],
    lengths: Sequence[int],
) -> Tensor:
    """A box of `lengths` at `offset` in a contiguous tensor of `sizes`, which `torch.save` wrote to `file`.

    Args:
        at: of the archive, in bytes, and so is its `length`.

    Raises:
        ValueError: there is no such tensor.
    """
    strides = [prod(sizes[axis + 1 :]) for axis in range(len(sizes))]
    first = sum(a * b for a, b in zip(offset, strides, strict=True))
    count = 1 + sum((n - 1) * b for n, b in zip(lengths, strides, strict=True))
    begin = at + _data_begin(_Slice(file, at, length), prod(sizes) * dtype.itemsize) + first * dtype.itemsize
    values = torch.empty(count, dtype=dtype)
    memory = memoryview(values.view(torch.uint8).numpy())  # type: ignore[arg-type]  # it is one
    file.seek(begin)
    found = file.readinto(memory)  # type: ignore[attr-defined]  # of every file that `open` gives
    if found != len(memory):
        raise ValueError(f"needs {len(memory)} bytes from {begin}, got {found}")
    return values.as_strided(tuple(lengths), tuple(strides))


def _data_begin(archive: _Slice, num_bytes: int) -> int:
    """Where in the archive the values are."""
    try:
        with ZipFile(archive) as members:
            (member,) = (each for each in members.infolist() if each.filename.endswith("/data/0"))
    except BadZipFile as e:
        raise ValueError(f"no tensor begins at byte {archive.begin}: {e}") from e
    if member.compress_type != ZIP_STORED or member.file_size != num_bytes:
        raise ValueError(f"the tensor at byte {archive.begin} needs {num_bytes} bytes, got {member.file_size}")
    archive.seek(member.header_offset)
    behind: tuple[int, int] = LOCAL_HEADER.unpack(archive.read(LOCAL_HEADER.size))
    return member.header_offset + LOCAL_HEADER.size + sum(behind)


class _Slice(io.RawIOBase):
    """Bytes of a file that are a file themselves."""

    def __init__(self, file: BinaryIO, begin: int, length: int) -> None:
        self._file, self.begin, self._length = file, begin, length
        self._at = 0

    def seekable(self) -> bool:
        """It is."""
        return True

    def readable(self) -> bool:
        """It is."""
        return True

    def tell(self) -> int:
        """Bytes from its start."""
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """As of any file."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        if base + offset < 0:
            raise OSError(f"needs a place in the file, got {base + offset}")
        self._at = base + offset
        return self._at

    def read(self, size: int = -1) -> bytes:
        """At most `size` bytes."""
        left = max(0, self._length - self._at)
        self._file.seek(self.begin + self._at)
        data = self._file.read(left if size < 0 else min(size, left))
        self._at += len(data)
        return data
