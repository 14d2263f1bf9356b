"""A run whose processes are killed as planned, and how it comes back from that."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from benchmarks.chaos.command import Command
from benchmarks.chaos.plan import PlannedKill
from benchmarks.chaos.targets import DRIVER, by_target
from benchmarks.chaos.watch import Watch

LOOK_SECONDS = 0.01
LEARN_SECONDS = 1.0
"""Between two looks at the process table, in which a process must be seen while its parents live."""

STALL_SECONDS = 300.0
"""Without a finished step for so long a run is taken for one that does not recover, and started again."""

TYPICAL_RECOVERY_SECONDS = 15.0
"""Until recoveries have been measured."""

FRUITLESS_STARTS = 3
"""So many starts in a row that finish no step are the last."""

RECOVERY = "recovery"
"""The phase of kills that hit a run while it recovers."""


@dataclass(slots=True, kw_only=True)
class Kill:
    """One that was made."""

    target: str
    pid: int
    phase: str
    after_step: int
    """The last finished one."""
    when: float
    """Unix time."""
    recovered_by: int
    """The first step that began after the kill: once it has ended, the run has recovered."""
    recovered: bool = False
    seconds: float | None = None
    """From the kill to the end of that step, or to the run's end in order."""


@dataclass(slots=True, kw_only=True)
class Disturbed:
    """What became of the run."""

    kills: list[Kill] = field(default_factory=list)
    restarts: int = 0
    """Of the whole command, since it had ended with an error or stood still, or was killed itself."""
    failures: list[str] = field(default_factory=list)
    """Why; each is the command's last words."""
    finished: bool = False
    seconds: float = 0.0


class Disturbance:
    """Runs the command and kills as planned."""

    def __init__(
        self, command: Command, folder: Path, planned: Sequence[PlannedKill], say: Callable[[str], None]
    ) -> None:
        self._command, self._queue, self._say = command, list(planned), say
        self._watch = Watch(folder, time.time())
        self._found = Disturbed()
        self._pending: list[Kill] = []
        self._ready_step: int | None = None
        """The last finished one when the next kill could be made; its time counts from there."""
        self._learned = 0.0
        self._fruitless, self._steps_at_start = 0, 0
        self._progress_at = time.time()

    def run(self) -> Disturbed:
        """Until the run has ended in order, or has failed too often."""
        begin = time.time()
        self._command.start()
        while not self._found.finished:
            time.sleep(LOOK_SECONDS)
            code = self._command.exit_code()
            self._look()
            if code == 0:
                self._settle(lambda kill: True)
                self._found.finished = True
            elif code is not None or time.time() > self._progress_at + STALL_SECONDS:
                if not self._start_again(code):
                    break
            else:
                self._settle(lambda kill: self._watch.steps_done >= kill.recovered_by)
                self._kill_if_due()
        self._found.seconds = time.time() - begin
        return self._found

    def _look(self) -> None:
        before = self._watch.steps_done
        self._watch.look()
        now = time.time()
        if self._watch.steps_done > before:
            self._progress_at = now
        if now > self._learned + LEARN_SECONDS:
            self._command.living()
            self._learned = now
        beat = self._watch.beat
        for kill in self._pending:
            # the first beat behind the kill names the phase that it has hit, if that is still the one
            if kill.phase != RECOVERY and beat is not None and beat.since <= kill.when < beat.written < kill.when + 1:
                kill.phase = beat.phase

    def _settle(self, has_recovered: Callable[[Kill], bool]) -> None:
        now = time.time()
        for kill in [kill for kill in self._pending if has_recovered(kill)]:
            self._pending.remove(kill)
            kill.recovered, kill.seconds = True, now - kill.when
            self._say(f"{self._name(kill)}: recovered in {kill.seconds:.1f} s")

    def _kill_if_due(self) -> None:
        if not self._queue:
            return
        planned, now = self._queue[0], time.time()
        if planned.recovery_share is not None and self._pending:
            due = self._pending[-1].when + planned.recovery_share * self._typical_recovery()
            phase = RECOVERY
        elif self._pending or self._watch.steps_done < planned.after_step:
            return
        else:
            if self._ready_step is None:
                self._ready_step = self._watch.steps_done
            due, phase = self._watch.line_times[self._ready_step] + planned.offset, planned.phase
            if self._watch.steps_done != self._ready_step:
                due = now  # this run is faster than the undisturbed one was
        if now >= due:
            self._kill(planned, phase)

    def _kill(self, planned: PlannedKill, phase: str) -> None:
        found = by_target(self._command.table(), driver=self._command.driver)
        there = {name: pids for name, pids in found.items() if name != DRIVER or planned.target == DRIVER}
        if not there:
            return  # so early that there is nothing yet
        targets = sorted(there)
        target = planned.target if planned.target in there else targets[int(planned.draw * len(targets))]
        pid = there[target][int(planned.draw * len(there[target]))]
        done = self._watch.steps_done
        kill = Kill(target=target, pid=pid, phase=phase, after_step=done, when=time.time(), recovered_by=done + 2)
        self._command.kill(pid)
        self._queue.pop(0)
        self._ready_step = None
        self._found.kills.append(kill)
        self._pending.append(kill)
        self._progress_at = kill.when
        self._say(f"{self._name(kill)}: killed")

    def _name(self, kill: Kill) -> str:
        number, count = self._found.kills.index(kill) + 1, len(self._found.kills) + len(self._queue)
        return f"kill {number}/{count}  {kill.target} (process {kill.pid}) after step {kill.after_step}, {kill.phase}"

    def _typical_recovery(self) -> float:
        times = [kill.seconds for kill in self._found.kills if kill.seconds is not None]
        return median(times) if times else TYPICAL_RECOVERY_SECONDS

    def _start_again(self, code: int | None) -> bool:
        """False where that has led to nothing too often."""
        self._command.end()
        asked_for = bool(self._pending) and self._pending[-1].target == DRIVER
        if not asked_for:
            why = f"stood still for {STALL_SECONDS:.0f} s" if code is None else f"ended with exit code {code}"
            self._found.failures.append(
                f"the run {why} after step {self._watch.steps_done}:\n{self._command.last_words()}"
            )
            self._say(self._found.failures[-1])
            self._pending.clear()
        self._fruitless = 0 if self._watch.steps_done > self._steps_at_start else self._fruitless + 1
        if self._fruitless >= FRUITLESS_STARTS:
            return False
        self._steps_at_start = self._watch.steps_done
        self._found.restarts += 1
        self._progress_at = time.time()
        self._command.start("--resume", "auto")
        return True
