"""The end of a log file, which may have grown for months."""

from __future__ import annotations

import os
from pathlib import Path

MOST_BYTES = 2**16


def end_of(log: Path) -> str:
    """Its last `MOST_BYTES`, from the beginning of a line on, without the blank lines at the end."""
    with log.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - MOST_BYTES))
        text = file.read().decode(errors="replace")
    return (text if size <= MOST_BYTES else text.partition("\n")[2]).rstrip()
