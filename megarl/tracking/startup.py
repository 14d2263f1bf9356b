"""Where a run's start goes, from the command to the first completion.

At every instant some process does something. An instant counts as `imports` if some process imports modules, else as
`ray` if Ray starts something, else as `sglang` if an engine starts, else as the own time of megarl; what passed before
the command began is `launch`. So the kinds add up to the whole, however much runs side by side:

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
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, get_args

from megarl.errors import ConfigError
from megarl.process.atomic_files import replaced
from megarl.process.startup_trace import STARTED, Interval, ProcessStart, process_created

Kind = Literal["launch", "imports", "ray", "sglang", "megarl"]
"""The first that applies to an instant is what it counts as."""

KINDS: tuple[Kind, ...] = get_args(Kind)

NAMES = {"ray": "Ray", "sglang": "SGLang"}


@dataclass(frozen=True, slots=True)
class Span:
    """One process does one kind of thing."""

    phase: str
    kind: Kind
    begin: float
    """Unix time; as is `end`."""
    end: float


def seconds_by_kind(spans: Sequence[Span], begin: float, end: float) -> dict[Kind, float]:
    """Seconds of [begin, end] that count as each kind; none where no span is."""
    cuts = sorted({begin, end, *(t for span in spans for t in (span.begin, span.end) if begin < t < end)})
    seconds = dict.fromkeys(KINDS, 0.0)
    for left, right in pairwise(cuts):
        there = {span.kind for span in spans if span.begin <= left and right <= span.end}
        if there:
            seconds[min(there, key=KINDS.index)] += right - left
    return seconds


@dataclass(slots=True)
class Startup:
    """The spans of a run's start, from several processes."""

    begin: float
    """Unix time."""
    spans: list[Span] = field(default_factory=list)

    @contextmanager
    def phase(self, name: str, kind: Kind = "megarl") -> Iterator[None]:
        """The block is one, or part of one."""
        begun = time.time()
        yield
        self.add(name, kind, [(begun, time.time())])

    def add(self, phase: str, kind: Kind, intervals: Iterable[Interval]) -> None:
        """One kind of thing in a phase."""
        self.spans += [Span(phase, kind, begin, end) for begin, end in intervals if begin < end]

    def add_processes(self, phase: str, starts: Iterable[ProcessStart], *, asked: float, builds: Kind) -> None:
        """Processes that Ray was asked for at `asked`, and that have built things of kind `builds`."""
        for start in starts:
            self.add(phase, "ray", [(asked, start.there)])
            self.add(phase, "imports", start.imports)
            self.add(phase, builds, start.builds)

    def ended(self, last_phase: str, end: float) -> StartReport:
        """What the start comes to, which has ended at `end` with this phase; it began when all others were over."""
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
                    begin=first - self.begin,
                    seconds=last - first,
                    by_kind=seconds_by_kind(spans, first, last),
                )
            )
        whole = Span("", "megarl", self.begin, end)
        return StartReport(
            seconds=end - self.begin,
            by_kind=seconds_by_kind([*self.spans, whole], self.begin, end),
            phases=tuple(sorted(rows, key=lambda row: row.begin)),
        )


def of_command() -> Startup:
    """Of this process, all of which was imports so far, and of whoever noted before in MEGARL_STARTED when it began.

    Raises:
        ConfigError: that is no time.
    """
    created, noted = process_created(), os.environ.get(STARTED)
    try:
        begun = created if noted is None else min(float(noted), created)
    except ValueError as e:
        raise ConfigError(f"{STARTED} needs the Unix time at which the start began, got {noted!r}") from e
    startup = Startup(begun)
    startup.add("launch", "launch", [(begun, created)])
    startup.add("command", "imports", [(created, time.time())])
    return startup


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseReport:
    """A phase by itself: phases may overlap."""

    name: str
    begin: float
    """Seconds since the start began."""
    seconds: float
    by_kind: dict[Kind, float]
    """The rest of `seconds`, it waited for other phases."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartReport:
    """A whole start."""

    seconds: float
    by_kind: dict[Kind, float]
    """They add up to `seconds`."""
    phases: tuple[PhaseReport, ...]

    @property
    def line(self) -> str:
        """For people."""
        parts = (f"{NAMES.get(kind, kind)} {self.by_kind[kind]:.1f}" for kind in _mentioned(self.by_kind))
        return f"started in {self.seconds:.1f} s: {', '.join(parts)}"

    def write(self, path: Path) -> None:
        """Write it as a JSON object, whole or not at all."""
        tree: dict[str, Any] = {
            "until": "first completion",
            "seconds": round(self.seconds, 3),
            "by_kind": _rounded(self.by_kind),
            "phases": [
                {
                    "name": phase.name,
                    "begin": round(phase.begin, 3),
                    "seconds": round(phase.seconds, 3),
                    "by_kind": _rounded(phase.by_kind),
                }
                for phase in self.phases
            ],
        }
        with replaced(path) as draft:
            draft.write_text(json.dumps(tree, indent=2) + "\n")


def _mentioned(by_kind: dict[Kind, float]) -> list[Kind]:
    return [kind for kind in KINDS if kind != "launch" or by_kind[kind] > 0]


def _rounded(by_kind: dict[Kind, float]) -> dict[Kind, float]:
    return {kind: round(by_kind[kind], 3) for kind in _mentioned(by_kind)}
