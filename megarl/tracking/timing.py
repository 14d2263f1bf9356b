"""Where the time goes: the phases of a step, and the start from the command to the first completion.

timer.start_step()
with timer.phase("rollout", waiting=True): ...     # other processes compute, this one waits
with timer.phase("advantages"): ...                # this process computes
metrics = timer.take()                             # time/rollout_seconds, ..., controller/own_fraction

Processes start concurrently. Each instant is assigned to one kind: `imports` if any process imports modules, otherwise
`ray` if Ray starts something, otherwise `sglang` if an engine starts, otherwise `megarl`; time before the command began
is `launch`. So the kinds add up to the total, however many processes run concurrently:

    command       iiiimmrr
    controller            rriimm
    trainer ranks               rriiimmm
    engines                     rriisssssss
    counts as     iiiimmrrrriimmrriiissssssm
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, get_args

from megarl.cluster.process.atomic_files import atomic_write
from megarl.cluster.process.process_start import STARTED_VARIABLE, Interval, StartupTiming, process_creation_time
from megarl.errors import ConfigError


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


Kind = Literal["launch", "imports", "ray", "sglang", "megarl"]
"""An instant is assigned to the first kind that applies."""

KINDS: tuple[Kind, ...] = get_args(Kind)

DISPLAY_NAMES = {"ray": "Ray", "sglang": "SGLang"}


@dataclass(frozen=True, slots=True)
class Span:
    """An interval in which one process does one kind of work."""

    phase: str
    kind: Kind
    begin: float
    """Unix time in seconds."""
    end: float
    """Unix time in seconds."""


def seconds_by_kind(spans: Sequence[Span], begin: float, end: float) -> dict[Kind, float]:
    """Return the seconds of [begin, end] assigned to each kind; instants without a span are not assigned."""
    boundaries = sorted({begin, end, *(t for span in spans for t in (span.begin, span.end) if begin < t < end)})
    seconds = dict.fromkeys(KINDS, 0.0)
    for left, right in pairwise(boundaries):
        kinds = {span.kind for span in spans if span.begin <= left and right <= span.end}
        if kinds:
            seconds[min(kinds, key=KINDS.index)] += right - left
    return seconds


@dataclass(slots=True)
class Startup:
    """Collects the spans of a run's startup from several processes."""

    begin: float
    """Unix time at which the startup began."""
    spans: list[Span] = field(default_factory=list)

    @contextmanager
    def phase(self, name: str, kind: Kind = "megarl") -> Iterator[None]:
        """Record the block as a span of phase `name`."""
        began = time.time()
        yield
        self.add(name, kind, [(began, time.time())])

    def add(self, phase: str, kind: Kind, intervals: Iterable[Interval]) -> None:
        """Add intervals of one kind to a phase; empty intervals are dropped."""
        self.spans += [Span(phase, kind, begin, end) for begin, end in intervals if begin < end]

    def add_processes(self, phase: str, starts: Iterable[StartupTiming], *, requested_at: float, builds: Kind) -> None:
        """Add processes requested from Ray at `requested_at`; `builds`: the kind of their builds."""
        for start in starts:
            self.add(phase, "ray", [(requested_at, start.ready_at)])
            self.add(phase, "imports", start.imports)
            self.add(phase, builds, start.builds)

    def finish(self, last_phase: str, end: float) -> StartupReport:
        """Add `last_phase`, from the end of all other phases to `end`; return the report of the startup.

        Its times are rounded to milliseconds, so that its line and its file show the same ones.
        """
        self.add(last_phase, "megarl", [(max(span.end for span in self.spans), end)])
        phases: dict[str, list[Span]] = {}
        for span in self.spans:
            phases.setdefault(span.phase, []).append(span)
        rows = []
        for name, spans in phases.items():
            first, last = min(span.begin for span in spans), max(span.end for span in spans)
            rows.append(
                PhaseReport(
                    name=name,
                    begin=round(first - self.begin, 3),
                    seconds=round(last - first, 3),
                    by_kind=_rounded(seconds_by_kind(spans, first, last)),
                )
            )
        full_span = Span("", "megarl", self.begin, end)
        return StartupReport(
            seconds=round(end - self.begin, 3),
            by_kind=_rounded(seconds_by_kind([*self.spans, full_span], self.begin, end)),
            phases=tuple(sorted(rows, key=lambda row: row.begin)),
        )


def command_startup() -> Startup:
    """Return the startup so far, called at the start of a command: imports since this process was created.

    If a launcher has set MEGARL_STARTED, the startup begins at that time, with a phase `launch`.

    Raises:
        ConfigError: MEGARL_STARTED is not a number.
    """
    created, recorded = process_creation_time(), os.environ.get(STARTED_VARIABLE)
    try:
        began = created if recorded is None else min(float(recorded), created)
    except ValueError as e:
        raise ConfigError(f"{STARTED_VARIABLE} needs the Unix time at which the start began, got {recorded!r}") from e
    startup = Startup(began)
    startup.add("launch", "launch", [(began, created)])
    startup.add("command", "imports", [(created, time.time())])
    return startup


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseReport:
    """The timing of one phase; phases may overlap."""

    name: str
    begin: float
    """Seconds from the begin of the startup."""
    seconds: float
    by_kind: dict[Kind, float]
    """Seconds by kind; in the rest of `seconds` the phase waited for other phases."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartupReport:
    """The timing of a complete startup."""

    seconds: float
    by_kind: dict[Kind, float]
    """Seconds by kind; they add up to `seconds`."""
    phases: tuple[PhaseReport, ...]

    @property
    def line(self) -> str:
        """One-line summary for the user."""
        parts = (f"{DISPLAY_NAMES.get(kind, kind)} {seconds:.1f}" for kind, seconds in _reported(self.by_kind).items())
        return f"started in {self.seconds:.1f} s: {', '.join(parts)}"

    def write(self, path: Path) -> None:
        """Write the report as a JSON object, atomically."""
        tree: dict[str, Any] = {
            "until": "first completion",
            "seconds": self.seconds,
            "by_kind": _reported(self.by_kind),
            "phases": [
                {
                    "name": phase.name,
                    "begin": phase.begin,
                    "seconds": phase.seconds,
                    "by_kind": _reported(phase.by_kind),
                }
                for phase in self.phases
            ],
        }
        with atomic_write(path) as draft:
            draft.write_text(json.dumps(tree, indent=2) + "\n")


def _rounded(by_kind: dict[Kind, float]) -> dict[Kind, float]:
    return {kind: round(seconds, 3) for kind, seconds in by_kind.items()}


def _reported(by_kind: dict[Kind, float]) -> dict[Kind, float]:
    return {kind: by_kind[kind] for kind in KINDS if kind != "launch" or by_kind[kind] > 0}
