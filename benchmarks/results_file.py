"""A benchmark's table in a file, below what it was made with."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import psutil


def write_results(file: Path, introduction: str, table: str, *, module: str, **facts: object) -> None:
    """Write both to `file`.

    Args:
        introduction: a format of `command`, which is this process's; `cores`, those that it may use; and `facts`.
        module: what the command runs.
    """
    text = introduction.format(
        command=f"python -m {module} {shlex.join(sys.argv[1:])}",
        cores=len(psutil.Process().cpu_affinity() or []),
        **facts,
    )
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text + table)
