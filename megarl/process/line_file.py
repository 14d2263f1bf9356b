"""Files of JSON lines that are appended to, and can be read after a kill or a power failure."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megarl.process.atomic_files import make_durable_folder, sync_path

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
