"""Time limits of the product that no test reaches by chance, and clocks with which tests reach them on purpose."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any, ParamSpec

from tests.time_limits import UNREACHED_SECONDS
from tests.virtual_time import run_in_virtual_time

P = ParamSpec("P")

ENGINE_LIMITS = {
    "start_timeout_seconds": UNREACHED_SECONDS,
    "round_timeout_seconds": UNREACHED_SECONDS,
    "answer_timeout_seconds": UNREACHED_SECONDS,
}
"""Fields of `EngineSpec` with time limits, none of which is reached."""


def jump(seconds: float) -> None:
    """Set the clock of the running event loop forward; timers that are due then fire in its next iteration."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, asyncio.SelectorEventLoop), "the clock of other loops does not jump"
    before = loop.time
    loop.time = lambda: before() + seconds  # type: ignore[method-assign]


async def iterate(count: int = 50) -> None:
    """Let the event loop run for so many iterations."""
    for _ in range(count):
        await asyncio.sleep(0)


def _loop_time() -> float:
    return asyncio.get_running_loop().time()


LOOP_CLOCK = SimpleNamespace(monotonic=_loop_time, perf_counter=_loop_time)
"""Stands for the module `time`: the clock of the running event loop."""


def in_virtual_time[**P](test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Run an asynchronous test on an event loop whose clock jumps to the next timer."""

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        run_in_virtual_time(test(*args, **kwargs))

    return run


def run_in_event_loop[T](main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on an event loop whose clock can jump, whatever loop a package has chosen for this process."""
    with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:
        return runner.run(main)


def in_event_loop[**P](test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Run an asynchronous test on an event loop whose clock can jump."""

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        run_in_event_loop(test(*args, **kwargs))

    return run
