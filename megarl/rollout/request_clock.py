"""Timeouts of requests that stop counting while the engines are paused for new weights."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class RequestTimeout:
    """The timeout of one body on a `RequestClock`."""

    def __init__(self, clock: RequestClock, timeout: asyncio.Timeout, seconds: float) -> None:
        self._clock, self._timeout, self._seconds = clock, timeout, seconds
        self._is_stopped = False

    def stop(self) -> None:
        """Let the body take any time until `restart`."""
        self._is_stopped = True
        self._clock.discard(self._timeout)
        self._timeout.reschedule(None)

    def restart(self) -> None:
        """Give the body all of its seconds again, from now on; no-op if the timeout is not stopped."""
        if self._is_stopped:
            self._is_stopped = False
            self._clock.add(self._timeout, self._seconds)


class RequestClock:
    """A clock of one event loop that can be paused, and the timeouts that run on it."""

    def __init__(self) -> None:
        self._remaining: dict[asyncio.Timeout, float] = {}
        """Seconds left to each timeout when the clock was paused; while it runs, empty."""
        self._running: set[asyncio.Timeout] = set()
        self._is_paused = False
        self._paused_at = 0.0
        self._paused_seconds = 0.0
        """Duration of the pauses that are over."""

    def time(self) -> float:
        """Return the time in seconds, which does not advance during pauses; only differences have a meaning."""
        now = self._paused_at if self._is_paused else asyncio.get_running_loop().time()
        return now - self._paused_seconds

    @asynccontextmanager
    async def timeout(self, seconds: float) -> AsyncIterator[RequestTimeout]:
        """Cancel the body and raise TimeoutError once it has taken `seconds`, pauses of the clock not counted."""
        async with asyncio.timeout(None) as timeout:
            self.add(timeout, seconds)
            try:
                yield RequestTimeout(self, timeout, seconds)
            finally:
                self.discard(timeout)

    def add(self, timeout: asyncio.Timeout, seconds: float) -> None:
        """Let a timeout expire after `seconds` of this clock."""
        if self._is_paused:
            self._remaining[timeout] = seconds
        else:
            self._start(timeout, seconds)

    def discard(self, timeout: asyncio.Timeout) -> None:
        """Forget a timeout, which keeps the time at which it expires if the clock runs."""
        self._running.discard(timeout)
        self._remaining.pop(timeout, None)

    def pause(self) -> None:
        """Stop the timeouts; no-op if the clock is paused."""
        now = asyncio.get_running_loop().time()
        if not self._is_paused:
            self._paused_at = now
        self._is_paused = True
        for timeout in self._running:
            end = timeout.when()
            if end is not None and not timeout.expired():
                self._remaining[timeout] = end - now
                timeout.reschedule(None)
        self._running.clear()

    def resume(self) -> None:
        """Let the timeouts run on with the time that was left to them; no-op if the clock runs."""
        if self._is_paused:
            self._paused_seconds += asyncio.get_running_loop().time() - self._paused_at
        self._is_paused = False
        remaining, self._remaining = self._remaining, {}
        for timeout, seconds in remaining.items():
            self._start(timeout, seconds)

    def _start(self, timeout: asyncio.Timeout, seconds: float) -> None:
        timeout.reschedule(asyncio.get_running_loop().time() + seconds)
        self._running.add(timeout)
