"""What the controller and its driver tell each other while a run goes on."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

from megarl.tracking.progress import StepLine


@dataclass(frozen=True, slots=True)
class Phase:
    """The run is now in `name` of step `step`."""

    step: int
    name: str


@dataclass(frozen=True, slots=True)
class Note:
    """A line of text."""

    text: str


Event = Phase | Note | StepLine


class EventLog:
    """Events since a cursor; written by the run's thread, read by the driver's calls. The driver may ask for an end."""

    def __init__(self) -> None:
        self._events: list[Event] = []
        # not 0: a cursor of the log that a controller had before it was restarted lies before all of this one
        self._first = time.time_ns()
        self._lock = threading.Lock()
        self.asked_by = ""
        """The signal for which the run is to end early; empty: none has come."""

    def add(self, event: Event) -> None:
        """Append one."""
        with self._lock:
            self._events.append(event)

    def since(self, cursor: int) -> tuple[list[Event], int]:
        """Events from `cursor` on, at first 0, and the next cursor; what lies before `cursor` is forgotten."""
        with self._lock:
            self._events = self._events[max(0, cursor - self._first) :]
            self._first = max(self._first, cursor)
            return list(self._events), self._first + len(self._events)

    def finish_early(self, asked_by: str = "SIGUSR1") -> None:
        """Have the run end after the step under way."""
        self.asked_by = asked_by

    def ends_early(self) -> bool:
        """Whether it is to; of a run's ranks, all get the same answer."""
        return bool(self.asked_by)
