"""Reads the end of a log file, which may be large."""

from __future__ import annotations

import os
from pathlib import Path

MAX_BYTES = 2**16


def tail(log: Path) -> str:
    """Return the complete lines in the last `MAX_BYTES` bytes of `log`, without trailing blank lines."""
    with log.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - MAX_BYTES))
        text = file.read().decode(errors="replace")
    return (text if size <= MAX_BYTES else text.partition("\n")[2]).rstrip()
