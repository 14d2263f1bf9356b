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
from queue import SimpleQueue

import torch
from torch import Tensor

from megarl.megatron.checkpoint.model_state import in_own_storage
from megarl.megatron.requests import SavedFile
from megarl.megatron.runtime import platform

BUFFER_BYTES = 2**28
"""Host memory is taken in buffers of at most this size, which hold several pieces each."""

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
            fits = (buffer for buffer, size in enumerate(sizes) if size + num_bytes <= BUFFER_BYTES)
            buffer = next(fits, len(sizes))
            at = sizes[buffer] if buffer < len(sizes) else 0
            more = _taken(at + num_bytes) - _taken(at)
            if limit is not None and self.num_bytes + more > limit:
                self.rest.append(number)
                continue
            sizes[buffer:] = [at + num_bytes, *sizes[buffer + 1 :]]
            places.append((buffer, at))
            self.num_bytes += more
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


def _taken(num_bytes: int) -> int:
    """Bytes that a buffer of so many takes: torch rounds what it pins up to a power of two."""
    return 1 << (num_bytes - 1).bit_length() if num_bytes and platform.is_cuda() else num_bytes


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


class BackgroundWriter:
    """A thread that writes while others go on. It is kept: who starts one waits until it runs."""

    def __init__(self) -> None:
        self._begun: SimpleQueue[BackgroundWrite] = SimpleQueue()
        self._last: BackgroundWrite | None = None

    def write(self, folder: Path, files: Sequence[NewFile]) -> BackgroundWrite:
        """Have these written, after all that was begun before."""
        if self._last is None or self._last.has_died:
            threading.Thread(target=_run_forever, args=(self._begun,), name="checkpoint", daemon=True).start()
        self._last = BackgroundWrite(folder, files)
        self._begun.put(self._last)
        return self._last


class BackgroundWrite:
    """Files that a thread of its own writes."""

    def __init__(self, folder: Path, files: Sequence[NewFile]) -> None:
        self._folder = folder
        self._files = files
        self._outcome: Outcome | None = None
        self._over = threading.Event()

    @property
    def is_over(self) -> bool:
        """All is written, or has failed."""
        return self._over.is_set()

    @property
    def has_died(self) -> bool:
        """So has its thread."""
        return self.is_over and self._outcome is None

    def outcome(self) -> Outcome:
        """What became of it, once it is over. That its thread has died is a failure: other ranks have to know of it."""
        self._over.wait()
        return self._outcome or Outcome(failure=f"{self._folder}: the thread that writes has died; stderr says of what")

    def run(self) -> None:
        """Write them."""
        try:
            time.sleep(START_SECONDS)
            self._outcome = write_files(self._folder, self._files)
        finally:
            self._files = ()  # the copy may be given back
            self._over.set()


def _run_forever(begun: SimpleQueue[BackgroundWrite]) -> None:
    while True:
        begun.get().run()


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
