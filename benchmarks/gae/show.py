"""Formats reports as a table for the terminal or a Markdown file."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.gae.measure import KernelReport
from benchmarks.text_table import markdown_rows, print_rows

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
    print_rows(COLUMNS, map(row, reports), NUM_TEXT_COLUMNS)


def markdown(reports: Sequence[KernelReport]) -> str:
    """Return the table in Markdown."""
    return markdown_rows(COLUMNS, map(row, reports), NUM_TEXT_COLUMNS)
