"""Collects items of several callers into batches, which are sent together."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from megarl.workers.shared_call import call_for_all


class RequestBatcher[T, R]:
    """Sends items in batches: a full one at once, others after a short wait.

    A caller that is canceled does not cancel the request, which has items of others.
    """

    def __init__(
        self, send: Callable[[Sequence[T]], Awaitable[Sequence[R]]], *, max_size: int, wait_seconds: float
    ) -> None:
        """Args:
        send: returns one result per item, in order; its error is raised in each caller of the batch.
        max_size: largest number of items of a batch.
        wait_seconds: longest time that an item waits for others.
        """
        self._send, self._max_size, self._wait_seconds = send, max_size, wait_seconds
        self._waiting: list[tuple[T, asyncio.Future[R]]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._requests: set[asyncio.Task[None]] = set()

    async def submit(self, item: T) -> R:
        """Return the result of the item."""
        loop = asyncio.get_running_loop()
        result: asyncio.Future[R] = loop.create_future()
        self._waiting.append((item, result))
        if len(self._waiting) >= self._max_size:
            self._flush()
        elif self._timer is None:
            self._timer = loop.call_later(self._wait_seconds, self._flush)
        return await result

    async def close(self) -> None:
        """Cancel the requests in flight."""
        if self._timer is not None:
            self._timer.cancel()
        for request in self._requests:
            request.cancel()
        await asyncio.gather(*self._requests, return_exceptions=True)

    def _flush(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        batch = [(item, result) for item, result in self._waiting if not result.done()]  # others were canceled
        self._waiting = []
        if batch:
            request = asyncio.create_task(call_for_all(self._send, batch))
            self._requests.add(request)
            request.add_done_callback(self._requests.discard)
