"""`heartbeat.json` of a run folder: a sign of life for monitors that know nothing of Ray.

    {"time": "2026-01-31T12:00:05+00:00", "pid": 4711, "host": "n1", "status": "running", "step": 12, "steps": 40,
     "phase": "train", "phase_since": "2026-01-31T12:00:01+00:00", "last_step_seconds": 8.1,
     "last_checkpoint_step": 10, "policy_version": 11}

It is replaced as a whole, so that a reader never sees half of it, every few seconds. An old `time` says that the
process is gone or its disk hangs; an old `phase_since` with a new `time`, that the run does not get on.
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

from megarl.process.atomic_files import replaced

HEARTBEAT_FILE = "heartbeat.json"

Status = Literal["starting", "running", "recovering", "ended", "failed"]

INTERVAL_SECONDS = 5.0
LEAST_SECONDS = 0.5
"""Between two writes, however short phases are."""

LAST_WRITE_SECONDS = 5.0
"""How long the end of a run waits for the last one: a disk may hang."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Beat:
    """What the file says."""

    time: str
    """When it was written: ISO 8601, UTC."""
    pid: int
    """Of the process that writes it, which runs the algorithm."""
    host: str
    status: Status
    """`ended` and `failed` are the last."""
    step: int
    """The step under way; 0 before the first."""
    steps: int
    """As many as the run is to have."""
    phase: str
    """The newest that was begun; empty before the first."""
    phase_since: str
    """When it began: ISO 8601, UTC."""
    last_step_seconds: float | None = None
    """How long the last finished step took."""
    last_checkpoint_step: int | None = None
    """The step after which the newest whole checkpoint was taken."""
    policy_version: int | None = None
    """Of the weights that the engines have."""


class Heartbeat:
    """Keeps the file of a run; its callers never wait for the disk, since a thread of its own writes."""

    def __init__(
        self, path: Path, *, steps: int, say: Callable[[str], None], interval_seconds: float = INTERVAL_SECONDS
    ) -> None:
        """`say` tells the user, once, that the file cannot be written; the run goes on."""
        self._path, self._say, self._interval = path, say, interval_seconds
        now = _now()
        self._beat = Beat(
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
        self._told = False
        self._thread = threading.Thread(target=self._write_on, name="heartbeat", daemon=True)
        self._thread.start()

    def phase(self, step: int, name: str) -> None:
        """The run is now in phase `name` of step `step`."""
        with self._lock:
            self._beat = replace(self._beat, step=step, phase=name, phase_since=_now())
        self._changed.set()

    def status(self, status: Status) -> None:
        """What the run does as a whole."""
        with self._lock:
            self._beat = replace(self._beat, status=status)
        self._changed.set()

    def finished_step(self, seconds: float) -> None:
        """The step under way is over, and took so long."""
        with self._lock:
            self._beat = replace(self._beat, last_step_seconds=seconds)

    def saved(self, step: int) -> None:
        """A checkpoint of the state after `step` is whole."""
        with self._lock:
            self._beat = replace(self._beat, last_checkpoint_step=step)

    def pushed(self, policy_version: int) -> None:
        """The engines have these weights."""
        with self._lock:
            self._beat = replace(self._beat, policy_version=policy_version)

    def close(self, status: Literal["ended", "failed"]) -> None:
        """Write the last state; a second time does nothing."""
        if self._closed.is_set():
            return
        self.status(status)
        self._closed.set()
        self._changed.set()
        self._thread.join(LAST_WRITE_SECONDS)

    def _write_on(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._closed.is_set()
            self._changed.clear()
            self._write()
            if not self._closed.wait(min(LEAST_SECONDS, self._interval)):
                self._changed.wait(max(0.0, self._interval - LEAST_SECONDS))

    def _write(self) -> None:
        with self._lock:
            beat = replace(self._beat, time=_now())
        try:
            with replaced(self._path) as draft:
                draft.write_text(json.dumps(asdict(beat)) + "\n")
        except OSError as error:
            if not self._told:
                self._told = True
                self._say(f"{self._path} cannot be written and does not tell how the run is: {error}")


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
