"""Read and write boxes of the tensors of a model folder.

Files are read, not memory-mapped: mapped pages would count as memory of the process. Quantized weights (`quantization`)
are dequantized chunk by chunk, on the device that they are read to.

Planned files are written under temporary names until all files of the folder are complete:

every writer    SafetensorsWriter   .model-00001-of-00002.safetensors.partial: header, then boxes at their offsets
one of them     publish             after all have finished: final names, then the index
"""

from __future__ import annotations

import ctypes
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from megarl.errors import DataError
from megarl.model_files.file_plan import Box, PlannedFile, contiguous_runs, extent, relative_slices, split_box
from megarl.model_files.header import StoredTensor
from megarl.model_files.quantization import (
    BLOCK,
    CODES,
    GROUP,
    GROUP_BYTES,
    PackedFormat,
    PackedTensor,
    find_scale_problems,
    scale_name,
)
from megarl.model_files.weight_index import INDEX, read_headers
from megarl_kernels import fp8_block_dequantize

CHUNK_ELEMENTS = 2**21
"""Maximum number of tensor elements per read: 8 MiB of float32."""


class SafetensorsReader:
    """Reads the safetensors files of one folder; keeps the files open until `close`.

    with SafetensorsReader(path) as folder:
        folder.require_shape("lm_head.weight", (384, 128))
        folder.read("lm_head.weight", ((0, 192), (0, 128)), parameter)
    """

    def __init__(self, path: str | Path) -> None:
        """Read the headers of all files.

        Raises:
            DataError: the folder has no safetensors files, or one cannot be read (`read_headers`).
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
        """Return if tensor `name` exists and has this shape, else raise DataError."""
        stored = self._find(name)
        if stored.shape != shape:
            raise DataError(f"{stored.file}: {name} needs shape {list(shape)}, got {list(stored.shape)}")

    def read(self, name: str, box: Box, out: Tensor, *, require_finite: bool = False) -> None:
        """Read a box of tensor `name` into `out`, converted to the dtype of `out`.

        Reads only the bytes of the box: directly into `out` if it is contiguous, on the CPU and of the stored dtype,
        else through a scratch buffer of `CHUNK_ELEMENTS` elements. A weight in FP8 is dequantized, unless `out` is FP8.
        A weight of 4 bits is decoded to its dtype first, whatever that of `out`.

        Args:
            out: tensor with the shape of the box, on any device, with any strides.
            require_finite: check the values for NaN and infinity.

        Raises:
            DataError: the tensor does not exist, the box exceeds it, only one of stored dtype and `out` is floating
                point, the scales of a weight in FP8 are missing or do not fit, the file is truncated, or a value is not
                finite.
        """
        stored = self._find(name)
        dtype: torch.dtype = getattr(torch, stored.dtype)
        _check_request(name, stored, box, dtype, out)
        out = out.detach()
        check = _FiniteCheck(name, stored) if require_finite and dtype.is_floating_point else None
        if isinstance(stored, PackedTensor):
            self._read_packed(name, stored, box, out, check)
        else:
            self._read_plain(name, stored, box, out, check)
        if check is not None:
            check.raise_if_not_finite()

    def _read_plain(self, name: str, stored: StoredTensor, box: Box, out: Tensor, check: _FiniteCheck | None) -> None:
        dtype: torch.dtype = getattr(torch, stored.dtype)
        scales = self._read_scales(name, box, out, check is not None) if _needs_scales(dtype, out) else None
        is_direct = out.device.type == "cpu" and out.dtype == dtype and out.is_contiguous()
        done = 0
        for chunk in split_box(box, CHUNK_ELEMENTS):
            count = math.prod(extent(chunk))
            values = out.view(-1)[done : done + count] if is_direct else self._scratch_view(count, dtype)
            self._read_box(name, stored, chunk, values)
            if not is_direct:
                values_there = values.view(extent(chunk))
                part = (
                    values_there if scales is None else scales.dequantize(values_there.to(out.device), chunk, out.dtype)
                )
                out[relative_slices(chunk, box)].copy_(part)
            if check is not None:
                check.update(values.view(extent(chunk)), chunk)
            done += count

    def _read_packed(self, name: str, packed: PackedTensor, box: Box, out: Tensor, check: _FiniteCheck | None) -> None:
        if packed.stated_shape is not None:
            stated = self._read_part(name, packed.stated_shape, ((0, 2),)).tolist()
            if stated != list(packed.shape):
                raise DataError(f"{packed.stated_shape.file}: {name}_shape needs {list(packed.shape)}, got {stated}")
        for chunk in split_box(packed.swap(box), CHUNK_ELEMENTS):
            *rows, (start, stop) = chunk
            first, last = start // GROUP, -(-stop // GROUP)
            values = self._read_part(name, packed.values, (*rows, (first * GROUP_BYTES, last * GROUP_BYTES)))
            # those of whole rows, which are contiguous: a few bytes of each row would take a read each
            scales = self._read_part(name, packed.scales, (*rows, (0, packed.scales.shape[-1])))[..., first:last]
            decoded = _decode(values.to(out.device), scales.to(out.device), packed.format)
            weight = decoded[..., start - first * GROUP : stop - first * GROUP]
            weight = weight.transpose(-1, -2) if packed.is_transposed else weight
            chunk = packed.swap(chunk)
            out[relative_slices(chunk, box)].copy_(weight)
            if check is not None:
                check.update(weight, chunk)

    def _read_part(self, name: str, stored: StoredTensor, box: Box) -> Tensor:
        """Return a box of a tensor that is part of weight `name`."""
        values = torch.empty(extent(box), dtype=getattr(torch, stored.dtype))
        self._read_box(name, stored, box, values)
        return values

    def _read_scales(self, name: str, box: Box, out: Tensor, require_finite: bool) -> _BlockScales:
        """Return the scales of the blocks that the box touches, on the device of `out`."""
        scales = scale_name(name)
        of_weight = {each: self.tensors[each] for each in (name, scales) if each in self.tensors}
        for problem in find_scale_problems(of_weight):
            raise DataError(problem)
        blocks = tuple((start // BLOCK, -(-stop // BLOCK)) for start, stop in box)
        values = torch.empty(extent(blocks), dtype=torch.float32)
        self.read(scales, blocks, values, require_finite=require_finite)
        return _BlockScales(values.to(out.device), (blocks[0][0] * BLOCK, blocks[1][0] * BLOCK))

    def _find(self, name: str) -> StoredTensor:
        if name not in self.tensors:
            raise DataError(f"{self.path}: none of the {len(self.tensors)} tensors is named {name}")
        return self.tensors[name]

    def _scratch_view(self, count: int, dtype: torch.dtype) -> Tensor:
        num_bytes = count * dtype.itemsize
        if len(self._scratch) < num_bytes:
            self._scratch = torch.empty(CHUNK_ELEMENTS * dtype.itemsize, dtype=torch.uint8)
        return self._scratch[:num_bytes].view(dtype)

    def _read_box(self, name: str, stored: StoredTensor, box: Box, values: Tensor) -> None:
        data, at = _as_memoryview(values), 0
        handle = self._open(stored.file)
        for first, count in contiguous_runs(stored.shape, box):
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


@dataclass(frozen=True)
class _BlockScales:
    """The scales of some blocks of a weight."""

    scales: Tensor
    """float32 [blocks, blocks]."""
    first: tuple[int, int]
    """First row and column of the weight that the first of them belongs to."""

    def dequantize(self, values: Tensor, box: Box, dtype: torch.dtype) -> Tensor:
        """Return the weight's `box`, whose FP8 values are given."""
        row, column = (start - first for (start, _), first in zip(box, self.first, strict=True))
        return fp8_block_dequantize(values, self.scales, row_offset=row, column_offset=column, dtype=dtype)


