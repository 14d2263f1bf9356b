"""How many times the processes of a run may be restarted, and how long to wait before each restart."""

from __future__ import annotations

import re
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from megarl.cluster.process.atomic_files import LOG_TAIL_PREFIX, append_line, read_lines
from megarl.config.run import RecoveryConfig
from megarl.errors import MegarlError, RestartLimitError

RESTARTS_FILE = "restarts.jsonl"
"""File of a run folder with a line for each restart."""

BACKOFF_SECONDS = 1.0
"""Seconds to wait before the second restart of a process without a completed step in between; doubled for each more."""

MAX_BACKOFF_SECONDS = 60.0
"""Longest wait in seconds before a restart."""

RESTART_WINDOW_SECONDS = 86_400.0
"""Seconds for which a restart counts. A run that loses fewer processes in any such time continues for ever."""

NUM_NAMED = 3
"""How many of the processes that were lost together a message names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartEvent:
    """A line of `restarts.jsonl`: processes that were lost together and restarted."""

    time: float
    """Unix time at which the loss was detected."""
    step: int
    """The step in progress."""
    kind: str
    causes: Mapping[str, str]
    """The first line of the error, by the process that was lost."""


class RestartLog:
    """The file `restarts.jsonl`, from which a restarted controller knows the restarts before it.

        {"command": 1768471200.0}                                     a command has begun to train
        {"time": 1768474800.0, "step": 12, "kind": "engine", "causes": {"engine 1": "..."}}

    Only the restarts of the last command count: a user who continues a run has looked after the cause.
    """

    def __init__(self, path: Path, require_lock: Callable[[], None] = lambda: None) -> None:
        """`require_lock`: called before each write; raises if another run owns the file."""
        self._path, self._require_lock = path, require_lock

    def begin(self) -> None:
        """Note that a command begins; raises as `append`."""
        self._append({"command": time.time()})

    def append(self, event: RestartEvent) -> None:
        """Append a line.

        Raises:
            LostLockError: another run owns the file.
            OSError: the file cannot be written.
        """
        self._append(asdict(event))

    def read(self) -> list[RestartEvent]:
        """Return what has happened since the last command has begun."""
        events: list[RestartEvent] = []
        for entry in read_lines(self._path)[0]:
            if "command" in entry:
                events.clear()
            else:
                events.append(RestartEvent(**entry))
        return events

    def _append(self, entry: Mapping[str, object]) -> None:
        self._require_lock()
        append_line(self._path, entry)


class RestartBudget:
    """Restart budget of a run: a rate for each kind of process, "engine", "rollout worker", "trainer", "controller".

    Within any `RESTART_WINDOW_SECONDS`, `recovery.max_restarts` times as many processes of a kind may be
    restarted as the run has of it. The ranks of the trainer restart together and count as one process.

    budget = RestartBudget(config.recovery, notify)
    time.sleep(budget.spend("trainer", error, step))
    ...
    budget.mark_step_done(step)
    """

    def __init__(
        self,
        config: RecoveryConfig,
        notify: Callable[[str], None],
        log: RestartLog | None = None,
        *,
        last_step: int = 0,
    ) -> None:
        """Args:
        notify: shows the user a line.
        log: restarts are added to it, and those that it has already count; None: they are not recorded.
        last_step: the last completed step that is known; restarts in later steps count as without progress.
        """
        self._config, self.notify, self._log = config, notify, log
        self._last_step = last_step
        self._times: defaultdict[str, deque[float]] = defaultdict(deque)
        """Monotonic times of the restarts within the window, by kind."""
        self._recent: Counter[tuple[str, str]] = Counter()
        """Restarts since the last completed step, by kind and worker."""
        self._failures: Counter[tuple[str, str]] = Counter()
        """Failures since the last completed step, by worker and normalized message."""
        self._has_reported = False
        for event in log.read() if log is not None else ():
            # a clock that was set back makes a restart look later than now: it counts for one more window at most
            age = max(0.0, time.time() - event.time)
            self._times[event.kind].extend([time.monotonic() - age] * len(event.causes))
            if event.step > last_step:
                self._recent.update((event.kind, worker) for worker in event.causes)
                self._failures.update((worker, normalize_failure(cause)) for worker, cause in event.causes.items())
        for kind, times in self._times.items():
            self._times[kind] = deque(sorted(times))

    def spend(self, kind: str, cause: MegarlError, step: int, *, worker: str = "", num_processes: int = 1) -> float:
        """Spend one restart and report it to the user; return the seconds to wait before restarting.

        Args:
            worker: the process that was lost, where there are several of a kind; otherwise as `spend_each`.
        """
        (seconds,) = self.spend_each(kind, {worker or f"the {kind}": cause}, step, num_processes=num_processes)
        return seconds

    def spend_each(
        self, kind: str, causes: Mapping[str, MegarlError], step: int, *, num_processes: int = 1
    ) -> list[float]:
        """Spend a restart for each process that was lost and report all in one line.

        Returns:
            The seconds to wait before each restart.

        Args:
            kind: restarts are limited for each kind.
            causes: why each process was lost, by its name: backoff and identical failures are counted for each.
            step: the step in progress.
            num_processes: number of processes of this kind.

        Raises:
            MegarlError: the first cause, where restarts are disabled.
            RestartLimitError: too many restarts of this kind, or too many identical failures of a process.
        """
        names, (first, *_) = list(causes), causes.values()
        if self._config.max_restarts == 0:
            raise first
        times, limit = self._times_within_window(kind), self._config.max_restarts * num_processes
        what, used = _name_lost(kind, names), len(times)
        if used + len(names) > limit:
            each = f" for each of {num_processes} {kind}s" if num_processes > 1 else ""
            raise RestartLimitError(
                f"step {step}: {what} lost after {used} restarts of this kind "
                f"(recovery.max_restarts: {self._config.max_restarts}{each}, within "
                f"{RESTART_WINDOW_SECONDS / 3600:g} h): {first}"
            ) from first
        self._count_failures(causes, step)
        seconds = [self._backoff(self._recent[kind, name]) for name in names]
        self._recent.update((kind, name) for name in names)
        times.extend([time.monotonic()] * len(names))
        self._record(kind, causes, step)
        when = f" in {'up to ' if len(set(seconds)) > 1 else ''}{max(seconds):g} s" if any(seconds) else ""
        number = f"restart {used + 1}" if len(names) == 1 else f"restarts {used + 1} to {used + len(names)}"
        them = "it" if len(names) == 1 else "them"
        self.notify(f"{what} lost ({_describe(causes)}); restarting {them}{when} ({number} of {limit})")
        return seconds

    def is_hopeless(self, worker: str, cause: MegarlError) -> bool:
        """Return whether `spend_each` would end the run, as the worker was lost too often for the same reason."""
        num_before = self._failures[worker, normalize_failure(str(cause))]
        return self._config.max_restarts > 0 and num_before + 1 >= self._config.max_identical_failures

    @property
    def step(self) -> int:
        """The step in progress as far as is known here: the one after the last completed step."""
        return self._last_step + 1

    def mark_step_done(self, step: int) -> None:
        """Reset backoff and identical failures; a step that was completed before and is repeated has no effect."""
        if step > self._last_step:
            self._last_step = step
            self._recent.clear()
            self._failures.clear()

    def _times_within_window(self, kind: str) -> deque[float]:
        """Return the times of restarts, without those that are older than the window."""
        times, oldest = self._times[kind], time.monotonic() - RESTART_WINDOW_SECONDS
        while times and times[0] <= oldest:
            times.popleft()
        return times

    def _count_failures(self, causes: Mapping[str, MegarlError], step: int) -> None:
        limit = self._config.max_identical_failures
        for worker, cause in causes.items():
            failure = worker, normalize_failure(str(cause))
            self._failures[failure] += 1
            if (times := self._failures[failure]) >= limit:
                raise RestartLimitError(
                    f"step {step}: {worker} was lost {times} times for the same reason, with no step completed in "
                    f"between (recovery.max_identical_failures: {limit}): {cause}"
                ) from cause

    def _record(self, kind: str, causes: Mapping[str, MegarlError], step: int) -> None:
        if self._log is None:
            return
        first_lines = {worker: first_line(cause) for worker, cause in causes.items()}
        try:
            self._log.append(RestartEvent(time=time.time(), step=step, kind=kind, causes=first_lines))
        except OSError as error:
            if not self._has_reported:
                self._has_reported = True
                self.notify(f"{RESTARTS_FILE} cannot be written, so a restarted controller does not count: {error}")

    def _backoff(self, recent: int) -> float:
        if recent == 0:
            return 0.0
        # the cap keeps 2.0 ** n finite; `MAX_BACKOFF_SECONDS` applies long before
        return min(BACKOFF_SECONDS * 2.0 ** min(recent - 1, 60), MAX_BACKOFF_SECONDS)


def normalize_failure(text: str) -> str:
    """Return what identical failures share: an error message without pids, addresses, numbers and log tail."""
    return re.sub(r"\b[0-9a-f]{8,}\b|0x[0-9a-f]+|\d+", "#", text.partition(LOG_TAIL_PREFIX)[0])


def first_line(cause: MegarlError) -> str:
    """Return the first line of the error message, without log tail."""
    text = str(cause).strip().partition(LOG_TAIL_PREFIX)[0]
    return (text.splitlines() or [type(cause).__name__])[0].strip().rstrip(";:. ")


def name_some(names: Sequence[str]) -> str:
    """Return the first names of a list and how many follow."""
    more = len(names) - NUM_NAMED
    if more <= 0:
        return ", ".join(names)
    return f"{', '.join(names[:NUM_NAMED])} and {more} {'other' if more == 1 else 'others'}"


def _name_lost(kind: str, names: Sequence[str]) -> str:
    return f"{names[0]} was" if len(names) == 1 else f"{len(names)} {kind}s ({name_some(names)}) were"


def _describe(causes: Mapping[str, MegarlError]) -> str:
    """Return the first cause, and how many differ from it."""
    (first, *_), failures = causes.values(), [normalize_failure(str(cause)) for cause in causes.values()]
    num_others = sum(failure != failures[0] for failure in failures)
    return f"{first_line(first)}{f'; {num_others} for other reasons' if num_others else ''}"
