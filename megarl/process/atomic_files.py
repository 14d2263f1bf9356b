"""Atomic file writes: readers see the old file or the complete new one."""

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
