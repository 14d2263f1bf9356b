"""Measures the CPU time of the processes of a run while it trains."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

import psutil

from benchmarks.chaos.command import Command
from benchmarks.chaos.targets import pids_by_target

POLL_SECONDS = 0.1


class ProcessorTime:
    """CPU seconds of a run by kind of process, from the end of a step on."""

    def __init__(self, command: Command, metrics: Path, first_step: int) -> None:
        """Create a measurement of steps after `first_step`.

        Args:
            metrics: the run's metrics.jsonl.
        """
        self._command, self._metrics, self._first_step = command, metrics, first_step
        self._step = first_step
        self._processes: dict[str, list[psutil.Process]] = {}
        self._before: dict[str, float] = {}
        self._after: dict[str, float] = {}
        self._machine_before, self._machine_after = 0.0, 0.0

    def wait(self) -> int:
        """Measure until the command ends, and return its exit code."""
        while (code := self._command.exit_code()) is None:
            time.sleep(POLL_SECONDS)
            self._read()
        return code

    @property
    def seconds_per_step(self) -> Mapping[str, float]:
        """Return kind of process -> its mean CPU seconds a step; empty if the run ended before the second step."""
        count = self._step - self._first_step
        return {kind: (self._after[kind] - self._before[kind]) / count for kind in self._before} if count else {}

    @property
    def machine_seconds_per_step(self) -> float:
        """Mean CPU seconds a step of all processes of the machine; 0 if the run ended before the second step."""
        count = self._step - self._first_step
        return (self._machine_after - self._machine_before) / count if count else 0.0

    def _read(self) -> None:
        step = self._metrics.read_text().count('"loss"') if self._metrics.exists() else 0
        if step < self._first_step or (self._before and step == self._step):
            return
        if not self._processes:
            # once, because it reads all processes of the machine
            pids = pids_by_target(self._command.table(), driver=self._command.driver)
            self._processes = {kind: [psutil.Process(pid) for pid in found] for kind, found in pids.items()}
            self._step = self._first_step = step
        try:
            seconds = {kind: sum(map(_cpu_seconds, processes)) for kind, processes in self._processes.items()}
        except psutil.NoSuchProcess:
            return  # the run is ending
        self._step, self._after, self._machine_after = step, seconds, _machine_seconds()
        if not self._before:
            self._before, self._machine_before = seconds, self._machine_after


def _cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _machine_seconds() -> float:
    times = psutil.cpu_times()
    return float(times.user + times.nice + times.system)
