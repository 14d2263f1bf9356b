"""Writes the table of a benchmark to a file, with the command that produced it."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import psutil


def write_results(file: Path, introduction: str, table: str, *, module: str, **facts: object) -> None:
    """Write the formatted introduction and the table to `file`.

    Args:
        introduction: format string with the fields `command` (the command line of this process), `cores` (number of CPU
            cores it may use) and those of `facts`.
        module: Python module that the command runs.
    """
    text = introduction.format(
        command=f"python -m {module} {shlex.join(sys.argv[1:])}",
        cores=len(psutil.Process().cpu_affinity() or []),
        **facts,
    )
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text + table)
