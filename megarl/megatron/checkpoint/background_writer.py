"""Writes a rank's part of a checkpoint: synchronously, or in a background thread from staged host copies.

    begin_save     | copy to host memory | training continues ...
    thread                               | write, hash, fsync |
    finish_save                                               | return the files written

Each tensor in a file is an archive as written by `torch.save`, the format of torch's distributed checkpoints.
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

from megarl.cluster.process.atomic_files import sync_path
from megarl.megatron.checkpoint.model_state import with_own_storage
from megarl.megatron.requests import SavedFile
from megarl.megatron.runtime import platform

BUFFER_BYTES = 2**28
"""Host memory is allocated in buffers of at most this size; each holds several tensors."""

ALIGNMENT = 64

START_DELAY_SECONDS = 0.02
"""Delay before the thread starts to write: else it competes for the GIL with the caller, which resumes training."""


class HostStaging:
    """Copies of as many tensors as fit in host memory. The memory is kept and reused, so pages are faulted in once."""

    def __init__(self, tensors: Sequence[Tensor], limit: int | None) -> None:
        """Allocate memory for `tensors`, at most `limit` bytes; None: no limit."""
        self.limit = limit
        self.not_staged: list[int] = []
        """Indices of the tensors that do not fit."""
        self.staged: list[int] = []
        """Indices of the tensors that are copied."""
        self.num_bytes = 0
        """Host memory allocated, in bytes."""
        locations: list[tuple[int, int]] = []  # buffer index, and offset in the buffer
        sizes: list[int] = []
        for number, tensor in enumerate(tensors):
            num_bytes = -(-tensor.numel() * tensor.itemsize // ALIGNMENT) * ALIGNMENT
            fits = (buffer for buffer, size in enumerate(sizes) if size + num_bytes <= BUFFER_BYTES)
            buffer = next(fits, len(sizes))
            at = sizes[buffer] if buffer < len(sizes) else 0
            more = allocated_bytes(at + num_bytes) - allocated_bytes(at)
            if limit is not None and self.num_bytes + more > limit:
                self.not_staged.append(number)
                continue
            sizes[buffer:] = [at + num_bytes, *sizes[buffer + 1 :]]
            locations.append((buffer, at))
            self.num_bytes += more
            self.staged.append(number)
        self.buffers = [torch.empty(n, dtype=torch.uint8, pin_memory=platform.is_cuda()) for n in sizes]
        self.tensors = [
            with_own_storage(_view_as(self.buffers[buffer][at:], tensors[number]))
            for (buffer, at), number in zip(locations, self.staged, strict=True)
        ]
        """Host copies, in the order of `staged`."""

    def stage(self, tensors: Sequence[Tensor]) -> None:
        """Copy the values of `tensors`, which are as large as those that the memory was allocated for."""
        if self.tensors:
            torch._foreach_copy_(self.tensors, [tensors[number] for number in self.staged], non_blocking=True)
        if platform.is_cuda():
            torch.cuda.synchronize()


def allocated_bytes(num_bytes: int) -> int:
    """Return the bytes allocated for a buffer of `num_bytes`: torch rounds pinned memory up to a power of two."""
    return 1 << (num_bytes - 1).bit_length() if num_bytes and platform.is_cuda() else num_bytes


def _view_as(memory: Tensor, tensor: Tensor) -> Tensor:
    return memory[: tensor.numel() * tensor.itemsize].view(tensor.dtype).view(tensor.shape)


def tensors_on_host(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield each tensor on the CPU: CPU tensors as views, device tensors as copies; valid until the next one."""
    for tensor in tensors:
        host = tensor.cpu()
        # not via numpy: it would prevent freeing the storage later, and the state may be offloaded
        memory = (ctypes.c_char * (host.numel() * host.itemsize)).from_address(host.data_ptr())
        yield torch.frombuffer(memory, dtype=torch.uint8).view(host.dtype).view(host.shape)


@dataclass(frozen=True, slots=True, eq=False)
class NewFile:
    """A file to write, with its name and contents."""

    name: str
    contents: Iterable[Tensor | bytes]
    """Bytes, or CPU tensors that each have their own storage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteResult:
    """Result of writing a rank's files."""

    files: tuple[SavedFile, ...] = ()
    """Files that were written completely."""
    locations: tuple[tuple[int, int], ...] = ()
    """(offset, length) in bytes of each tensor in its file, in the order of writing."""
    seconds: float = 0.0
    """Time spent writing, in seconds."""
    failure: str | None = None
    """Path of the file that could not be written, and the error; None: no failure."""

    def __add__(self, other: WriteResult) -> WriteResult:
        return WriteResult(
            files=self.files + other.files,
            locations=self.locations + other.locations,
            seconds=self.seconds + other.seconds,
            failure=self.failure or other.failure,
        )


