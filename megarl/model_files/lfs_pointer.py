"""Git LFS pointers: short texts that a clone made without Git LFS holds in place of large files."""

from __future__ import annotations

from pathlib import Path

from megarl.errors import DataError

POINTER_START = b"version https://git-lfs.github.com/spec/"


def refuse_lfs_pointer(file: Path) -> None:
    """Return if `file` is something else than a Git LFS pointer, or cannot be read, which its reader reports.

    Raises:
        DataError: it is a pointer.
    """
    try:
        with file.open("rb") as stream:
            start = stream.read(len(POINTER_START))
    except OSError:
        return
    if start == POINTER_START:
        raise DataError(f"{file} is a Git LFS pointer, not the file itself: run `git lfs pull` in its repository")
