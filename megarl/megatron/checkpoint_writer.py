"""Writes a rank's part of a checkpoint, now or in the background from a copy in host memory.

    begin_save     | copy to the host | training goes on ...
    thread                            | write, hash, fsync |
    finish_save                                             | what was written

A piece in a file is an archive as `torch.save` makes it: torch's distributed checkpoints are read from such.
"""

from __future__ import annotations

import ctypes
import hashlib
import io
import os
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megarl.megatron import platform
from megarl.megatron.checkpoint import in_own_storage
from megarl.megatron.work import SavedFile

BUFFER_BYTES = 2**28
"""Host memory is taken in buffers of this size: torch rounds what it pins up to a power of two."""

ALIGNMENT = 64

START_SECONDS = 0.02
"""The thread begins so much later: it would take turns with whoever started it, who has training to go on with."""


class HostCopy:
    """As many of `tensors` as fit, copied to host memory that is kept: a page is faulted in once."""

    def __init__(self, tensors: Sequence[Tensor], limit: int | None) -> None:
        """`limit`: bytes."""
        self.limit = limit
        self.rest: list[int] = []
        """Which of the tensors do not fit, by their indices."""
        self.copied: list[int] = []
        self.num_bytes = 0
        """Taken on the host."""
        places: list[tuple[int, int]] = []  # buffer, and where in it
        sizes: list[int] = []
        for number, tensor in enumerate(tensors):
            num_bytes = -(-tensor.numel() * tensor.itemsize // ALIGNMENT) * ALIGNMENT
            if limit is not None and self.num_bytes + num_bytes > limit:
                self.rest.append(number)
                continue
            if not sizes or sizes[-1] + num_bytes > BUFFER_BYTES:
                sizes.append(0)
            places.append((len(sizes) - 1, sizes[-1]))
            sizes[-1] += num_bytes
            self.num_bytes += num_bytes
            self.copied.append(number)
        self._buffers = [torch.empty(n, dtype=torch.uint8, pin_memory=platform.is_cuda()) for n in sizes]
        self._from = [tensors[number] for number in self.copied]
        self.tensors = [
            in_own_storage(_like(self._buffers[buffer][at:], tensor))
            for (buffer, at), tensor in zip(places, self._from, strict=True)
        ]
        """The copies, in the order of `copied`."""

    def fill(self) -> None:
        """Copy what the tensors are now."""
        if self.tensors:
            torch._foreach_copy_(self.tensors, self._from, non_blocking=True)
        if platform.is_cuda():
            torch.cuda.synchronize()


def _like(memory: Tensor, tensor: Tensor) -> Tensor:
    return memory[: tensor.numel() * tensor.itemsize].view(tensor.dtype).view(tensor.shape)


def on_host(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """Each when its turn comes: on the CPU where it lies, from a device as a copy; valid until the next one's turn."""
    for tensor in tensors:
        host = tensor.cpu()
        # not through numpy, which forbids to free the storage later: the state may be offloaded
        memory = (ctypes.c_char * (host.numel() * host.itemsize)).from_address(host.data_ptr())
        yield torch.frombuffer(memory, dtype=torch.uint8).view(host.dtype).view(host.shape)


@dataclass(frozen=True, slots=True, eq=False)
class NewFile:
    """A file to write."""

    name: str
    contents: Iterable[Tensor | bytes]
    """Tensors on the CPU, in storages of their own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of a rank's files."""

    files: tuple[SavedFile, ...] = ()
    places: tuple[tuple[int, int], ...] = ()
    """Of the tensors, in the order of writing: offset and length in its file."""
    seconds: float = 0.0
    failure: str | None = None
    """The file that could not be written, and why."""

    def __add__(self, other: Outcome) -> Outcome:
        return Outcome(
            files=self.files + other.files,
            places=self.places + other.places,
            seconds=self.seconds + other.seconds,
            failure=self.failure or other.failure,
        )


class BackgroundWrite:
    """Files that a thread of its own writes."""

    def __init__(self, folder: Path, files: Sequence[NewFile]) -> None:
        self._outcome: Outcome | None = None
        self._thread = threading.Thread(target=self._run, args=(folder, files), name="checkpoint", daemon=True)
        self._thread.start()

    @property
    def is_over(self) -> bool:
        """All is written, or has failed."""
        return not self._thread.is_alive()

    def outcome(self) -> Outcome:
        """What became of it, once it is over."""
        self._thread.join()
        assert self._outcome is not None, "the thread that writes a checkpoint has died"
        return self._outcome

    def _run(self, folder: Path, files: Sequence[NewFile]) -> None:
        time.sleep(START_SECONDS)
        self._outcome = write_files(folder, files)


def write_files(folder: Path, files: Sequence[NewFile]) -> Outcome:
    """All of them, durable; up to the first that cannot be written."""
    began = time.perf_counter()
    written: list[SavedFile] = []
    places: list[tuple[int, int]] = []
    failure = None
    path = folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file in files:
            path = folder / file.name
            written.append(_write(path, file.contents, places))
        path = folder
        _sync_folder(folder)
    except OSError as e:
        failure = f"{path}: {e.strerror or e}"
    return Outcome(files=tuple(written), places=tuple(places), seconds=time.perf_counter() - began, failure=failure)


def _write(path: Path, contents: Iterable[Tensor | bytes], places: list[tuple[int, int]]) -> SavedFile:
    with path.open("wb") as raw:
        file = _HashedFile(raw)
        try:
            for each in contents:
                if isinstance(each, bytes):
                    file.write(each)
                    continue
                offset = file.num_bytes
                torch.save(each, file)  # type: ignore[arg-type]  # it needs no more of a file than this
                places.append((offset, file.num_bytes - offset))
            raw.flush()
            os.fsync(raw.fileno())
        except (OSError, RuntimeError) as e:
            with suppress(OSError):
                raw.close()  # else leaving the block would try to write again
            if file.error is None:
                raise
            raise file.error from e
    return SavedFile(name=path.name, bytes=file.num_bytes, sha256=file.hash.hexdigest())


class _HashedFile:
    """A file whose checksum is that of what was meant to be written, not of what can be read again."""

    def __init__(self, file: io.BufferedWriter) -> None:
        self._file = file
        self.hash = hashlib.sha256()
        self.num_bytes = 0
        self.error: OSError | None = None
        """What stopped a write; torch's writer makes another error of it."""

    def write(self, data: bytes | memoryview) -> int:
        """All of it."""
        try:
            self._file.write(data)
        except OSError as e:
            self.error = e
            raise
        self.hash.update(data)
        self.num_bytes += len(data)
        return len(data)

    def flush(self) -> None:
        """For torch's writer, which asks for it after each tensor."""


def _sync_folder(folder: Path) -> None:
    """A new file is in its folder after a power failure too."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
