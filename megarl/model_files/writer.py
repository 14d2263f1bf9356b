"""Writing planned files box by box, under other names until all files of the folder are whole.

every writer    FileWriter      .model-00001-of-00002.safetensors.partial: header, then boxes wherever they belong
one of them     publish         after all have finished: final names, then the index
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from megarl.errors import DataError
from megarl.model_files.file_boxes import Box, extent, inside, pieces, runs
from megarl.model_files.file_plan import PlannedFile
from megarl.model_files.reader import PIECE_ELEMENTS
from megarl.model_files.weight_index import INDEX


class FileWriter:
    """The files of a folder that one process writes. Its methods raise OSError where the disk does."""

    def __init__(self, folder: Path, files: Iterable[PlannedFile]) -> None:
        """`folder` is there, and no other process writes these files."""
        self._folder, self._files = folder, {file.name: file for file in files}
        self._file_of = {name: file for file in self._files.values() for name in file.tensors}
        self._handles: dict[str, int] = {}
        self._written = dict.fromkeys(self._files, 0)

    def box(self, name: str) -> Box:
        """All of tensor `name`."""
        return tuple((0, n) for n in self._file_of[name].tensors[name].shape)

    def write(self, name: str, box: Box, tensor: Tensor) -> None:
        """Write a box of tensor `name`; each element is to be written once.

        Args:
            tensor: as large as the box, of the planned dtype; any device, any strides. What is not contiguous on the
                CPU is copied, `PIECE_ELEMENTS` elements at a time.
        """
        file = self._file_of[name]
        stored = file.tensors[name]
        assert tensor.dtype == getattr(torch, stored.dtype), (name, tensor.dtype, stored.dtype)
        assert tuple(tensor.shape) == extent(box), (name, tuple(tensor.shape), box)
        tensor = tensor.detach()
        is_direct = tensor.device.type == "cpu" and tensor.is_contiguous()
        handle, done = self._open(file), 0
        for piece in pieces(box, PIECE_ELEMENTS):
            count = prod(extent(piece))
            part = tensor.view(-1)[done : done + count] if is_direct else tensor[inside(piece, box)].contiguous().cpu()
            data, at = part.view(-1).view(torch.uint8).numpy().data, 0
            for first, length in runs(stored.shape, piece):
                stop = at + length * stored.itemsize
                _write_run(handle, data[at:stop], stored.offset + first * stored.itemsize)
                at = stop
            done += count
        self._written[file.name] += done * stored.itemsize

    def finish(self) -> None:
        """Bring the files to the disk.

        Raises:
            DataError: not every element of a file was written.
        """
        for file in self._files.values():
            if self._written[file.name] != file.data_bytes:
                raise DataError(
                    f"{self._folder / file.name} needs {file.data_bytes} bytes of tensors, got "
                    f"{self._written[file.name]}"
                )
            os.fsync(self._open(file))
        self._close()

    def discard(self) -> None:
        """Remove what was written."""
        self._close()
        for file in self._files.values():
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
    """Give all finished files of the folder their names, in place of any weights that were there; one process does it.

    Raises:
        DataError: a file is not there as it was planned.
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
    for left in folder.glob(".*.safetensors.partial"):  # of an attempt that failed
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
