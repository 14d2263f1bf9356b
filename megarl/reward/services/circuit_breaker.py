"""Bounds the number of requests to a service, and holds them back while it is down.

closed  -- several failures in a row -->  open  -- cooldown -->  half open: one request tries the service
^                                        ^                          |
|                                        '------ it fails ----------|
'------------------------ it succeeds ------------------------------'
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from megarl.config.reward_services import BreakerConfig


class CircuitOpenError(Exception):
    """The request was not sent, because the service was down before, and still is."""


class CircuitBreaker:
    """The circuit breaker of one service, for the requests of one event loop."""

    def __init__(self, config: BreakerConfig, max_concurrent_requests: int) -> None:
        self._config = config
        self._slots = asyncio.Semaphore(max_concurrent_requests)
        self._num_failures = 0
        """Number of consecutive failures."""
        self._opened_at: float | None = None
        """Time of the event loop at which requests were held back, None while they are not."""
        self._trial: asyncio.Future[bool | None] | None = None
        """Whether the request that tries the service succeeds, None if it is canceled; None if there is no request."""

    @property
    def is_open(self) -> bool:
        """Whether requests are held back."""
        return self._opened_at is not None

    @asynccontextmanager
    async def request(self) -> AsyncIterator[None]:
        """Wait until the body may send a request; an exception of the body other than a cancellation is a failure.

        A request that is held back takes no slot, so that all of them wait for the same trial.

        Raises:
            CircuitOpenError: the request that has tried the service after the cooldown failed.
        """
        is_trial = has_slot = False
        try:
            while not has_slot:
                is_trial = await self._wait()
                await self._slots.acquire()
                has_slot = is_trial or self._opened_at is None
                if not has_slot:
                    self._slots.release()
            yield
        except CircuitOpenError:
            raise
        except asyncio.CancelledError:
            self._end_trial(is_trial, succeeded=None)
            raise
        except BaseException:
            self._num_failures += 1
            if is_trial or (self._opened_at is None and self._num_failures >= self._config.failures):
                self._opened_at = asyncio.get_running_loop().time()
            self._end_trial(is_trial, succeeded=False)
            raise
        else:
            self._num_failures, self._opened_at = 0, None
            self._end_trial(is_trial, succeeded=True)
        finally:
            if has_slot:
                self._slots.release()

    async def _wait(self) -> bool:
        """Wait while requests are held back; return whether this one tries the service."""
        loop = asyncio.get_running_loop()
        while self._opened_at is not None:
            opened_at, trial = self._opened_at, self._trial
            remaining = opened_at + self._config.cooldown_seconds - loop.time()
            if remaining > 0:
                await asyncio.sleep(remaining)
                if self._opened_at not in (None, opened_at):
                    raise CircuitOpenError
            elif trial is None:
                self._trial = loop.create_future()
                return True
            elif await asyncio.shield(trial) is False:
                raise CircuitOpenError
        return False

    def _end_trial(self, is_trial: bool, *, succeeded: bool | None) -> None:
        if is_trial and self._trial is not None:
            trial, self._trial = self._trial, None
            trial.set_result(succeeded)
