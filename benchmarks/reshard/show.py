"""Reports as a table and as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from megarl.reshard.report import SyncReport

COLUMNS = ("strategy", "train -> gen", "MB total", "MB in max", "MB in bound", "MB peak extra", "messages")
COLUMNS += ("plan ms", "cached ms", "sync s p50", "sync s max", "wrong bytes")


def rows(reports: Sequence[SyncReport]) -> list[list[str]]:
    """Under `COLUMNS`; MB are 10**6 bytes."""
    return [
        [
            r.strategy,
            f"{r.train} -> {r.gen}",
            f"{r.bytes_total / 1e6:.1f}",
            f"{r.bytes_in_max / 1e6:.1f}",
            f"{r.bytes_in_bound_max / 1e6:.1f}",
            f"{r.peak_extra_bytes / 1e6:.1f}",
            str(r.messages),
            f"{r.plan_seconds_cold * 1e3:.1f}",
            f"{r.plan_seconds_cached * 1e3:.1f}",
            f"{r.sync_seconds_p50 or 0:.3f}",
            f"{r.sync_seconds_max or 0:.3f}",
            str(r.mismatched_bytes),
        ]
        for r in reports
    ]


def print_table(reports: Sequence[SyncReport]) -> None:
    """To stdout."""
    table = Table(box=None, padding=(0, 1, 0, 0))
    for column in COLUMNS:
        table.add_column(column, justify="left" if column in COLUMNS[:2] else "right")
    for row in rows(reports):
        table.add_row(*row)
    Console(width=None if Console().is_terminal else 160).print(table)


def markdown(reports: Sequence[SyncReport]) -> str:
    """The table for a file."""
    lines = [COLUMNS, ["---", "---", *["---:"] * (len(COLUMNS) - 2)], *rows(reports)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def plot(reports: Sequence[SyncReport], file: Path) -> None:
    """Bytes into one rank, time and peak memory, a bar per strategy."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    panels = {
        "MB into the busiest rank": [r.bytes_in_max / 1e6 for r in reports],
        "seconds a sync, median": [r.sync_seconds_p50 or 0.0 for r in reports],
        "MB of peak extra memory": [r.peak_extra_bytes / 1e6 for r in reports],
    }
    figure, axes = pyplot.subplots(1, len(panels), figsize=(13, 3.5), layout="constrained")
    for axis, (title, values) in zip(axes, panels.items(), strict=True):
        axis.barh([r.strategy for r in reports], values)
        axis.invert_yaxis()
        axis.set_title(title)
    figure.suptitle(f"{reports[0].model}, {reports[0].train} -> {reports[0].gen}")
    figure.savefig(file, dpi=120)
