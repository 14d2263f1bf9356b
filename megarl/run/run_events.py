"""Events that the controller sends to its driver during a run, and the driver's stop request."""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass
from itertools import islice

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


MAX_EVENTS = 10_000
"""Number of newest events that a log keeps: some hundred steps of a run."""


class EventLog:
    """Thread-safe log of the newest events: the run's thread appends; drivers poll and may request a stop.

    Each reader has a cursor of its own, so several can follow one run.
    """

    def __init__(self) -> None:
        self._events: deque[Event] = deque(maxlen=MAX_EVENTS)
        # not 0: cursors from before a controller restart must be smaller than all cursors of the new log
        self._start = self._end = time.time_ns()
        """Cursors of the first event and of the next one to be added."""
        self._lock = threading.Lock()
        self.stop_signal = ""
        """Name of the signal that requested an early stop; empty if there was none."""

    def add(self, event: Event) -> None:
        """Append an event to the log; a full log drops the oldest one."""
        with self._lock:
            self._events.append(event)
            self._end += 1

    def since(self, cursor: int) -> tuple[list[Event], int]:
        """Return the events from `cursor` on and the reader's next cursor. The first cursor is 0.

        If the log no longer has some of these events, the first one returned is a message with their number.
        """
        with self._lock:
            oldest, end = self._end - len(self._events), self._end
            events = list(islice(self._events, max(0, cursor - oldest), None))
        num_dropped = oldest - max(cursor, self._start)
        if num_dropped > 0:
            what = "1 earlier event is" if num_dropped == 1 else f"{num_dropped} earlier events are"
            events.insert(0, MessageEvent(f"{what} no longer available: the log keeps the newest {MAX_EVENTS}"))
        return events, end

    def request_stop(self, stop_signal: str = "SIGUSR1") -> None:
        """Request that the run stop after the current step."""
        self.stop_signal = stop_signal

    def should_stop(self) -> bool:
        """Whether a stop was requested; the answer is the same on all ranks of a run."""
        return bool(self.stop_signal)
