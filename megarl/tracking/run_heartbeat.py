"""`heartbeat.json` of a run folder: a sign of life for monitors that do not use Ray.

    {"time": "2026-01-31T12:00:05+00:00", "pid": 4711, "host": "n1", "status": "running", "step": 12, "steps": 40,
     "phase": "train", "phase_since": "2026-01-31T12:00:01+00:00", "last_step_seconds": 8.1,
     "last_checkpoint_step": 10, "policy_version": 11}

The file is replaced atomically every few seconds. An old `time` means that the process is dead or its disk hangs; an
old `phase_since` with a recent `time` means that the run makes no progress.
"""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from megarl.cluster.process.atomic_files import atomic_write
from megarl.errors import DataError, LostLockError

HEARTBEAT_FILE = "heartbeat.json"

Status = Literal["starting", "running", "recovering", "ended", "failed"]

INTERVAL_SECONDS = 5.0
MIN_INTERVAL_SECONDS = 0.5
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
    status: Status
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
        interval_seconds: float = INTERVAL_SECONDS,
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

    def status(self, status: Status) -> None:
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
            if not self._closed.wait(min(MIN_INTERVAL_SECONDS, self._interval)):
                self._changed.wait(max(0.0, self._interval - MIN_INTERVAL_SECONDS))

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
