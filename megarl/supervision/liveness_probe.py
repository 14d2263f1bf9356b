"""Whether a rollout worker's process stands still.

One that is busy answers, since a thread of its own does: what agents and rewards take is bounded elsewhere.
"""

from __future__ import annotations

import time
from typing import Any

import ray

from megarl.supervision.engine_supervisor import LOOK_SECONDS

SIGNS = "signs"
"""The concurrency group of the actor that answers."""


class WorkerPulse:
    """The signs of life of one worker, a Ray actor (an AsyncShell) that has the concurrency group `SIGNS`."""

    def __init__(self, worker: Any, stall_seconds: float) -> None:
        self._worker, self._limit = worker, stall_seconds
        self._pause = min(stall_seconds / 4, 5.0)
        self._looked = self._answered = time.monotonic()
        self._silent = 0.0
        self._question: Any = None

    def stands_still(self) -> bool:
        """Whether it has not answered for `stall_seconds`; one that has died does not stand still.

        Only time counts in which it was looked.
        """
        now = time.monotonic()
        since, self._looked = now - self._looked, now
        if self._question is None:
            if now - self._answered >= self._pause:
                self._question = self._worker.place.options(concurrency_group=SIGNS).remote()
                self._silent = 0.0
            return False
        if ray.wait([self._question], timeout=0)[0]:
            self._question, self._answered = None, now
            return False
        self._silent += min(since, 2 * LOOK_SECONDS)
        return self._silent > self._limit
