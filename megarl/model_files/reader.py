"""Boxes of the tensors of a model folder, read straight into other tensors.

Files are read, not mapped: pages of a mapping would count as memory of the process.
"""

from __future__ import annotations

import ctypes
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import torch
from torch import Tensor

from megarl.errors import DataError
from megarl.model_files.file_boxes import Box, extent, inside, pieces, runs
from megarl.model_files.header import StoredTensor
from megarl.model_files.weight_index import read_headers

PIECE_ELEMENTS = 2**21
"""Of a tensor are read at a time: 8 MiB of float32."""


class TensorFolder:
    """The safetensors of one folder; holds its files open.

    with TensorFolder(path) as folder:
        folder.require_shape("lm_head.weight", (384, 128))
        folder.read("lm_head.weight", ((0, 192), (0, 128)), parameter)
    """

    def __init__(self, path: str | Path) -> None:
        """Read the headers.

        Raises:
            DataError: no safetensors there, or one is not readable; see `read_headers`.
        """
        self.path = Path(path)
        self.tensors: Mapping[str, StoredTensor] = read_headers(self.path)
        self._handles: dict[Path, int] = {}
        self._scratch = torch.empty(0, dtype=torch.uint8)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Close the files and drop the scratch memory."""
        for handle in self._handles.values():
            os.close(handle)
        self._handles.clear()
        self._scratch = torch.empty(0, dtype=torch.uint8)

    def require_shape(self, name: str, shape: tuple[int, ...]) -> None:
        """Return if tensor `name` is there and has this shape, else raise DataError."""
        stored = self._find(name)
        if stored.shape != shape:
            raise DataError(f"{stored.file}: {name} needs shape {list(shape)}, got {list(stored.shape)}")

    def read(self, name: str, box: Box, out: Tensor, *, require_finite: bool = False) -> None:
        """Fill `out` with a box of tensor `name`, converted to the dtype of `out`.

        Reads the bytes of the box alone, into `out` itself where it is contiguous, on the CPU and of the stored dtype,
        else by way of `PIECE_ELEMENTS` elements of scratch memory.

        Args:
            out: as large as the box; any device, any strides.
            require_finite: look for NaN and infinite values in what is read.

        Raises:
            DataError: no such tensor, the box lies outside it, its numbers are no floats where `out` has floats or
                the other way round, the file is cut short, or a value is not finite.
        """
        stored = self._find(name)
        dtype: torch.dtype = getattr(torch, stored.dtype)
        _require_readable(name, stored, box, dtype, out)
        out = out.detach()
        is_direct = out.device.type == "cpu" and out.dtype == dtype and out.is_contiguous()
        check = _FiniteCheck(name, stored) if require_finite and dtype.is_floating_point else None
        done = 0
        for piece in pieces(box, PIECE_ELEMENTS):
            count = math.prod(extent(piece))
            values = out.view(-1)[done : done + count] if is_direct else self._space(count, dtype)
            self._fill(name, stored, piece, values)
            if not is_direct:
                out[inside(piece, box)].copy_(values.view(extent(piece)))
            if check is not None:
                check.look(values, piece)
            done += count
        if check is not None:
            check.require()

    def _find(self, name: str) -> StoredTensor:
        if name not in self.tensors:
            raise DataError(f"{self.path}: none of its {len(self.tensors)} tensors is {name}")
        return self.tensors[name]

    def _space(self, count: int, dtype: torch.dtype) -> Tensor:
        num_bytes = count * dtype.itemsize
        if len(self._scratch) < num_bytes:
            self._scratch = torch.empty(PIECE_ELEMENTS * dtype.itemsize, dtype=torch.uint8)
        return self._scratch[:num_bytes].view(dtype)

    def _fill(self, name: str, stored: StoredTensor, box: Box, values: Tensor) -> None:
        data, at = _memory(values), 0
        handle = self._open(stored.file)
        for first, count in runs(stored.shape, box):
            stop = at + count * stored.itemsize
            _read_run(handle, data[at:stop], stored.offset + first * stored.itemsize, f"{stored.file}: {name}")
            at = stop

    def _open(self, file: Path) -> int:
        if file not in self._handles:
            try:
                self._handles[file] = os.open(file, os.O_RDONLY)
            except OSError as e:
                raise DataError(f"{file} cannot be read: {e.strerror}") from e
        return self._handles[file]


def _memory(values: Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the CPU."""
    # numpy() would fix the size of the storage for good, and a trainer frees those of weights that it offloads
    array = (ctypes.c_ubyte * (values.numel() * values.element_size())).from_address(values.data_ptr())
    return memoryview(array).cast("B")


def _read_run(handle: int, into: memoryview, offset: int, what: str) -> None:
    at = 0
    while at < len(into):
        try:
            count = os.preadv(handle, [into[at:]], offset + at)
        except OSError as e:
            raise DataError(f"{what} cannot be read: {e.strerror}") from e
        if count == 0:
            raise DataError(f"{what} needs {len(into)} bytes at byte {offset}, got {at}: the file is cut short")
        at += count


def _require_readable(name: str, stored: StoredTensor, box: Box, dtype: torch.dtype, out: Tensor) -> None:
    fits = len(box) == len(stored.shape) and all(
        0 <= start <= stop <= n for (start, stop), n in zip(box, stored.shape, strict=True)
    )
    if not fits:
        raise DataError(f"{stored.file}: {name} has shape {list(stored.shape)}, in which box {box} does not lie")
    assert tuple(out.shape) == extent(box), (name, tuple(out.shape), box)
    if dtype.is_floating_point != out.dtype.is_floating_point:
        wanted = str(out.dtype).removeprefix("torch.")
        raise DataError(f"{stored.file}: {name} needs a dtype that becomes {wanted}, got {stored.dtype}")


@dataclass
class _FiniteCheck:
    """Counts values of a box that are no numbers."""

    name: str
    stored: StoredTensor
    num_looked: int = 0
    num_bad: int = 0
    first: tuple[int, ...] = ()
    """Index in the tensor."""

    def look(self, values: Tensor, piece: Box) -> None:
        """Take the elements of a piece into account, row-major; one pass over them where all is well."""
        self.num_looked += values.numel()
        if not values.numel():
            return
        if values.dtype.itemsize == 1:
            values = values.float()  # torch compares no 8-bit floats
        low, high = torch.aminmax(values)  # NaN where any value is
        if math.isfinite(low) and math.isfinite(high):
            return
        bad = torch.nonzero(~torch.isfinite(values))
        if not self.num_bad:
            at = np.unravel_index(int(bad[0]), extent(piece))
            self.first = tuple(start + int(i) for (start, _), i in zip(piece, at, strict=True))
        self.num_bad += len(bad)

    def require(self) -> None:
        if self.num_bad:
            raise DataError(
                f"{self.stored.file}: {self.name} needs finite values, {self.num_bad} of the {self.num_looked} read "
                f"are NaN or infinite, first at index {list(self.first)}"
            )
