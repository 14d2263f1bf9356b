"""Calls in flight, reported as they end: waiting costs as much for one of a thousand calls as for one of two."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable
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


class JointCompletion:
    """Calls of which all have to end: a thread that waits sleeps until the last one has ended, or one has failed."""

    def __init__(self, refs: Iterable[Any], watched: Iterable[Any] = ()) -> None:
        """`watched`: further calls, which need not end, but whose failure ends the wait as well."""
        self._required, self._watched = dict.fromkeys(refs), dict.fromkeys(watched)
        self._ended: dict[Any, Future[Any]] = {}
        self._num_left, self._is_over = len(self._required), threading.Event()
        self._lock = threading.Lock()
        for ref in (*self._required, *self._watched):
            ref.future().add_done_callback(lambda future, ref=ref: self._end(ref, future))

    def _end(self, ref: Any, future: Future[Any]) -> None:
        with self._lock:  # a call that has ended already is reported by the thread that asks for it
            self._ended[ref] = future
            self._num_left -= ref in self._required
            if not self._num_left or future.exception() is not None:
                self._is_over.set()

    def wait(self, timeout: float | None) -> bool:
        """Return whether all calls have ended or one has failed; waits for it for at most `timeout` seconds."""
        return self._is_over.wait(timeout)

    def separate(self) -> tuple[dict[Any, Future[Any]], list[Any]]:
        """Return the calls that have ended, by reference, with their results or errors, and those that have not."""
        with self._lock:
            ended = dict(self._ended)
        return ended, [ref for ref in (*self._required, *self._watched) if ref not in ended]
