"""Events that the controller sends to its driver during a run, and the driver's stop request."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

from megarl.tracking.progress import StepSummary


@dataclass(frozen=True, slots=True)
class PhaseEvent:
    """The run has entered phase `name` of step `step`."""

    step: int
    name: str


@dataclass(frozen=True, slots=True)
class MessageEvent:
    """A line of text for the user."""

    text: str


Event = PhaseEvent | MessageEvent | StepSummary


class EventLog:
    """Thread-safe log of events: the run's thread appends, the driver polls with a cursor and may request a stop."""

    def __init__(self) -> None:
        self._events: list[Event] = []
        # not 0: cursors from before a controller restart must be smaller than all cursors of the new log
        self._first = time.time_ns()
        self._lock = threading.Lock()
        self.stop_signal = ""
        """Name of the signal that requested an early stop; empty if there was none."""

    def add(self, event: Event) -> None:
        """Append an event to the log."""
        with self._lock:
            self._events.append(event)

    def since(self, cursor: int) -> tuple[list[Event], int]:
        """Return the events from `cursor` on and the next cursor; drop earlier events. The first cursor is 0."""
        with self._lock:
            self._events = self._events[max(0, cursor - self._first) :]
            self._first = max(self._first, cursor)
            return list(self._events), self._first + len(self._events)

    def request_stop(self, stop_signal: str = "SIGUSR1") -> None:
        """Request that the run stop after the current step."""
        self.stop_signal = stop_signal

    def should_stop(self) -> bool:
        """Whether a stop was requested; the answer is the same on all ranks of a run."""
        return bool(self.stop_signal)
