"""Detects processes that hang: they are pinged, and do not answer.

A busy rollout worker still answers pings, because a thread of its own does. How long agents and rewards may take is
limited elsewhere.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import ray

POLL_INTERVAL_SECONDS = 1.0
"""Longest time between two checks for processes that do not answer."""

GATHER_SECONDS = 0.2
"""After a loss, how long to wait for the reports of processes that were lost with it, as those of one node are."""

LIVENESS_GROUP = "liveness"
"""Concurrency group of a rollout worker's actor in which pings are answered."""


class PingTimer:
    """Pings one process at intervals and measures how long it has not answered."""

    def __init__(self, send: Callable[[], ray.ObjectRef], timeout_seconds: float) -> None:
        """`send`: sends a ping and returns the reference to its answer."""
        self._send, self._timeout = send, timeout_seconds
        self._interval = timeout_seconds / 4  # pings of a thousand engines are most of what their supervision costs
        self._last_poll = self._last_answer = time.monotonic()
        self._silent_seconds = 0.0
        self.pending: ray.ObjectRef | None = None
        """The ping that has not been answered yet."""

    def ping(self) -> None:
        """Ping the process now, unless a ping is pending, and restart the timeout."""
        self._silent_seconds, self._last_poll = 0.0, time.monotonic()
        if self.pending is None:
            self.pending = self._send()

    def mark_answered(self) -> None:
        """Record that the process has answered."""
        self.pending, self._last_answer, self._silent_seconds = None, time.monotonic(), 0.0

    def is_overdue(self) -> bool:
        """Send a ping if one is due; return whether the process has not answered for `timeout_seconds`.

        Only time during which this method is called regularly counts towards the timeout.
        """
        now = time.monotonic()
        since, self._last_poll = now - self._last_poll, now
        if self.pending is None:
            if now - self._last_answer >= self._interval:
                self.pending = self._send()
            return False
        self._silent_seconds += min(since, 2 * POLL_INTERVAL_SECONDS)
        return self._silent_seconds > self._timeout


class WorkerLivenessProbe:
    """Liveness of one rollout worker: a Ray actor (an AsyncWorkerHost) with the concurrency group `LIVENESS_GROUP`."""

    def __init__(self, worker: ray.actor.ActorHandle, timeout_seconds: float) -> None:
        ping = worker.process_info.options(concurrency_group=LIVENESS_GROUP)
        self._timer = PingTimer(ping.remote, timeout_seconds)

    @staticmethod
    def find_hung(probes: Mapping[int, WorkerLivenessProbe]) -> list[int]:
        """Return the workers that have not answered for `timeout_seconds`; one that has died is not hung."""
        pending = [timer.pending for probe in probes.values() if (timer := probe._timer).pending is not None]
        answered = set(ray.wait(pending, num_returns=len(pending), timeout=0)[0]) if pending else set()
        for probe in probes.values():
            if probe._timer.pending in answered:
                probe._timer.mark_answered()
        return [worker for worker, probe in probes.items() if probe._timer.is_overdue()]
