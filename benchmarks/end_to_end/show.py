"""Tables of the comparison."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.end_to_end.compare import WorkloadReport

COLUMNS = ("workload", "megarl, s", "TRL, s", "ratio", "min", "max", "TRL's batch", "tokens", "TRL's tokens")
PHASE_COLUMNS = ("workload", "phase", "seconds")
PROCESS_COLUMNS = ("workload", "processes", "CPU seconds")


def rows(reports: Mapping[str, WorkloadReport]) -> list[tuple[str, ...]]:
    """Return one row per workload."""
    return [
        (
            name,
            f"{report.megarl_seconds:.2f}",
            f"{report.peer_seconds:.2f}",
            f"{report.ratio:.2f}",
            f"{report.ratios[0]:.2f}",
            f"{report.ratios[-1]:.2f}",
            str(report.peer_batch_size),
            f"{report.megarl_length:.1f}",
            f"{report.peer_length:.1f}",
        )
        for name, report in reports.items()
    ]


def phase_rows(reports: Mapping[str, WorkloadReport]) -> list[tuple[str, ...]]:
    """Return one row per workload and phase of a megarl step, longest first."""
    return _descending({name: report.phases for name, report in reports.items()})


def process_rows(reports: Mapping[str, WorkloadReport]) -> list[tuple[str, ...]]:
    """Return one row per workload and kind of megarl's processes, the busiest first."""
    return _descending({name: report.processor_seconds for name, report in reports.items()})


def _descending(measured: Mapping[str, Mapping[str, float]]) -> list[tuple[str, ...]]:
    return [
        (workload, name, f"{seconds:.3f}")
        for workload, values in measured.items()
        for name, seconds in sorted(values.items(), key=lambda item: -item[1])
    ]
