"""Write planned safetensors files box by box, under temporary names until all files of the folder are complete.

every writer    SafetensorsWriter   .model-00001-of-00002.safetensors.partial: header, then boxes at their offsets
one of them     publish             after all have finished: final names, then the index
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence, Set
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from megarl.errors import DataError
from megarl.model_files.file_plan import Box, PlannedFile, contiguous_runs, extent, relative_slices, split_box
from megarl.model_files.reader import CHUNK_ELEMENTS
from megarl.model_files.weight_index import INDEX


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
