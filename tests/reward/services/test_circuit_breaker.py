"""The circuit breaker: what it holds back, and when it lets requests through again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from megarl.config.reward_services import BreakerConfig
from megarl.reward.services.circuit_breaker import CircuitBreaker, CircuitOpenError
from tests.virtual_time import run_in_virtual_time

COOLDOWN = 0.5


class Service:
    """Counts requests; they fail while it is down."""

    def __init__(self, breaker: CircuitBreaker) -> None:
        self.breaker, self.is_up, self.num_sent = breaker, False, 0

    async def request(self) -> str:
        try:
            async with self.breaker.request():
                self.num_sent += 1
                await asyncio.sleep(0.001)
                if not self.is_up:
                    raise ConnectionError
        except CircuitOpenError:
            return "held back"
        except ConnectionError:
            return "failed"
        return "answered"


def in_virtual_time(work: Callable[[Service], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    """Return a test that runs `work` with a service behind a breaker with 8 slots."""

    def test() -> None:
        run_in_virtual_time(work(Service(CircuitBreaker(BreakerConfig(failures=3, cooldown_seconds=COOLDOWN), 8))))

    test.__doc__ = work.__doc__
    return test


async def fail_three_times(service: Service) -> None:
    for _ in range(3):
        assert not service.breaker.is_open
        assert await service.request() == "failed"
    assert service.breaker.is_open


@in_virtual_time
async def test_successes_between_failures_keep_it_closed(service: Service) -> None:
    for _ in range(5):
        service.is_up = False
        assert [await service.request() for _ in range(2)] == ["failed"] * 2
        service.is_up = True
        assert await service.request() == "answered"
    assert not service.breaker.is_open


@in_virtual_time
async def test_while_the_service_is_down_one_request_per_cooldown_is_sent(service: Service) -> None:
    await fail_three_times(service)
    for cooldown in (1, 2, 3):
        results = await asyncio.gather(*(service.request() for _ in range(20)))
        assert sorted(results) == ["failed"] + ["held back"] * 19
        assert service.num_sent == 3 + cooldown


@in_virtual_time
async def test_requests_that_were_held_back_are_sent_once_the_service_is_up(service: Service) -> None:
    await fail_three_times(service)
    start = asyncio.get_running_loop().time()
    waiting = [asyncio.create_task(service.request()) for _ in range(20)]
    await asyncio.sleep(COOLDOWN / 2)
    assert service.num_sent == 3
    service.is_up = True
    assert await asyncio.gather(*waiting) == ["answered"] * 20
    assert COOLDOWN <= asyncio.get_running_loop().time() - start < 1.1 * COOLDOWN
    assert not service.breaker.is_open


@in_virtual_time
async def test_a_canceled_trial_leaves_the_next_one_to_another_request(service: Service) -> None:
    await fail_three_times(service)
    service.is_up = True
    trial, other = (asyncio.create_task(service.request()) for _ in range(2))
    while service.num_sent == 3:
        await asyncio.sleep(COOLDOWN / 1000)
    trial.cancel()
    assert await other == "answered"
    with pytest.raises(asyncio.CancelledError):
        await trial
    assert not service.breaker.is_open


@in_virtual_time
async def test_requests_that_wait_for_a_slot_are_held_back_too(service: Service) -> None:
    """Of 100 requests at once, 8 are sent; the others wait for the result of one trial, and are not sent in turn."""
    results = await asyncio.gather(*(service.request() for _ in range(100)))
    assert service.num_sent == 8 + 1
    assert results.count("held back") == 91


@in_virtual_time
async def test_no_more_requests_are_in_flight_than_there_are_slots(service: Service) -> None:
    service.is_up = True
    waiting = [asyncio.create_task(service.request()) for _ in range(100)]
    while not all(task.done() for task in waiting):
        assert service.num_sent - sum(task.done() for task in waiting) <= 8
        await asyncio.sleep(0.0001)
    assert [task.result() for task in waiting] == ["answered"] * 100
