"""Calls in flight, reported as they end: waiting costs as much for one of a thousand calls as for one of two."""

from __future__ import annotations

import queue
from concurrent.futures import Future
from typing import Any


class Completions:
    """The calls of one waiter. Ray reports each as it ends; nothing is polled."""

    def __init__(self) -> None:
        self._ended: queue.SimpleQueue[tuple[Any, Future[Any]]] = queue.SimpleQueue()

    def add(self, ref: Any) -> None:
        """Watch the call of a Ray reference, whose value is fetched to this process."""
        ref.future().add_done_callback(lambda future: self._ended.put((ref, future)))

    def wait(self, timeout: float) -> list[tuple[Any, Future[Any]]]:
        """Return the calls that have ended since the last call of this, in their order, with their results or errors.

        Blocks until there is one, for at most `timeout` seconds.
        """
        try:
            ended = [self._ended.get(timeout=timeout)]
        except queue.Empty:
            return []
        while not self._ended.empty():
            ended.append(self._ended.get())
        return ended
