"""One start of `megarl train` in new processes: its timing, CPU time by process, and imports."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import psutil

from benchmarks.chaos.command import Command
from benchmarks.chaos.targets import ALL_TARGETS, pids_by_target
from megarl.errors import WorkerError

OTHER = "other"
"""Kind of the processes that are none of megarl's: those of Ray."""

KINDS = (*ALL_TARGETS, OTHER)

POLL_SECONDS = 0.02

IMPORT_LINE = re.compile(r"^import time:\s*(\d+) \|\s*(\d+) \| *([\w.]+)\s*$", re.MULTILINE)
"""Line that Python writes with PYTHONPROFILEIMPORTTIME=1: own microseconds, those with nested imports, module."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """One start, up to the first completion."""

    seconds: float
    by_kind: Mapping[str, float]
    """Seconds by kind of work, as in startup.json; they add up to `seconds`."""
    phases: Mapping[str, float]
    """Seconds of each phase of startup.json; phases may overlap."""
    cpu_seconds: Mapping[str, float]
    """CPU seconds by kind of process, until the first completion."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartupReport:
    """Several starts of the same command."""

    config: str
    runs: tuple[Start, ...]
    median: Start
    """The median of each number by itself."""
    imports: Mapping[str, Mapping[str, float]]
    """Kind of process -> package -> seconds of its imports, largest first; empty if not measured."""


def median_start(runs: Sequence[Start]) -> Start:
    """Return the median of each number; a phase or kind that a run lacks counts as 0 there."""

    def medians(rows: Iterable[Mapping[str, float]]) -> dict[str, float]:
        table = list(rows)
        names = dict.fromkeys(name for row in table for name in row)
        return {name: median(row.get(name, 0.0) for row in table) for name in names}

    return Start(
        seconds=median(run.seconds for run in runs),
        by_kind=medians(run.by_kind for run in runs),
        phases=medians(run.phases for run in runs),
        cpu_seconds=medians(run.cpu_seconds for run in runs),
    )


def measure_start(command: Command, run_dir: Path, *, timeout: float) -> Start:
    """Start the command, wait for the first completion, and return the timing. The command keeps running.

    Args:
        run_dir: run folder of the command, without an earlier `startup.json`.

    Raises:
        WorkerError: the command ended, or `timeout` seconds have passed.
    """
    command.start()
    deadline = time.monotonic() + timeout
    file = run_dir / "startup.json"
    while not file.exists():
        if command.exit_code() is not None:
            raise WorkerError(f"the command ended before the first completion:\n{command.log_tail()}")
        if time.monotonic() > deadline:
            raise WorkerError(f"no completion within {timeout:g} s:\n{command.log_tail()}")
        time.sleep(POLL_SECONDS)
    spent = cpu_seconds(command)
    tree = json.loads(file.read_text())
    phases = {phase["name"]: phase["seconds"] for phase in tree["phases"]}
    return Start(seconds=tree["seconds"], by_kind=tree["by_kind"], phases=phases, cpu_seconds=spent)


def cpu_seconds(command: Command) -> dict[str, float]:
    """Return the CPU seconds that the command's live processes have used so far, by kind of process."""
    kinds = {pid: kind for kind, pids in processes_by_kind(command).items() for pid in pids}
    spent = dict.fromkeys(KINDS, 0.0)
    for process in command.find_live_processes():
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        spent[kinds.get(process.pid, OTHER)] += times.user + times.system
    return {kind: round(seconds, 2) for kind, seconds in spent.items()}


def processes_by_kind(command: Command) -> Mapping[str, list[int]]:
    """Return the process ids of the command by kind of process, without Ray's own."""
    return pids_by_target(command.table(), driver=command.driver)


def imports_of(command: Command, log: Path) -> dict[str, dict[str, float]]:
    """Return kind of process -> package -> seconds of imports, of a command started with PYTHONPROFILEIMPORTTIME=1.

    Of several processes of a kind, this takes the one with the lowest pid. The imports of Ray before a process knows
    its log file are missing.

    Args:
        log: file with the output of the command.
    """
    found: dict[str, dict[str, float]] = {}
    for kind, pids in processes_by_kind(command).items():
        files = [log] if pids[0] == command.driver else [*command.temporary.rglob(f"*-{pids[0]}.[el][ro][rg]")]
        found[kind] = package_seconds("".join(file.read_text(errors="replace") for file in files))
    return found


def package_seconds(import_log: str) -> dict[str, float]:
    """Return top-level package -> seconds of its modules, largest first, from the lines that Python logs."""
    seconds: dict[str, float] = {}
    for own, _, module in IMPORT_LINE.findall(import_log):
        package = module.partition(".")[0]
        seconds[package] = seconds.get(package, 0.0) + int(own) / 1e6
    return {name: round(value, 3) for name, value in sorted(seconds.items(), key=lambda item: -item[1])}
