"""Atomic file writes, and fsync of files and folders."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

MAX_BYTES = 2**16

LOG_TAIL_LINES = 15
"""Number of lines of a log file shown in error messages."""

LOG_TAIL_PREFIX = "the end of "
"""Text before a log tail in an error message: all that follows it differs between two failures of the same cause."""


def tail(log: Path) -> str:
    """Return the complete lines in the last `MAX_BYTES` bytes of `log`, without trailing blank lines."""
    with log.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - MAX_BYTES))
        text = file.read().decode(errors="replace")
    return (text if size <= MAX_BYTES else text.partition("\n")[2]).rstrip()


def quote_tail(log: Path, *, skip: tuple[str, ...] = ()) -> str:
    """Return `LOG_TAIL_PREFIX`, the path and the last lines of `log` for an error message; empty if it has none.

    Args:
        skip: prefixes of lines to leave out.
    """
    lines = [line for line in tail(log).splitlines() if not line.startswith(skip)] if log.exists() else []
    return f"{LOG_TAIL_PREFIX}{log}:\n" + "\n".join(lines[-LOG_TAIL_LINES:]) if any(lines) else ""


@contextmanager
def atomic_write(path: Path, *, make_folder: bool = True) -> Iterator[Path]:
    """Yield a temporary path that replaces `path` when the block succeeds and is deleted when it raises.

    Args:
        path: the file to write.
        make_folder: create the file's folder if it is missing.
    """
    if make_folder:
        path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield draft
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def write_durably(path: Path, text: str) -> None:
    """Write a text file atomically; it is on disk when this returns."""
    with atomic_write(path) as draft:
        draft.write_text(text)
        sync_path(draft)
    sync_path(path.parent)


def sync_path(path: Path) -> None:
    """Fsync a file, or the directory entries of a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_durable_folder(folder: Path) -> None:
    """Create the folder and those above it that are missing; fsync the entry of each."""
    if not folder.is_dir():
        make_durable_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        sync_path(folder.parent)


logger = logging.getLogger(__name__)


def append_line(path: Path, entry: Mapping[str, object]) -> None:
    """Append a line in one write, after what a killed run may have left of another one; fsync the file."""
    make_durable_folder(path.parent)
    is_new = not path.exists()
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        size = os.fstat(descriptor).st_size
        is_torn = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
        os.write(descriptor, b"\n" * is_torn + json.dumps(entry).encode() + b"\n")
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    if is_new:
        sync_path(path.parent)


def read_lines(path: Path, start: int = 0) -> tuple[list[dict[str, Any]], int]:
    """Return the objects of the complete lines from byte `start` on, and the byte at which the next call continues.

    A line that a killed run has left incomplete is ignored with a logged warning.
    """
    if not path.exists():
        return [], start
    with path.open("rb") as file:
        file.seek(start)
        new = file.read()
    complete = new[: new.rfind(b"\n") + 1]
    found: list[dict[str, Any]] = []
    for line in filter(None, complete.split(b"\n")):
        try:
            entry = json.loads(line)
        except ValueError:
            entry = None
        if isinstance(entry, dict):
            found.append(entry)
        else:
            logger.warning("%s: a line of a killed run is incomplete and ignored: %r", path, line)
    return found, start + len(complete)
