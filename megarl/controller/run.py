"""What a training stage has at hand: its groups, its data, its clock and its books."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from megarl.config import StageConfig
from megarl.controller.events import EventLog, Note, Phase
from megarl.tracking.phases import PhaseTimer
from megarl.tracking.progress import StepLine
from megarl.tracking.tracker import Tracker


class StageRun:
    """Times phases, tells the driver about them, and writes metrics."""

    def __init__(self, config: StageConfig, events: EventLog, timer: PhaseTimer) -> None:
        """`timer`: the stage's own, which has measured its start."""
        self.timer = timer
        self.step = 0
        self._events = events
        self._tracker = Tracker(config.tracking, Path(config.run_dir))

    @contextmanager
    def phase(self, name: str, *, waiting: bool = True) -> Iterator[None]:
        """Measure the block; `waiting`: other processes do the work meanwhile."""
        self._events.add(Phase(self.step, name))
        with self.timer.phase(name, waiting=waiting):
            yield

    def say(self, text: str) -> None:
        """Show the user a line."""
        self._events.add(Note(text))

    def log(self, metrics: Mapping[str, float], line: StepLine | None = None) -> None:
        """Write the step's metrics, and show `line`."""
        self._tracker.log(metrics, step=self.step)
        if line is not None:
            self._events.add(line)

    def close(self) -> None:
        """Flush and close what metrics are written to."""
        self._tracker.close()