def _decode(values: Tensor, scales: Tensor, kind: PackedFormat) -> Tensor:
    """Return weights of 4 bits, [..., k], from bytes, uint8 [..., k / 2], and scales [..., k / 32]."""
    if kind == "MXFP4":
        powers = torch.tensor([2.0 ** (code - 128) for code in range(256)], dtype=torch.bfloat16, device=scales.device)
        scales = powers[scales.int()]
    table = torch.tensor(CODES[kind], dtype=scales.dtype, device=values.device)
    pairs = torch.stack((table.repeat(16), table.repeat_interleave(16)), dim=-1)  # by byte: lower half, upper half
    words = pairs.view(torch.int32 if scales.itemsize == 2 else torch.int64).view(-1)  # many times faster than pairs
    groups = words.index_select(0, values.view(-1).int()).view(scales.dtype).view(*scales.shape, GROUP)
    return (groups * scales.unsqueeze(-1)).flatten(-2)


def _needs_scales(dtype: torch.dtype, out: Tensor) -> bool:
    return dtype == torch.float8_e4m3fn and out.dtype != dtype


def _as_memoryview(values: Tensor) -> memoryview:
    """Return a memoryview of the bytes of a contiguous CPU tensor."""
    # numpy() would make the storage non-resizable for good, and a trainer frees the storage of offloaded weights
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
            raise DataError(f"{what} needs {len(into)} bytes at byte {offset}, got {at}: the file is truncated")
        at += count


