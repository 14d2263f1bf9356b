"""Reads the end of a log file, which may be large."""

from __future__ import annotations

import os
from pathlib import Path

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
