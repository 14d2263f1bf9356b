"""Presentation of reports as tables and as a plot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.reshard.measure import MeasuredReport
from benchmarks.text_table import markdown_rows, print_rows

NUM_TEXT_COLUMNS = 2
"""Number of leading columns that hold text."""

MEGATRON_CORE, NCCL_M2N = "megatron_core", "nccl_m2n"

BASELINES = ("gather_hf", MEGATRON_CORE)
"""Strategies of other systems, with whose times the others are compared."""

OURS = ("micro_dp", "exact")

COLUMNS: tuple[str, ...] = (
    "strategy",
    "train -> gen",
    "sync s median",
    "min..max",
    *(f"x {baseline}" for baseline in BASELINES),
    "CPU s",
    "MB total",
    "MB in max",
    "MB in bound",
    "MB peak extra",
    "messages",
    "collectives",
    "plan ms",
    "cached ms",
    "wrong bytes",
)

SUMMARY: tuple[str, ...] = (
    "train -> gen",
    "fastest of ours",
    "sync s median",
    "min..max",
    *(f"x {baseline}" for baseline in BASELINES),
    "MB in max",
    *(f"{baseline} MB in max" for baseline in BASELINES),
    "MB peak extra",
    *(f"{baseline} MB peak extra" for baseline in BASELINES),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """A contender that did not run on a layout."""

    strategy: str
    train: str
    gen: str
    left_out: str
    """Why the contender was left out."""


def left_out_rows(left_out: Sequence[LeftOut]) -> list[list[str]]:
    """Return table rows under `COLUMNS` of contenders that did not run."""
    return [[each.strategy, _layout(each), each.left_out, *[""] * (len(COLUMNS) - 3)] for each in left_out]


def rows(reports: Sequence[MeasuredReport]) -> list[list[str]]:
    """Return table rows under `COLUMNS`; MB are 10**6 bytes, `x` is a baseline's median time over the strategy's."""
    return [
        [
            r.strategy,
            _layout(r),
            *_seconds(r),
            *(_speedup(r, _find(baseline, r, reports)) for baseline in BASELINES),
            f"{r.cpu_seconds_p50 or 0:.2f}",
            _mb(r.bytes_total),
            _mb(r.bytes_in_max),
            _mb(r.bytes_in_bound_max),
            _mb(r.peak_extra_bytes),
            str(r.messages),
            str(r.collectives),
            f"{r.plan_seconds_cold * 1e3:.1f}",
            f"{r.plan_seconds_cached * 1e3:.1f}",
            str(r.mismatched_bytes),
        ]
        for r in reports
    ]


def summary_rows(reports: Sequence[MeasuredReport]) -> list[list[str]]:
    """Return table rows under `SUMMARY`, one per layout: the faster of `OURS` against `BASELINES`."""
    fastest: dict[str, MeasuredReport] = {}
    for r in reports:
        best = fastest.get(_layout(r))
        if r.strategy in OURS and (best is None or r.sync_seconds_p50 < best.sync_seconds_p50):
            fastest[_layout(r)] = r
    out = []
    for layout, r in fastest.items():
        peers = [_find(baseline, r, reports) for baseline in BASELINES]
        row = [layout, r.strategy, *_seconds(r), *(_speedup(r, peer) for peer in peers)]
        row += [_mb(r.bytes_in_max), *(_mb(peer.bytes_in_max) if peer else "" for peer in peers)]
        row += [_mb(r.peak_extra_bytes), *(_mb(peer.peak_extra_bytes) if peer else "" for peer in peers)]
        out.append(row)
    return out


def print_table(reports: Sequence[MeasuredReport]) -> None:
    """Print the reports as a table to stdout."""
    print_rows(COLUMNS, rows(reports), NUM_TEXT_COLUMNS)


def markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table; the first two columns are left-aligned text."""
    return markdown_rows(columns, rows, NUM_TEXT_COLUMNS)


def plot(reports: Sequence[MeasuredReport], file: Path) -> None:
    """Write a bar chart of bytes into one rank, time and peak memory, by strategy, to `file`."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    panels = {
        "MB into the busiest rank": [r.bytes_in_max / 1e6 for r in reports],
        "seconds a sync, median": [r.sync_seconds_p50 or 0.0 for r in reports],
        "MB of peak extra memory": [(r.peak_extra_bytes or 0) / 1e6 for r in reports],
    }
    figure, axes = pyplot.subplots(1, len(panels), figsize=(13, 3.5), layout="constrained")
    for axis, (title, values) in zip(axes, panels.items(), strict=True):
        axis.barh([r.strategy for r in reports], values)
        axis.invert_yaxis()
        axis.set_title(title)
    figure.suptitle(f"{reports[0].model}, {_layout(reports[0])}")
    figure.savefig(file, dpi=120)


def _layout(report: MeasuredReport | LeftOut) -> str:
    return f"{report.train} -> {report.gen}"


def _seconds(report: MeasuredReport) -> tuple[str, str]:
    """Return the median time of a sync, and its spread."""
    median, low, high = report.sync_seconds_p50, report.sync_seconds_min, report.sync_seconds_max
    return f"{median:.3f}", f"{low:.3f}..{high:.3f}"


def _mb(num_bytes: int | None) -> str:
    assert num_bytes is not None, "a report of a run has all counts"
    return f"{num_bytes / 1e6:.1f}"


def _find(strategy: str, like: MeasuredReport, reports: Sequence[MeasuredReport]) -> MeasuredReport | None:
    """Return the report of `strategy` on the layout of report `like`, or None."""
    return next((r for r in reports if r.strategy == strategy and _layout(r) == _layout(like)), None)


def _speedup(report: MeasuredReport, baseline: MeasuredReport | None) -> str:
    if not baseline or not baseline.sync_seconds_p50 or not report.sync_seconds_p50:
        return ""
    return f"{baseline.sync_seconds_p50 / report.sync_seconds_p50:.2f}"