def _check_request(name: str, stored: StoredTensor, box: Box, dtype: torch.dtype, out: Tensor) -> None:
    fits = len(box) == len(stored.shape) and all(
        0 <= start <= stop <= n for (start, stop), n in zip(box, stored.shape, strict=True)
    )
    if not fits:
        raise DataError(f"{stored.file}: {name} has shape {list(stored.shape)}, which does not contain box {box}")
    assert tuple(out.shape) == extent(box), (name, tuple(out.shape), box)
    if dtype.is_floating_point != out.dtype.is_floating_point:
        wanted = str(out.dtype).removeprefix("torch.")
        raise DataError(f"{stored.file}: {name} needs a dtype that converts to {wanted}, got {stored.dtype}")


@dataclass
class _FiniteCheck:
    """Counts the NaN and infinite values of a box."""

    name: str
    stored: StoredTensor
    num_checked: int = 0
    num_bad: int = 0
    first: tuple[int, ...] = ()
    """Index of the first bad value in the tensor."""

    def update(self, values: Tensor, chunk: Box) -> None:
        """Check the elements of a chunk, of its shape; a single pass if all are finite."""
        self.num_checked += values.numel()
        if not values.numel():
            return
        if values.dtype.itemsize == 1:
            values = values.float()  # torch cannot compare 8-bit floats
        low, high = torch.aminmax(values)  # NaN if any value is NaN
        if math.isfinite(low) and math.isfinite(high):
            return
        bad = torch.nonzero(~torch.isfinite(values))
        if not self.num_bad:
            self.first = tuple(start + int(i) for (start, _), i in zip(chunk, bad[0], strict=True))
        self.num_bad += len(bad)

    def raise_if_not_finite(self) -> None:
        if self.num_bad:
            raise DataError(
                f"{self.stored.file}: {self.name} needs finite values, {self.num_bad} of the {self.num_checked} read "
                f"are NaN or infinite, first at index {list(self.first)}"
            )


