"""Formats reports as a table for the terminal or a Markdown file."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from benchmarks.kernels.measure import KernelReport

COLUMNS: tuple[str, ...] = (
    "kernel",
    "loop over",
    "workload",
    "tokens",
    "in mask",
    "sequences",
    "longest",
    "loop ms",
    "vectorized ms",
    "x loop",
    "x loop worst",
    "largest difference",
)

NUM_TEXT_COLUMNS = 3
"""Number of leading columns that hold text."""


def row(r: KernelReport) -> list[str]:
    """Return the cells of a report, in the order of `COLUMNS`."""
    return [
        r.kernel,
        r.loop,
        r.workload,
        str(r.tokens),
        str(r.tokens_in_mask),
        str(r.sequences),
        str(r.longest),
        f"{r.loop_ms:.1f}",
        f"{r.vectorised_ms:.1f}",
        f"{r.ratio:.1f}",
        f"{r.ratio_worst:.1f}",
        f"{r.largest_difference:.1e}",
    ]


def print_table(reports: Sequence[KernelReport]) -> None:
    """Print the table to stdout."""
    table = Table(box=None, padding=(0, 1, 0, 0))
    for i, column in enumerate(COLUMNS):
        table.add_column(column, justify="left" if i < NUM_TEXT_COLUMNS else "right")
    for report in reports:
        table.add_row(*row(report))
    Console(width=None if Console().is_terminal else 190).print(table)


def markdown(reports: Sequence[KernelReport]) -> str:
    """Return the table in Markdown."""
    lines = [COLUMNS, ["---"] * NUM_TEXT_COLUMNS + ["---:"] * (len(COLUMNS) - NUM_TEXT_COLUMNS), *map(row, reports)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"
