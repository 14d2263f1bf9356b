"""Follows the progress of a run through the files in its folder.

step 1's line |-- rollout --|-- train --|- weight_sync -| step 2's line |-- rollout --|-- ...
              '------- the interval after step 1 ------'

The run measures the phases of a step and writes them with the step's line in `metrics.jsonl`. Phases between steps
(startup, evaluation, export) are observed in `heartbeat.json`, which is written at most twice a second.
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
"""A metric that is logged once per step, at its end; lines without it are not about a finished step."""

START = "start"
"""Name of the phase before the run reports one."""

Line = Mapping[str, float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A phase of an undisturbed run."""

    phase: str
    begin: float
    """Seconds since the line of the previous step; for step 1, since the start of the command."""
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """The current phase according to `heartbeat.json`."""

    written: float
    """Unix time at which the file was written."""
    phase: str
    since: float
    """Unix time at which the phase began."""


class RunWatcher:
    """Progress of one run. Poll every few milliseconds: the time of a line is when it is first seen."""

    def __init__(self, folder: Path, start: float) -> None:
        """`start`: Unix time at which the command started."""
        self._heartbeat, self._metrics = folder / HEARTBEAT, folder / METRICS
        self._seen: tuple[int, int] | None = None
        self.steps_done = 0
        """Last step in the metrics; decreases when the run resumes from a checkpoint."""
        self.heartbeat: Heartbeat | None = None
        self.line_times: dict[int, float] = {0: start}
        """Step -> Unix time at which its line last appeared; 0: start of the command."""
        self.heartbeats_after: dict[int, list[Heartbeat]] = {}
        """Heartbeats seen between two steps, by the step before them."""

    def poll(self) -> None:
        """Read the files that have changed."""
        self._poll_metrics()
        try:
            heartbeat = json.loads(self._heartbeat.read_text())
        except FileNotFoundError:
            return
        self.heartbeat = Heartbeat(
            written=datetime.fromisoformat(heartbeat["time"]).timestamp(),
            phase=heartbeat["phase"] or START,
            since=datetime.fromisoformat(heartbeat["phase_since"]).timestamp(),
        )
        after = max(step for step, when in self.line_times.items() if when <= self.heartbeat.since or step == 0)
        seen = self.heartbeats_after.setdefault(after, [])
        if seen and seen[-1].since == self.heartbeat.since:
            seen.pop()
        seen.append(self.heartbeat)

    def _poll_metrics(self) -> None:
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
        """Return step -> phases of the interval after it, in the order of their start; 0: the interval before step 1.

        Args:
            end: Unix time at which the run ended.
        """
        lines = step_lines(self._metrics.read_text())
        return {
            step: phases_between(
                self.line_times[step],
                self.line_times.get(step + 1, end),
                lines.get(step + 1),
                self.heartbeats_after.get(step),
            )
            for step in range(self.steps_done + 1)
        }


def phases_between(
    begin: float, end: float, lines: list[Line] | None, heartbeats: list[Heartbeat] | None
) -> list[Span]:
    """Return the phases between the lines of two consecutive steps.

    Args:
        begin: Unix time of the first line; likewise `end` of the second.
        lines: lines of the step that ends the interval; None for the last interval of the run.
        heartbeats: heartbeats seen in the interval.
    """
    spans, at = [], end - begin
    measured = {} if lines is None else phase_seconds(lines[-1])
    if lines is not None:
        at -= lines[-1][STEP_SECONDS] or 0.0
    for phase, seconds in measured.items():
        spans.append(Span(phase=phase, begin=max(0.0, at), seconds=seconds))
        at += seconds
    others = [heartbeat for heartbeat in heartbeats or [] if heartbeat.phase not in measured]
    for number, heartbeat in enumerate(others):
        until = others[number + 1].since if number + 1 < len(others) else max(heartbeat.written, heartbeat.since)
        spans.append(
            Span(
                phase=heartbeat.phase,
                begin=max(0.0, heartbeat.since - begin),
                seconds=max(0.0, until - heartbeat.since),
            )
        )
    return sorted(spans, key=lambda span: span.begin)


def phase_seconds(line: Line) -> dict[str, float]:
    """Return phase -> seconds, in the order in which the phases ended."""
    times = {name: value for name, value in line.items() if name.startswith("time/") and name != STEP_SECONDS}
    return {
        name.removeprefix("time/").removesuffix("_seconds"): value or 0.0
        for name, value in times.items()
        if name.endswith("_seconds")
    }


def step_lines(text: str) -> dict[int, list[Line]]:
    """Return step -> its lines of `metrics.jsonl` about the finished step, without an incomplete last line."""
    found: dict[int, list[Line]] = {}
    for line in text.split("\n")[:-1]:
        row = json.loads(line)
        if STEP_SECONDS in row:
            found.setdefault(int(row["step"]), []).append(row)
    return found
