"""Progress bar that appears only for long work."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

QUIET_SECONDS = 3.0
"""Work that ends within this time shows no progress bar."""


def track[T](batches: Iterable[list[T]], what: str, *, quiet_seconds: float = QUIET_SECONDS) -> Iterator[list[T]]:
    """Yield `batches` unchanged; after `quiet_seconds`, show the number of rows on stderr if it is a terminal."""
    console = Console(stderr=True)
    progress = Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed} rows"),
        TimeElapsedColumn(),
        console=console,
        transient=True,
    )
    task = progress.add_task(what, total=None)
    begun, shown = time.monotonic(), False
    try:
        for batch in batches:
            yield batch
            progress.advance(task, len(batch))
            if not shown and console.is_terminal and time.monotonic() - begun > quiet_seconds:
                progress.start()
                shown = True
    finally:
        if shown:
            progress.stop()
