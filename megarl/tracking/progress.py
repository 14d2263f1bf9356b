"""What a run reports while it runs and at its end: events for the command that follows it, lines, heartbeat, summary.

run's thread    EventLog.add(PhaseEvent | MessageEvent | StepSummary)
driver          EventLog.since(cursor), EventLog.request_stop(signal)
terminal        step  3/40  reward 0.625  eval 0.853  4.2k tok/s  sync 0.04 s 2.0 MB  5.1 s
⠙ step 4/40 rollout

`heartbeat.json` of a run folder is a sign of life for monitors that do not use Ray:

    {"time": "2026-01-31T12:00:05+00:00", "pid": 4711, "host": "n1", "status": "running", "step": 12, "steps": 40,
     "phase": "train", "phase_since": "2026-01-31T12:00:01+00:00", "last_step_seconds": 8.1,
     "last_checkpoint_step": 10, "policy_version": 11}

The file is replaced atomically every few seconds. An old `time` means that the process is dead or its disk hangs; an
old `phase_since` with a recent `time` means that the run makes no progress.
"""

from __future__ import annotations

import json
import math
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from rich.console import Console
from rich.status import Status
from rich.text import Text

from megarl.cluster.process.atomic_files import atomic_write
from megarl.errors import DataError, LostLockError
from megarl.text import escape_controls


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """The results of a run that has ended regularly."""

    eval_before: float | None
    """Mean of the evaluated reward term before the first step; None without held-out data."""
    eval_after: float | None
    """The same after the last step; None if the run was stopped early and no evaluation was due."""
    steps: int
    """Completed steps of the algorithm, one batch of prompts each."""
    steps_planned: int
    """Configured number of steps; more than `steps` if the run was stopped early."""
    seconds_total: float
    seconds_by_phase: Mapping[str, float]
    tokens_per_second: float
    """Tokens of the trained trajectories, including prompts, divided by the time of all steps."""
    weight_sync_bytes: int
    """Bytes of weights sent to the engines in all steps."""
    logprob_abs_max: float | None
    """Maximum absolute difference of a token's log-probability between engine and trainer at equal weights."""

    def write(self, path: str | Path) -> None:
        """Write the summary as a JSON object, atomically; numbers that are not finite become null."""
        text = json.dumps(_finite(asdict(self)), indent=2, allow_nan=False)
        with atomic_write(Path(path)) as draft:
            draft.write_text(text + "\n")


def _finite(value: Any) -> Any:
    match value:
        case float():
            return value if math.isfinite(value) else None
        case Mapping():
            return {k: _finite(v) for k, v in value.items()}
        case _:
            return value


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSummary:
    """The figures of one finished step that its progress line shows; None is left out."""

    step: int
    """Number of the step, from 1."""
    seconds: float
    reward: float | None = None
    """Mean reward of the step's trajectories."""
    loss: float | None = None
    evaluation: float | None = None
    """Evaluation score, if the step ended with an evaluation."""
    tokens_per_second: float | None = None
    weight_sync_seconds: float | None = None
    weight_sync_bytes: int | None = None

    @classmethod
    def of(cls, metrics: Mapping[str, float], *, step: int) -> StepSummary:
        """Return the figures of a step of reinforcement learning with these logged metrics."""
        sync_bytes = metrics.get("weight_sync/bytes")
        return cls(
            step=step,
            seconds=metrics["time/step_seconds"],
            reward=metrics.get("reward/mean"),
            loss=metrics.get("loss"),
            tokens_per_second=metrics["tokens_per_second"] or None,
            weight_sync_seconds=metrics.get("weight_sync/seconds"),
            weight_sync_bytes=None if sync_bytes is None else int(sync_bytes),
        )

    def text(self, num_steps: int) -> str:
        """Return the progress line, without markup."""
        parts = [f"step {self.step:>{len(str(num_steps))}}/{num_steps}"]
        if self.reward is not None:
            parts.append(f"reward {self.reward:.3f}")
        if self.loss is not None:
            parts.append(f"loss {self.loss:.4f}")
        if self.evaluation is not None:
            parts.append(f"eval {self.evaluation:.3f}")
        if self.tokens_per_second is not None:
            parts.append(f"{format_si(self.tokens_per_second)}tok/s")
        if self.weight_sync_seconds is not None:
            sync = f"sync {self.weight_sync_seconds:.2f} s"
            parts.append(sync if self.weight_sync_bytes is None else f"{sync} {format_si(self.weight_sync_bytes)}B")
        parts.append(f"{self.seconds:.1f} s")
        return "  ".join(parts)


