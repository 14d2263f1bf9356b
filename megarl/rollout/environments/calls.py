"""Calls of an environment's methods with a time limit, async ones and blocking ones."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from megarl.errors import MegarlError
from megarl.rollout.request_clock import RequestClock
from megarl.text import describe_error
from megarl.user_code import outcome_of


class EnvironmentFailedError(MegarlError):
    """An environment raised an exception or took too long: its episode counts for nothing."""


async def call_environment(
    function: Callable[..., Any], *arguments: object, label: str, seconds: float, clock: RequestClock
) -> Any:
    """Return what the function returns, awaited if it is async; a blocking function runs in a thread of its own.

    Args:
        label: names the call in errors, `rollout.env.path (module:Name).step`.
        seconds: time limit; pauses of the clock do not count. A thread that exceeds it is abandoned: it cannot be
            ended, and does not keep the process alive.

    Raises:
        EnvironmentFailedError: the function raised an exception or exceeded the limit.
    """
    run = _await if inspect.iscoroutinefunction(function) else _run_in_thread
    task = asyncio.ensure_future(run(function, *arguments))
    try:
        async with clock.timeout(max(0.0, seconds)):
            await asyncio.wait([task])
    except TimeoutError as e:
        raise EnvironmentFailedError(f"{label} did not return within {seconds:.3g} s (rollout.env.max_seconds)") from e
    finally:
        if not task.done():
            task.cancel()
            await asyncio.sleep(0)  # lets it clean up; one that ignores its cancellation is not waited for
    error = asyncio.CancelledError() if task.cancelled() else task.exception()
    if error is not None:
        raise EnvironmentFailedError(f"{label} raised {describe_error(error)}") from error
    return task.result()


async def _await(function: Callable[..., Any], *arguments: object) -> Any:
    """Return what the async function returns. Its `exit()` is a failure of the call, and does not end the process."""
    try:
        return await function(*arguments)
    except (SystemExit, KeyboardInterrupt) as e:
        raise RuntimeError(describe_error(e)) from e


async def _run_in_thread(function: Callable[..., Any], *arguments: object) -> Any:
    """Return what the function returns. Its thread is not one of a pool, which calls that never return would fill."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def finish(value: Any, error: BaseException | None) -> None:
        if future.done():  # the caller has stopped waiting
            return
        if error is None:
            future.set_result(value)
        else:
            future.set_exception(error)

    def run() -> None:
        value, error = outcome_of(partial(function, *arguments))
        if error is not None and not isinstance(error, Exception):
            error = RuntimeError(describe_error(error))  # the future raises it, where SystemExit would end the process
        if not loop.is_closed():
            loop.call_soon_threadsafe(finish, value, error)

    threading.Thread(target=run, name="environment", daemon=True).start()
    return await future
