"""An event loop whose clock jumps to the next timer as soon as nothing else is left to do."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any


class _JumpingSelector(selectors.DefaultSelector):
    """Instead of waiting for a timeout, advances `now` by it."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        assert timeout is not None, "the coroutine waits for something that no timer brings about"
        self.now += timeout
        return super().select(0)


def run_in_virtual_time[T](coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that waits for timers only; `loop.time()` begins at 0."""
    selector = _JumpingSelector()

    def make_loop() -> asyncio.AbstractEventLoop:
        loop = asyncio.SelectorEventLoop(selector)
        loop.time = lambda: selector.now  # type: ignore[method-assign]
        return loop

    with asyncio.Runner(loop_factory=make_loop) as runner:
        return runner.run(coroutine)
