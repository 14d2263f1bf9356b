"""Formats reports as a table for the terminal or a Markdown file."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean, median

from benchmarks.packing.measure import PackingReport
from benchmarks.text_table import markdown_rows, print_rows

COLUMNS: tuple[str, ...] = (
    "lengths",
    "model",
    "scheme",
    "budget",
    "padding %",
    "micro-batches",
    "at least",
    "fill %",
    "fullest %",
    "cost max/mean",
    "step cost",
    "step cost worst",
    "plan ms",
)

NUM_TEXT_COLUMNS = 3
"""Number of leading columns that hold text."""


def rows(reports: Sequence[PackingReport]) -> list[list[str]]:
    """Return rows under `COLUMNS`: means over seeds; maxima for "fullest", "max/mean" and "worst"; median plan time."""
    grouped: dict[tuple[str, str, str], list[PackingReport]] = {}
    for r in reports:
        grouped.setdefault((r.lengths, r.model, r.scheme), []).append(r)
    return [
        [
            *names,
            str(of[0].max_tokens),
            f"{mean(r.padding_percent for r in of):.2f}",
            f"{mean(r.micro_batches for r in of):.1f}",
            f"{mean(r.micro_batches_bound for r in of):.1f}",
            f"{mean(r.fill_percent for r in of):.1f}",
            f"{max(r.fullest_percent for r in of):.1f}",
            f"{max(r.cost_max_over_mean for r in of):.3f}",
            f"{mean(r.step_cost for r in of):.3f}",
            f"{max(r.step_cost for r in of):.3f}",
            f"{1e3 * median(r.plan_seconds for r in of):.1f}",
        ]
        for names, of in grouped.items()
    ]


def print_table(reports: Sequence[PackingReport]) -> None:
    """Print the table to stdout."""
    print_rows(COLUMNS, rows(reports), NUM_TEXT_COLUMNS)


def markdown(reports: Sequence[PackingReport]) -> str:
    """Return the table in Markdown."""
    return markdown_rows(COLUMNS, rows(reports), NUM_TEXT_COLUMNS)
