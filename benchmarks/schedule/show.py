"""Prints reports as a table."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.schedule.accounts import Report
from benchmarks.text_table import markdown_rows, print_rows

COLUMNS = (
    "tail",
    "schedule",
    "step / bound",
    "worst staleness",
    "mean",
    "mean of groups",
    "wasted %",
    "masked %",
    "W",
    "W max",
    "trained / admitted length",
    "open",
)
NUM_TEXT_COLUMNS = 2


def print_table(reports: Sequence[Report]) -> None:
    """Print the reports."""
    print_rows(COLUMNS, map(_cells, reports), NUM_TEXT_COLUMNS)


def markdown(reports: Sequence[Report]) -> str:
    """Return the reports as a Markdown table."""
    return markdown_rows(COLUMNS, map(_cells, reports), NUM_TEXT_COLUMNS)


def _cells(report: Report) -> list[str]:
    return [
        report.tail,
        report.schedule,
        f"{report.step_over_bound:.3f}",
        str(report.worst_staleness),
        f"{report.mean_staleness:.2f}",
        f"{report.mean_group_staleness:.2f}",
        f"{report.wasted_fraction:.1%}".removesuffix("%"),
        f"{report.masked_fraction:.1%}".removesuffix("%"),
        f"{report.group_steps_mean:.2f}",
        f"{report.group_steps_max:.2f}",
        f"{report.length_ratio:.4f}",
        str(report.open_groups),
    ]
