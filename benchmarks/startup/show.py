"""Table of the startup benchmark."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from benchmarks.startup.measure import StartupReport

NUM_PACKAGES = 8
"""Packages shown for each kind of process."""


def markdown(report: StartupReport) -> str:
    """Return the medians as Markdown tables: by kind of work, by phase, by process, and imports if measured."""
    start = report.median
    seconds = ", ".join(f"{run.seconds:.1f}" for run in report.runs)
    text = f"First completion after {start.seconds:.1f} s: the median of {seconds} s.\n\n"
    text += _table("kind of work", "seconds", start.by_kind) + "\n"
    text += _table("phase (phases overlap)", "seconds", start.phases) + "\n"
    text += _table("processes", "CPU seconds", start.cpu_seconds)
    if report.imports:
        rows = {kind: _largest(packages) for kind, packages in report.imports.items()}
        text += "\n" + "\n".join(_rows("process", "seconds of imports by package", rows)) + "\n"
    return text


def _table(name: str, unit: str, values: Mapping[str, float]) -> str:
    return "\n".join(_rows(name, unit, {key: f"{value:.2f}" for key, value in values.items()})) + "\n"


def _rows(name: str, unit: str, values: Mapping[str, str]) -> Iterator[str]:
    yield f"| {name} | {unit} |"
    yield "|---|---|"
    yield from (f"| {key} | {value} |" for key, value in values.items())


def _largest(packages: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {seconds:.2f}" for name, seconds in list(packages.items())[:NUM_PACKAGES])
