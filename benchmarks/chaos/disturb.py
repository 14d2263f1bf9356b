"""Runs a command, kills its processes as planned, and records how the run recovers."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from benchmarks.chaos.command import Command
from benchmarks.chaos.plan import PlannedKill
from benchmarks.chaos.targets import DRIVER, pids_by_target
from benchmarks.chaos.watch import RunWatcher

POLL_SECONDS = 0.01
SCAN_SECONDS = 1.0
"""Interval between scans of the process table: a process must be seen while its parents are alive."""

STALL_SECONDS = 300.0
"""A run without a finished step for this long is considered hung and is restarted."""

TYPICAL_RECOVERY_SECONDS = 15.0
"""Assumed recovery time until one has been measured."""

MAX_FRUITLESS_STARTS = 3
"""Abort after this many consecutive starts that finish no step."""

RECOVERY = "recovery"
"""Phase name of kills that hit a run during a recovery."""


@dataclass(slots=True, kw_only=True)
class Kill:
    """A kill that was carried out."""

    target: str
    pid: int
    phase: str
    after_step: int
    """Last finished step at the time of the kill."""
    when: float
    """Unix time of the kill."""
    recovered_by: int
    """The first step that began after the kill; the run has recovered once it has finished."""
    recovered: bool = False
    seconds: float | None = None
    """From the kill to the end of that step, or to the successful end of the run."""


@dataclass(slots=True, kw_only=True)
class InjectionResult:
    """Outcome of the run."""

    kills: list[Kill] = field(default_factory=list)
    restarts: int = 0
    """Number of restarts of the command after an error, a hang or a kill of the driver."""
    failures: list[str] = field(default_factory=list)
    """Reason of each unplanned restart, with the log tail of the command."""
    finished: bool = False
    seconds: float = 0.0


class FaultInjector:
    """Runs the command and kills processes as planned."""

    def __init__(
        self, command: Command, folder: Path, planned: Sequence[PlannedKill], notify: Callable[[str], None]
    ) -> None:
        self._command, self._queue, self._notify = command, list(planned), notify
        self._watcher = RunWatcher(folder, time.time())
        self._found = InjectionResult()
        self._pending: list[Kill] = []
        self._ready_step: int | None = None
        """Last finished step when the next kill became possible; `PlannedKill.offset` counts from its end."""
        self._scanned_at = 0.0
        self._fruitless, self._steps_at_start = 0, 0
        self._progress_at = time.time()

    def run(self) -> InjectionResult:
        """Run until the command succeeds, or fails `MAX_FRUITLESS_STARTS` times in a row without finishing a step."""
        begin = time.time()
        self._command.start()
        while not self._found.finished:
            time.sleep(POLL_SECONDS)
            code = self._command.exit_code()
            self._poll()
            if code == 0:
                self._mark_recovered(lambda kill: True)
                self._found.finished = True
            elif code is not None or time.time() > self._progress_at + STALL_SECONDS:
                if not self._restart(code):
                    break
            else:
                self._mark_recovered(lambda kill: self._watcher.steps_done >= kill.recovered_by)
                self._kill_if_due()
        self._found.seconds = time.time() - begin
        return self._found

    def _poll(self) -> None:
        before = self._watcher.steps_done
        self._watcher.poll()
        now = time.time()
        if self._watcher.steps_done > before:
            self._progress_at = now
        if now > self._scanned_at + SCAN_SECONDS:
            self._command.find_live_processes()
            self._scanned_at = now
        heartbeat = self._watcher.heartbeat
        for kill in self._pending:
            # the first heartbeat after the kill names the phase that it hit, unless the phase has changed since
            if (
                kill.phase != RECOVERY
                and heartbeat is not None
                and heartbeat.since <= kill.when < heartbeat.written < kill.when + 1
            ):
                kill.phase = heartbeat.phase

    def _mark_recovered(self, has_recovered: Callable[[Kill], bool]) -> None:
        now = time.time()
        for kill in [kill for kill in self._pending if has_recovered(kill)]:
            self._pending.remove(kill)
            kill.recovered, kill.seconds = True, now - kill.when
            self._notify(f"{self._name(kill)}: recovered in {kill.seconds:.1f} s")

    def _kill_if_due(self) -> None:
        if not self._queue:
            return
        planned, now = self._queue[0], time.time()
        if planned.recovery_share is not None and self._pending:
            due = self._pending[-1].when + planned.recovery_share * self._typical_recovery()
            phase = RECOVERY
        elif self._pending or self._watcher.steps_done < planned.after_step:
            return
        else:
            if self._ready_step is None:
                self._ready_step = self._watcher.steps_done
            due, phase = self._watcher.line_times[self._ready_step] + planned.offset, planned.phase
            if self._watcher.steps_done != self._ready_step:
                due = now  # this run is faster than the undisturbed one
        if now >= due:
            self._kill(planned, phase)

    def _kill(self, planned: PlannedKill, phase: str) -> None:
        found = pids_by_target(self._command.table(), driver=self._command.driver)
        there = {name: pids for name, pids in found.items() if name != DRIVER or planned.target == DRIVER}
        if not there:
            return  # no target process has started yet
        targets = sorted(there)
        target = planned.target if planned.target in there else targets[int(planned.draw * len(targets))]
        pid = there[target][int(planned.draw * len(there[target]))]
        done = self._watcher.steps_done
        kill = Kill(target=target, pid=pid, phase=phase, after_step=done, when=time.time(), recovered_by=done + 2)
        self._command.kill(pid)
        self._queue.pop(0)
        self._ready_step = None
        self._found.kills.append(kill)
        self._pending.append(kill)
        self._progress_at = kill.when
        self._notify(f"{self._name(kill)}: killed")

    def _name(self, kill: Kill) -> str:
        number, count = self._found.kills.index(kill) + 1, len(self._found.kills) + len(self._queue)
        return f"kill {number}/{count}  {kill.target} (process {kill.pid}) after step {kill.after_step}, {kill.phase}"

    def _typical_recovery(self) -> float:
        times = [kill.seconds for kill in self._found.kills if kill.seconds is not None]
        return median(times) if times else TYPICAL_RECOVERY_SECONDS

    def _restart(self, code: int | None) -> bool:
        """Restart the command; return False if the last starts finished no step."""
        self._command.end()
        is_planned = bool(self._pending) and self._pending[-1].target == DRIVER
        if not is_planned:
            why = f"hung for {STALL_SECONDS:.0f} s" if code is None else f"failed with exit code {code}"
            self._found.failures.append(
                f"the run {why} after step {self._watcher.steps_done}:\n{self._command.log_tail()}"
            )
            self._notify(self._found.failures[-1])
            self._pending.clear()
        self._fruitless = 0 if self._watcher.steps_done > self._steps_at_start else self._fruitless + 1
        if self._fruitless >= MAX_FRUITLESS_STARTS:
            return False
        self._steps_at_start = self._watcher.steps_done
        self._found.restarts += 1
        self._progress_at = time.time()
        self._command.start("--resume", "auto")
        return True
