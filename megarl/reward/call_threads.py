"""Runs blocking calls of reward terms in threads, with a timeout, so that the event loop stays responsive."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import cast

from megarl.errors import RewardError
from megarl.user_code import CallOutcome, outcome_of


class CallThreads:
    """Runs calls in daemon threads. A call that times out continues in its thread, because a thread cannot be killed.

    Not an executor: a hung call in an executor would keep the process from exiting.
    """

    def __init__(self, label: str, max_threads: int) -> None:
        """Create the runner; starts no thread.

        Args:
            label: name of the reward term, for error messages.
            max_threads: maximum number of concurrent calls, and of calls that continue after their timeout.
        """
        self._label = label
        self._max_threads = max_threads
        self._slots = asyncio.Semaphore(max_threads)
        self._num_hung = 0
        self._lock = threading.Lock()

    async def run(self, call: Callable[[], object], timeout_seconds: float | None) -> CallOutcome:
        """Return the outcome of `call()`; the time spent waiting for a thread does not count towards the timeout.

        Raises:
            TimeoutError: the call takes longer than `timeout_seconds`.
            RewardError: too many calls have not returned since their timeout.
        """
        async with self._slots:
            with self._lock:
                num_hung = self._num_hung
            if num_hung >= self._max_threads:
                raise RewardError(
                    f"{self._label}: {num_hung} calls are still running after their timeout; make the reward return, "
                    "for example with timeouts of its own, or write it as an async function, which can be cancelled"
                )
            return await asyncio.wait_for(self._run_in_thread(call), timeout_seconds)

    async def call[T](self, call: Callable[[], T], timeout_seconds: float | None) -> T:
        """Return what `call()` returns; raises what it raises, and as `run`."""
        value, error = await self.run(call, timeout_seconds)
        if error is not None:
            raise error
        return cast("T", value)

    async def _run_in_thread(self, call: Callable[[], object]) -> CallOutcome:
        loop = asyncio.get_running_loop()
        done: asyncio.Future[CallOutcome] = loop.create_future()
        is_returned = is_hung = False

        def work() -> None:
            nonlocal is_returned
            outcome = outcome_of(call)
            with self._lock:
                is_returned = True
                self._num_hung -= is_hung
            with suppress(RuntimeError):  # the loop may be closed
                loop.call_soon_threadsafe(lambda: None if done.done() else done.set_result(outcome))

        threading.Thread(target=work, name="reward", daemon=True).start()
        try:
            return await done
        except asyncio.CancelledError:
            with self._lock:
                is_hung = not is_returned
                self._num_hung += is_hung
            raise