class RunProgress:
    """Prints step summaries; on a terminal, a spinner below them names the current phase.

        with RunProgress(num_steps=40) as progress:
            progress.phase(1, "rollout")
            progress.done(StepSummary(step=1, seconds=5.1, reward=0.5))

    If the output is not a terminal (a log file, a pipe), phases are not shown and the lines are plain.
    """

    def __init__(self, num_steps: int, console: Console | None = None) -> None:
        self._num_steps = num_steps
        self._console = console or Console()
        self._status: Status | None = None

    def phase(self, step: int, name: str) -> None:
        """Show that step `step` is in phase `name`."""
        if not self._console.is_terminal:
            return
        text = Text(f"step {step}/{self._num_steps} {name}")
        if self._status is None:
            self._status = self._console.status(text)
            self._status.start()
        else:
            self._status.update(text)

    def done(self, line: StepSummary) -> None:
        """Print the line of a finished step."""
        self.notify(line.text(self._num_steps))

    def notify(self, text: str) -> None:
        """Print `text` on lines of its own, without markup; other characters that a terminal obeys are escaped."""
        lines = "\n".join(map(escape_controls, text.split("\n")))
        self._console.print(lines, markup=False, highlight=self._console.is_terminal, soft_wrap=True)

    def close(self) -> None:
        """Remove the spinner from the terminal."""
        if self._status is not None:
            self._status.stop()
            self._status = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def format_si(number: float) -> str:
    """Return `number` with three digits and an SI prefix, to be followed by a unit: "2.05 M", "512 "."""
    for prefix in ("", "k", "M", "G", "T"):
        if abs(number) < 999.5 or prefix == "T":
            break
        number /= 1000
    digits = 0 if prefix == "" or abs(number) >= 99.95 else 1 if abs(number) >= 9.995 else 2
    return f"{number:.{digits}f} {prefix}"


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


HEARTBEAT_FILE = "heartbeat.json"

RunStatus = Literal["starting", "running", "recovering", "ended", "failed"]

HEARTBEAT_SECONDS = 5.0
MIN_HEARTBEAT_SECONDS = 0.5
"""Minimum time between two writes, however short phases are."""

CLOSE_TIMEOUT_SECONDS = 5.0
"""How long `close` waits for the last write: the disk may hang."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeartbeatRecord:
    """The fields of the heartbeat file."""

    time: str
    """When the file was written: ISO 8601, UTC."""
    pid: int
    """Process id of the writer, which runs the algorithm."""
    host: str
    status: RunStatus
    """State of the run; `ended` and `failed` are final."""
    step: int
    """The current step; 0 before the first."""
    steps: int
    """Number of steps that the run is configured for."""
    phase: str
    """The phase that began last; empty before the first."""
    phase_since: str
    """When the phase began: ISO 8601, UTC."""
    last_step_seconds: float | None = None
    """Duration of the last finished step."""
    last_checkpoint_step: int | None = None
    """Step of the newest complete checkpoint."""
    policy_version: int | None = None
    """Version of the weights in the engines."""


class Heartbeat:
    """Writes the heartbeat file of a run from a separate thread, so that callers never wait for the disk."""

    def __init__(
        self,
        path: Path,
        *,
        steps: int,
        notify: Callable[[str], None],
        interval_seconds: float = HEARTBEAT_SECONDS,
        require_lock: Callable[[], None] = lambda: None,
    ) -> None:
        """Args:
        notify: gets a message, once, if the file cannot be written; the run continues.
        require_lock: called before each write; if it raises LostLockError, another run owns the file, and this one
            writes it no more.
        """
        self._path, self._notify, self._interval, self._require_lock = path, notify, interval_seconds, require_lock
        now = _now()
        self._record = HeartbeatRecord(
            time=now,
            pid=os.getpid(),
            host=socket.gethostname(),
            status="starting",
            step=0,
            steps=steps,
            phase="",
            phase_since=now,
        )
        self._lock, self._changed, self._closed = threading.Lock(), threading.Event(), threading.Event()
        self._has_reported = False
        self._thread = threading.Thread(target=self._write_loop, name="heartbeat", daemon=True)
        self._thread.start()

    @property
    def is_writing(self) -> bool:
        """Whether the thread still writes: the heartbeat is not closed, and no other run has the folder."""
        return self._thread.is_alive()

    def phase(self, step: int, name: str) -> None:
        """Record that phase `name` of step `step` has begun."""
        with self._lock:
            self._record = replace(self._record, step=step, phase=name, phase_since=_now())
        self._changed.set()

    def status(self, status: RunStatus) -> None:
        """Record the state of the run."""
        with self._lock:
            self._record = replace(self._record, status=status)
        self._changed.set()

    def finished_step(self, seconds: float) -> None:
        """Record that the current step has finished, after `seconds`."""
        with self._lock:
            self._record = replace(self._record, last_step_seconds=seconds)

    def saved(self, step: int) -> None:
        """Record that the checkpoint of `step` is complete."""
        with self._lock:
            self._record = replace(self._record, last_checkpoint_step=step)

    def pushed(self, policy_version: int) -> None:
        """Record that the engines have the weights `policy_version`."""
        with self._lock:
            self._record = replace(self._record, policy_version=policy_version)

    def close(self, status: Literal["ended", "failed"]) -> None:
        """Write the final status and stop the thread; a second call does nothing."""
        if self._closed.is_set():
            return
        self.status(status)
        self._closed.set()
        self._changed.set()
        self._thread.join(CLOSE_TIMEOUT_SECONDS)

    def _write_loop(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._closed.is_set()
            self._changed.clear()
            if not self._write():
                return
            if not self._closed.wait(min(MIN_HEARTBEAT_SECONDS, self._interval)):
                self._changed.wait(max(0.0, self._interval - MIN_HEARTBEAT_SECONDS))

    def _write(self) -> bool:
        """Write the file; return False if this run must not write it any more."""
        with self._lock:
            record = replace(self._record, time=_now())
        try:
            self._require_lock()
            with atomic_write(self._path) as draft:
                draft.write_text(json.dumps(asdict(record)) + "\n")
        except LostLockError:
            return False  # the run's own thread raises the error at its next write
        except (OSError, DataError) as error:
            if not self._has_reported:
                self._has_reported = True
                self._notify(f"{self._path} cannot be written, so monitors cannot see the state of the run: {error}")
        return True


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
