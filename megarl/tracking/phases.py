"""Where the time of a step goes.

timer.start_step()
with timer.phase("rollout", waiting=True): ...     # other processes work, this one waits
with timer.phase("advantages"): ...                # this process works
metrics = timer.take()                             # time/rollout_seconds, ..., controller/own_fraction
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class _Open:
    """A phase that has begun and not ended. Two that began together are still two."""

    name: str
    since: float


class PhaseTimer:
    """Seconds per phase and step, of one thread or one event loop.

    Phases may nest, overlap (as asyncio tasks do) and last over several steps: each step gets its part.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._made = clock()
        self._before = 0.0
        self._step_since: float | None = None
        self._open: list[_Open] = []
        self._seconds: dict[str, float] = {}
        self._totals: dict[str, float] = {}
        self._num_waiting = 0
        self._waiting_since = 0.0
        self._waiting_seconds = 0.0

    def resume(self, seconds: float, totals: Mapping[str, float]) -> None:
        """Count on from what another timer has measured."""
        self._before += seconds
        for name, of_phase in totals.items():
            self._totals[name] = self._totals.get(name, 0.0) + of_phase

    def seconds(self) -> float:
        """Since the timer was made, and what it counts on from."""
        return self._before + self._clock() - self._made

    @property
    def totals(self) -> Mapping[str, float]:
        """Seconds per phase since the timer was made, within steps and between them, and what it counts on from."""
        return dict(self._totals)

    def start_step(self) -> None:
        """Begin a step; what was measured since the last `take` counts only in `totals`."""
        now = self._clock()
        self._credit_open(now)
        self._step_since = now
        self._seconds = {}
        self._waiting_seconds = 0.0

    @contextmanager
    def phase(self, name: str, *, waiting: bool = False) -> Iterator[None]:
        """Measure the block as `name`. `waiting`: other processes do the work meanwhile."""
        now = self._clock()
        entry = _Open(name, now)
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
        """End the step: `time/<phase>_seconds`, `time/step_seconds` and `controller/own_fraction`.

        `own_fraction` is the share of the step in which no waiting phase was open: what this process itself costs.
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

    def _credit(self, entry: _Open, now: float) -> None:
        for table in (self._seconds, self._totals):
            table[entry.name] = table.get(entry.name, 0.0) + now - entry.since
        entry.since = now
