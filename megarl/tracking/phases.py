"""Timing of the phases of a step.

timer.start_step()
with timer.phase("rollout", waiting=True): ...     # other processes compute, this one waits
with timer.phase("advantages"): ...                # this process computes
metrics = timer.take()                             # time/rollout_seconds, ..., controller/own_fraction
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class _OpenPhase:
    """A phase that has begun and not ended. Compared by identity: equal phases may be open at the same time."""

    name: str
    since: float


class PhaseTimer:
    """Measures the seconds per phase and step in one thread or one event loop.

    Phases may nest, overlap (as asyncio tasks do) and span several steps; each step then gets its share.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._created_at = clock()
        self._resumed_seconds = 0.0
        self._step_since: float | None = None
        self._open: list[_OpenPhase] = []
        self._seconds: dict[str, float] = {}
        self._totals: dict[str, float] = {}
        self._num_waiting = 0
        self._waiting_since = 0.0
        self._waiting_seconds = 0.0

    def resume(self, seconds: float, totals: Mapping[str, float]) -> None:
        """Add what a timer had measured before a restart: its `seconds` and `totals`."""
        self._resumed_seconds += seconds
        for name, phase_seconds in totals.items():
            self._totals[name] = self._totals.get(name, 0.0) + phase_seconds

    def seconds(self) -> float:
        """Return the seconds since the timer was created, plus the resumed ones."""
        return self._resumed_seconds + self._clock() - self._created_at

    @property
    def totals(self) -> Mapping[str, float]:
        """Seconds per phase since the timer was created, within and between steps, plus the resumed ones."""
        return dict(self._totals)

    def start_step(self) -> None:
        """Begin a step; time measured since the last `take` counts only in `totals`."""
        now = self._clock()
        self._credit_open(now)
        self._step_since = now
        self._seconds = {}
        self._waiting_seconds = 0.0

    @contextmanager
    def phase(self, name: str, *, waiting: bool = False) -> Iterator[None]:
        """Measure the block as phase `name`. `waiting`: other processes do the work, this one waits."""
        now = self._clock()
        entry = _OpenPhase(name, now)
        self._open.append(entry)
        if waiting:
            if self._num_waiting == 0:
                self._waiting_since = now
            self._num_waiting += 1
        try:
            yield
        finally:
            now = self._clock()
            self._credit(entry, now)
            self._open.remove(entry)
            if waiting:
                self._num_waiting -= 1
                if self._num_waiting == 0:
                    self._waiting_seconds += now - self._waiting_since

    def take(self) -> dict[str, float]:
        """End the step; return `time/<phase>_seconds`, `time/step_seconds` and `controller/own_fraction`.

        `own_fraction` is the fraction of the step in which no waiting phase was open: the cost of this process itself.
        """
        assert self._step_since is not None, "take() without start_step()"
        now = self._clock()
        self._credit_open(now)
        step_seconds = now - self._step_since
        own = (step_seconds - self._waiting_seconds) / step_seconds if step_seconds > 0 else 0.0
        metrics = {f"time/{name}_seconds": seconds for name, seconds in self._seconds.items()}
        self._step_since, self._seconds, self._waiting_seconds = None, {}, 0.0
        return {**metrics, "time/step_seconds": step_seconds, "controller/own_fraction": own}

    def _credit_open(self, now: float) -> None:
        for entry in self._open:
            self._credit(entry, now)
        if self._num_waiting:
            self._waiting_seconds += now - self._waiting_since
            self._waiting_since = now

    def _credit(self, entry: _OpenPhase, now: float) -> None:
        for seconds_by_phase in (self._seconds, self._totals):
            seconds_by_phase[entry.name] = seconds_by_phase.get(entry.name, 0.0) + now - entry.since
        entry.since = now
