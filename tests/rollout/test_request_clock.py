"""Timeouts on a clock that pauses, on an event loop whose clock jumps to the next timer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from megarl.rollout.request_clock import RequestClock
from tests.rollout.clock import in_virtual_time


async def duration(clock: RequestClock, seconds: float, work: Callable[[], Awaitable[None]]) -> tuple[float, bool]:
    """Return when `work` ended under a timeout of the clock, and whether the timeout ended it."""
    try:
        async with clock.timeout(seconds):
            await work()
    except TimeoutError:
        return asyncio.get_running_loop().time(), True
    return asyncio.get_running_loop().time(), False


async def forever() -> None:
    await asyncio.Event().wait()


@in_virtual_time
async def test_it_is_a_plain_timeout_without_pauses() -> None:
    clock = RequestClock()
    assert await duration(clock, 5, forever) == (5, True)
    assert await duration(clock, 5, lambda: asyncio.sleep(4)) == (9, False)


@pytest.mark.parametrize(
    ("pauses", "end"),
    [
        pytest.param([(2, 9)], 12, id="one"),
        pytest.param([(1, 2), (4, 14)], 16, id="two"),
        pytest.param([(0, 3)], 8, id="from the start"),
        pytest.param([(2, 4), (4.5, 6)], 8.5, id="soon after each other"),
    ],
)
@in_virtual_time
async def test_pauses_are_added_to_the_timeout(pauses: list[tuple[float, float]], end: float) -> None:
    clock, loop = RequestClock(), asyncio.get_running_loop()
    for start, stop in pauses:
        loop.call_at(start, clock.pause)
        loop.call_at(stop, clock.resume)
    assert await duration(clock, 5, forever) == (end, True)


@in_virtual_time
async def test_a_request_that_begins_in_a_pause_has_all_of_its_time() -> None:
    clock, loop = RequestClock(), asyncio.get_running_loop()
    clock.pause()
    clock.pause()
    loop.call_at(100, clock.resume)
    loop.call_at(101, clock.resume)
    assert await duration(clock, 5, forever) == (105, True)


@in_virtual_time
async def test_requests_that_end_in_a_pause_leave_the_others_alone() -> None:
    clock, loop = RequestClock(), asyncio.get_running_loop()
    loop.call_at(1, clock.pause)
    loop.call_at(10, clock.resume)
    done = await asyncio.gather(
        duration(clock, 5, lambda: asyncio.sleep(3)), duration(clock, 2, forever), duration(clock, 1, forever)
    )
    assert done[0] == (3, False)
    assert done[1] == (11, True)
    assert done[2][1]


@in_virtual_time
async def test_errors_and_cancellation_pass_through() -> None:
    clock = RequestClock()

    async def fail() -> None:
        raise ValueError("of the request")

    with pytest.raises(ValueError, match="of the request"):
        await duration(clock, 5, fail)
    task = asyncio.ensure_future(duration(clock, 5, forever))
    await asyncio.sleep(1)
    clock.pause()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    clock.resume()
