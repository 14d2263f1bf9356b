"""Time limits of the product that no test reaches by chance, and clocks with which tests reach them on purpose."""

import asyncio
import functools
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any, TypeVar

from tests.time_limits import UNREACHED_SECONDS
from tests.virtual_time import run_in_virtual_time

T = TypeVar("T")

ENGINE_LIMITS = dict.fromkeys(
    ("start_timeout_seconds", "round_timeout_seconds", "answer_timeout_seconds"), UNREACHED_SECONDS
)
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


def run_in_event_loop[T](main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on an event loop whose clock can jump, whatever loop a package has chosen for this process."""
    with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:
        return runner.run(main)


def _run_by(run: Callable[[Coroutine[Any, Any, None]], None]) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    def decorate(test: Callable[..., Any]) -> Callable[..., None]:
        @functools.wraps(test)
        def run_test(*args: Any, **kwargs: Any) -> None:
            run(test(*args, **kwargs))

        return run_test

    return decorate


in_virtual_time = _run_by(run_in_virtual_time)
"""Decorator of an asynchronous test: runs it on an event loop whose clock jumps to the next timer."""

in_event_loop = _run_by(run_in_event_loop)
"""Decorator of an asynchronous test: runs it on an event loop whose clock can jump."""
