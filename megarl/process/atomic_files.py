"""Atomic file writes, and fsync of files and folders."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


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