class SafetensorsWriter:
    """Writes the files of a folder that are assigned to one process. Methods raise OSError if writing fails."""

    def __init__(self, folder: Path, files: Iterable[PlannedFile]) -> None:
        """Prepare to write `files` into the existing `folder`; no other process may write them."""
        self._folder, self.files = folder, {file.name: file for file in files}
        self._file_of = {name: file for file in self.files.values() for name in file.tensors}
        self._handles: dict[str, int] = {}
        self._written = dict.fromkeys(self.files, 0)

    def full_box(self, name: str) -> Box:
        """Return the box that covers all of tensor `name`."""
        return tuple((0, n) for n in self._file_of[name].tensors[name].shape)

    def write(self, name: str, box: Box, tensor: Tensor) -> None:
        """Write a box of tensor `name`. Each element must be written exactly once.

        Args:
            tensor: values with the shape of the box and the planned dtype, on any device, with any strides. A tensor
                that is not contiguous on the CPU is copied in chunks of `CHUNK_ELEMENTS` elements.
        """
        file = self._file_of[name]
        stored = file.tensors[name]
        assert tensor.dtype == getattr(torch, stored.dtype), (name, tensor.dtype, stored.dtype)
        assert tuple(tensor.shape) == extent(box), (name, tuple(tensor.shape), box)
        tensor = tensor.detach()
        is_direct = tensor.device.type == "cpu" and tensor.is_contiguous()
        handle, done = self._open(file), 0
        for chunk in split_box(box, CHUNK_ELEMENTS):
            count = prod(extent(chunk))
            part = (
                tensor.view(-1)[done : done + count]
                if is_direct
                else tensor[relative_slices(chunk, box)].contiguous().cpu()
            )
            data, at = part.view(-1).view(torch.uint8).numpy().data, 0
            for first, length in contiguous_runs(stored.shape, chunk):
                stop = at + length * stored.itemsize
                _write_run(handle, data[at:stop], stored.offset + first * stored.itemsize)
                at = stop
            done += count
        self._written[file.name] += done * stored.itemsize

    @property
    def names(self) -> Set[str]:
        """The tensors of its files."""
        return self._file_of.keys()

    def finish(self) -> None:
        """Fsync and close the files.

        Raises:
            DataError: a file is incomplete.
        """
        for file in self.files.values():
            if self._written[file.name] != file.data_bytes:
                raise DataError(
                    f"{self._folder / file.name} needs {file.data_bytes} bytes of tensors, got "
                    f"{self._written[file.name]}"
                )
            os.fsync(self._open(file))
        self._close()

    def discard(self) -> None:
        """Close and delete the files written so far."""
        self._close()
        for file in self.files.values():
            (self._folder / file.partial_name).unlink(missing_ok=True)

    def _open(self, file: PlannedFile) -> int:
        if file.name not in self._handles:
            path = self._folder / file.partial_name
            self._handles[file.name] = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
            _write_run(self._handles[file.name], memoryview(file.header), 0)
        return self._handles[file.name]

    def _close(self) -> None:
        for handle in self._handles.values():
            os.close(handle)
        self._handles.clear()


def publish(folder: Path, files: Sequence[PlannedFile]) -> None:
    """Rename all finished files to their final names, replacing existing weights. Called by one process only.

    Raises:
        DataError: a file is missing or has another size than planned.
    """
    for file in files:
        partial = folder / file.partial_name
        size = partial.stat().st_size if partial.exists() else 0
        if size != file.num_bytes:
            raise DataError(f"{partial} needs {file.num_bytes} bytes, got {size}")
    (folder / INDEX).unlink(missing_ok=True)
    for old in folder.glob("*.safetensors"):
        old.unlink()
    for file in files:
        (folder / file.partial_name).rename(folder / file.name)
    for left in folder.glob(".*.safetensors.partial"):  # left by a failed attempt
        left.unlink()
    if len(files) > 1:
        _write_index(folder, files)


def _write_index(folder: Path, files: Sequence[PlannedFile]) -> None:
    weight_map = {name: file.name for file in files for name in file.tensors}
    index = {
        "metadata": {"total_size": sum(file.data_bytes for file in files)},
        "weight_map": dict(sorted(weight_map.items())),
    }
    partial = folder / f".{INDEX}.partial"
    partial.write_text(json.dumps(index, indent=2) + "\n")
    partial.rename(folder / INDEX)


def _write_run(handle: int, data: memoryview, offset: int) -> None:
    at = 0
    while at < len(data):
        at += os.pwrite(handle, data[at:], offset + at)
