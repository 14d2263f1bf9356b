"""Time limits that do not count the time for which the engines are paused for new weights."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any, Protocol


class _Timer(Protocol):
    """What a `RequestClock` needs of a timer of the event loop."""

    def when(self) -> float | None: ...
    def expired(self) -> bool: ...
    def reschedule(self, when: float | None) -> None: ...


class RequestClock:
    """A clock of one event loop that can be paused, and the timeouts that run on it."""

    def __init__(self) -> None:
        self._remaining: dict[_Timer, float] = {}
        """Seconds left to each timeout when the clock was paused; while it runs, empty."""
        self._running: set[_Timer] = set()
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
            self.add(timeout, seconds)
            try:
                yield
            finally:
                self.discard(timeout)

    async def wait(self, tasks: Iterable[asyncio.Future[Any]], seconds: float) -> None:
        """Wait until all of these futures are done, at most for `seconds` of this clock."""
        with contextlib.suppress(TimeoutError):
            async with self.timeout(seconds):
                await asyncio.wait(tasks)

    def add(self, timer: _Timer, seconds: float) -> None:
        """Let a timer expire after `seconds` of this clock."""
        if self._is_paused:
            self._remaining[timer] = seconds
        else:
            self._start(timer, seconds)

    def extend(self, timer: _Timer, seconds: float) -> None:
        """Let a timer that was added expire so much later."""
        if timer in self._remaining:
            self._remaining[timer] += seconds
        elif (end := timer.when()) is not None:
            timer.reschedule(end + seconds)

    def discard(self, timer: _Timer) -> None:
        """Forget a timer, which keeps the time at which it expires if the clock runs."""
        self._running.discard(timer)
        self._remaining.pop(timer, None)

    def pause(self) -> None:
        """Stop the timers; no-op if the clock is paused."""
        now = asyncio.get_running_loop().time()
        if not self._is_paused:
            self._paused_at = now
        self._is_paused = True
        for timer in self._running:
            end = timer.when()
            if end is not None and not timer.expired():
                self._remaining[timer] = end - now
                timer.reschedule(None)
        self._running.clear()

    def resume(self) -> None:
        """Let the timers run on with the time that was left to them; no-op if the clock runs."""
        if self._is_paused:
            self._paused_seconds += asyncio.get_running_loop().time() - self._paused_at
        self._is_paused = False
        remaining, self._remaining = self._remaining, {}
        for timer, seconds in remaining.items():
            self._start(timer, seconds)

    def _start(self, timer: _Timer, seconds: float) -> None:
        timer.reschedule(asyncio.get_running_loop().time() + seconds)
        self._running.add(timer)


class ClockTimer:
    """Calls a function once some seconds of a `RequestClock` have passed."""

    def __init__(self, clock: RequestClock, function: Callable[[], None]) -> None:
        self._clock, self._function = clock, function
        self._handle: asyncio.TimerHandle | None = None
        self.is_running = False
        """Whether it has been started and has neither been stopped nor called the function."""

    def start(self, seconds: float) -> None:
        """Call the function after `seconds`."""
        self.stop()
        self.is_running = True
        self._clock.add(self, seconds)

    def extend(self, seconds: float) -> None:
        """Call the function so much later; no-op unless the timer runs."""
        if self.is_running:
            self._clock.extend(self, seconds)

    def stop(self) -> None:
        """Do not call the function."""
        self.is_running = False
        self._clock.discard(self)
        self.reschedule(None)

    def when(self) -> float | None:
        """Return the time of the event loop at which the function is called; None while that is not known."""
        return None if self._handle is None else self._handle.when()

    def expired(self) -> bool:
        """Return False: a timer that has expired has no `when`."""
        return False

    def reschedule(self, when: float | None) -> None:
        """Call the function at another time of the event loop, or not; for `RequestClock`."""
        if self._handle is not None:
            self._handle.cancel()
        self._handle = None if when is None else asyncio.get_running_loop().call_at(when, self._expire)

    def _expire(self) -> None:
        self.stop()
        self._function()


class TimeLimit:
    """The time limit of an episode: it counts from the first token that is known of the episode's first request.

    It ends requests and asks the agent to end; it raises nothing. The time before the first token of a request that is
    sent again, because its engine was lost or made no progress, does not count either.
    """

    def __init__(self, clock: RequestClock, seconds: float) -> None:
        """Create a limit that does not run."""
        self.clock, self.seconds = clock, seconds
        self.reached: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done once the limit is reached."""
        self.num_requests = 0
        """Number of requests in flight."""
        self._timer = ClockTimer(clock, self._reach)

    @property
    def is_reached(self) -> bool:
        """Whether the limit is reached."""
        return self.reached.done()

    def start(self, seconds: float | None = None) -> None:
        """Begin to count; no-op if the limit does already. `seconds`: until it is reached; None: all of them."""
        if not self._timer.is_running and not self.is_reached:
            self._timer.start(self.seconds if seconds is None else seconds)

    def stop(self) -> None:
        """Do not count until the next `start`, after which all seconds are left again."""
        self._timer.stop()

    def leave_out(self, seconds: float) -> None:
        """Do not count a time for which a request of the episode has waited in the queue, if it was the only one."""
        if self.num_requests == 1:
            self._timer.extend(seconds)

    def _reach(self) -> None:
        self.reached.set_result(None)
