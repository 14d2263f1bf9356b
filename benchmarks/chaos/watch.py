"""Where a run stands, read from its folder while it works.

step 1's line |-- rollout --|-- train --|- weight_sync -| step 2's line |-- rollout --|-- ...
              '------ the stretch after step 1 --------'

Phases of a step are measured by the run itself, and written with the step's line in `metrics.jsonl`. What is between
steps (start, evaluation, export) is seen in `heartbeat.json`, which is written twice a second at most.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

HEARTBEAT, METRICS = "heartbeat.json", "metrics.jsonl"

STEP_SECONDS = "time/step_seconds"
"""A metric that is logged once a step, when it ends; lines without it tell of something else."""

START = "start"
"""The phase before a run has named one."""

Line = Mapping[str, float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A phase of an undisturbed run."""

    phase: str
    begin: float
    """Seconds after the line of the step before; before the first step after the command's start."""
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Beat:
    """What `heartbeat.json` says of the phase under way."""

    written: float
    """Unix time."""
    phase: str
    since: float
    """Unix time."""


class Watch:
    """Of one run; to be asked every few milliseconds, since it takes a line's time from when it first sees it."""

    def __init__(self, folder: Path, start: float) -> None:
        """`start`: of the command, in Unix time."""
        self._heartbeat, self._metrics = folder / HEARTBEAT, folder / METRICS
        self._seen: tuple[int, int] | None = None
        self.steps_done = 0
        """The last step in the metrics; a run that has gone back to a checkpoint may have fewer than before."""
        self.beat: Beat | None = None
        self.line_times: dict[int, float] = {0: start}
        """By step, when its line was there last; 0: the start."""
        self.between: dict[int, list[Beat]] = {}
        """What was seen, by the step whose line had been written."""

    def look(self) -> None:
        """Read what has changed."""
        self._look_at_metrics()
        try:
            beat = json.loads(self._heartbeat.read_text())
        except FileNotFoundError:
            return
        self.beat = Beat(
            written=datetime.fromisoformat(beat["time"]).timestamp(),
            phase=beat["phase"] or START,
            since=datetime.fromisoformat(beat["phase_since"]).timestamp(),
        )
        after = max(step for step, when in self.line_times.items() if when <= self.beat.since or step == 0)
        seen = self.between.setdefault(after, [])
        if seen and seen[-1].since == self.beat.since:
            seen.pop()
        seen.append(self.beat)

    def _look_at_metrics(self) -> None:
        try:
            state = self._metrics.stat()
        except FileNotFoundError:
            return
        if (seen := (state.st_mtime_ns, state.st_size)) == self._seen:
            return
        self._seen, now = seen, time.time()
        done = max(step_lines(self._metrics.read_text()), default=0)
        if done != self.steps_done:
            self.line_times |= dict.fromkeys(range(self.steps_done + 1, done + 1), now)
            self.steps_done = done

    def timeline(self, end: float) -> Mapping[int, list[Span]]:
        """Step -> the phases of the stretch after it, in the order of their beginning; 0: of the stretch before step 1.

        Args:
            end: of the run, in Unix time.
        """
        lines = step_lines(self._metrics.read_text())
        return {
            step: stretch(
                self.line_times[step], self.line_times.get(step + 1, end), lines.get(step + 1), self.between.get(step)
            )
            for step in range(self.steps_done + 1)
        }


def stretch(begin: float, end: float, lines: list[Line] | None, beats: list[Beat] | None) -> list[Span]:
    """The phases between the lines of two steps.

    Args:
        begin: Unix time, as `end`.
        lines: of the step that ends there; None: the stretch is the run's last.
        beats: that were seen.
    """
    spans, at = [], end - begin
    measured = {} if lines is None else phase_seconds(lines[-1])
    if lines is not None:
        at -= lines[-1][STEP_SECONDS] or 0.0
    for phase, seconds in measured.items():
        spans.append(Span(phase=phase, begin=max(0.0, at), seconds=seconds))
        at += seconds
    others = [beat for beat in beats or [] if beat.phase not in measured]
    for number, beat in enumerate(others):
        until = others[number + 1].since if number + 1 < len(others) else max(beat.written, beat.since)
        spans.append(Span(phase=beat.phase, begin=max(0.0, beat.since - begin), seconds=max(0.0, until - beat.since)))
    return sorted(spans, key=lambda span: span.begin)


def phase_seconds(line: Line) -> dict[str, float]:
    """Phase -> seconds, in the order of the phases' ends."""
    times = {name: value for name, value in line.items() if name.startswith("time/") and name != STEP_SECONDS}
    return {
        name.removeprefix("time/").removesuffix("_seconds"): value or 0.0
        for name, value in times.items()
        if name.endswith("_seconds")
    }


def step_lines(text: str) -> dict[int, list[Line]]:
    """Step -> its lines of `metrics.jsonl` that tell of a finished step; a line still being written is not one."""
    found: dict[int, list[Line]] = {}
    for line in text.split("\n")[:-1]:
        row = json.loads(line)
        if STEP_SECONDS in row:
            found.setdefault(int(row["step"]), []).append(row)
    return found
