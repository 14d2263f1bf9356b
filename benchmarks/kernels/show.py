"""Formats reports as a table for the terminal or a Markdown file."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.kernels.measure import KernelReport
from benchmarks.text_table import markdown_rows, print_rows

COLUMNS: tuple[str, ...] = (
    "op",
    "workload",
    "implementation",
    "ms",
    "least MB",
    "counted MB",
    "GFLOP",
    "peak MB",
    "of roofline",
    "largest difference",
)

NUM_TEXT_COLUMNS = 3
"""Number of leading columns that hold text."""


def row(r: KernelReport) -> list[str]:
    """Return the cells of a report, in the order of `COLUMNS`; `-` for what does not apply."""
    return [
        r.op,
        r.workload,
        r.implementation,
        "-" if r.milliseconds is None else f"{r.milliseconds:.3f}",
        f"{r.min_bytes / 1e6:.2f}",
        "-" if r.counted_bytes is None else f"{r.counted_bytes / 1e6:.2f}",
        f"{r.flops / 1e9:.1f}" if r.flops else "-",
        f"{r.peak_bytes / 1e6:.2f}",
        "-" if r.roofline_fraction is None else f"{100 * r.roofline_fraction:.0f} %",
        "-" if r.largest_difference is None else f"{r.largest_difference:.1e}",
    ]


def print_table(reports: Sequence[KernelReport]) -> None:
    """Print the table to stdout."""
    print_rows(COLUMNS, map(row, reports), NUM_TEXT_COLUMNS)


def markdown(reports: Sequence[KernelReport]) -> str:
    """Return the table in Markdown."""
    return markdown_rows(COLUMNS, map(row, reports), NUM_TEXT_COLUMNS)
