"""Detects rollout workers whose process hangs.

A busy worker still answers pings, because a thread of its own does. How long agents and rewards may take is limited
elsewhere.
"""

from __future__ import annotations

import time

import ray

from megarl.supervision.engine_supervisor import POLL_INTERVAL_SECONDS

LIVENESS_GROUP = "liveness"
"""Concurrency group of the worker's actor in which pings are answered."""


class WorkerLivenessProbe:
    """Liveness of one rollout worker: a Ray actor (an AsyncWorkerHost) with the concurrency group `LIVENESS_GROUP`."""

    def __init__(self, worker: ray.actor.ActorHandle, timeout_seconds: float) -> None:
        self._worker, self._timeout = worker, timeout_seconds
        self._ping_interval = min(timeout_seconds / 4, 5.0)
        self._last_poll = self._last_answer = time.monotonic()
        self._silent_seconds = 0.0
        self._pending_ping: ray.ObjectRef | None = None

    def is_hung(self) -> bool:
        """Return whether the worker has not answered for `timeout_seconds`; a worker that has died is not hung.

        Only time during which this method is called regularly counts towards the timeout.
        """
        now = time.monotonic()
        since, self._last_poll = now - self._last_poll, now
        if self._pending_ping is None:
            if now - self._last_answer >= self._ping_interval:
                self._pending_ping = self._worker.process_info.options(concurrency_group=LIVENESS_GROUP).remote()
                self._silent_seconds = 0.0
            return False
        if ray.wait([self._pending_ping], timeout=0)[0]:
            self._pending_ping, self._last_answer = None, now
            return False
        self._silent_seconds += min(since, 2 * POLL_INTERVAL_SECONDS)
        return self._silent_seconds > self._timeout