class BackgroundWriter:
    """A background thread that writes files. It is kept between saves, because starting a thread blocks the caller."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[BackgroundWrite] = SimpleQueue()
        self._last: BackgroundWrite | None = None

    def write(self, folder: Path, files: Sequence[NewFile]) -> BackgroundWrite:
        """Queue `files` to be written, after all earlier writes."""
        if self._last is None or self._last.thread_died:
            threading.Thread(target=_run_forever, args=(self._queue,), name="checkpoint", daemon=True).start()
        self._last = BackgroundWrite(folder, files)
        self._queue.put(self._last)
        return self._last


class BackgroundWrite:
    """Files that the background thread writes."""

    def __init__(self, folder: Path, files: Sequence[NewFile]) -> None:
        self._folder = folder
        self._files = files
        self._result: WriteResult | None = None
        self._done = threading.Event()

    @property
    def is_done(self) -> bool:
        """The files are written, or writing has failed."""
        return self._done.is_set()

    @property
    def thread_died(self) -> bool:
        """Writing ended without a result: the thread died."""
        return self.is_done and self._result is None

    def result(self) -> WriteResult:
        """Wait for the end of the write and return its result.

        A dead thread is reported as a failure, so that the other ranks learn of it.
        """
        self._done.wait()
        return self._result or WriteResult(
            failure=f"{self._folder}: the writer thread has died; see stderr for the error"
        )

    def run(self) -> None:
        """Write the files; called in the background thread."""
        try:
            time.sleep(START_DELAY_SECONDS)
            self._result = write_files(self._folder, self._files)
        finally:
            self._files = ()  # so that the host copies can be freed
            self._done.set()


def _run_forever(queue: SimpleQueue[BackgroundWrite]) -> None:
    while True:
        queue.get().run()


def write_files(folder: Path, files: Sequence[NewFile]) -> WriteResult:
    """Write and fsync `files`; stop at the first that cannot be written."""
    began = time.perf_counter()
    written: list[SavedFile] = []
    locations: list[tuple[int, int]] = []
    failure = None
    path = folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file in files:
            path = folder / file.name
            written.append(write_file(path, file.contents, locations))
        path = folder
        sync_path(folder)
    except OSError as e:
        failure = f"{path}: {e.strerror or e}"
    return WriteResult(
        files=tuple(written), locations=tuple(locations), seconds=time.perf_counter() - began, failure=failure
    )


def write_file(path: Path, contents: Iterable[Tensor | bytes], locations: list[tuple[int, int]]) -> SavedFile:
    """Write and fsync a file; return its size and hash, and append offset and length of each tensor to `locations`."""
    with path.open("wb") as raw:
        file = _HashedFile(raw)
        try:
            for each in contents:
                if isinstance(each, bytes):
                    file.write(each)
                    continue
                offset = file.num_bytes
                torch.save(each, file)  # type: ignore[arg-type]  # it uses no other method of a file
                locations.append((offset, file.num_bytes - offset))
            raw.flush()
            os.fsync(raw.fileno())
        except (OSError, RuntimeError) as e:
            with suppress(OSError):
                raw.close()  # else leaving the block would retry the write
            if file.error is None:
                raise
            raise file.error from e
    return SavedFile(name=path.name, bytes=file.num_bytes, sha256=file.hash.hexdigest())


class _HashedFile:
    """A file that hashes the data passed to it, so the checksum does not depend on what the disk returns later."""

    def __init__(self, file: io.BufferedWriter) -> None:
        self._file = file
        self.hash = hashlib.sha256()
        self.num_bytes = 0
        self.error: OSError | None = None
        """Error of a failed write; torch's writer raises a different error for it."""

    def write(self, data: bytes | memoryview) -> int:
        """Write all of `data` and add it to the hash."""
        try:
            self._file.write(data)
        except OSError as e:
            self.error = e
            raise
        self.hash.update(data)
        self.num_bytes += len(data)
        return len(data)

    def flush(self) -> None:
        """Do nothing; torch's writer calls it after each tensor."""
