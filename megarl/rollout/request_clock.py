"""Timeouts of requests that stop counting while the engines are paused for new weights."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


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
    async def timeout(self, seconds: float) -> AsyncIterator[None]:
        """Cancel the body and raise TimeoutError once it has taken `seconds`, pauses of the clock not counted."""
        async with asyncio.timeout(None) as timeout:
            if self._is_paused:
                self._remaining[timeout] = seconds
            else:
                self._start(timeout, seconds)
            try:
                yield
            finally:
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
