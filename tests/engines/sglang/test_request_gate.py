"""Requests that wait for SGLang on a fake scheduler with a small KV cache, in virtual time."""

import asyncio
import itertools
import random
from dataclasses import dataclass, field

import pytest

from megarl.engines.sglang.request_runner import LOOK_SECONDS, ConcurrencyLimit, RequestGate, SglangLoad, Ticket
from tests.rollout.clock import in_virtual_time

PROMPT, MAX_NEW = 10, 90
TOKEN_SECONDS = 0.05


@dataclass
class FakeScheduler:
    """Runs requests as SGLang does: admits them early, and retracts the youngest when the KV cache is full."""

    kv_tokens: int
    max_running: int = 1000
    admits_below: float = 0.9
    """Usage of the KV cache up to which a request is taken from the queue."""
    queue: list[list[int]] = field(default_factory=list)
    """Sampled tokens and length of each request."""
    running: list[list[int]] = field(default_factory=list)
    num_retracted: int = 0
    largest: int = 0
    recent: int = 0

    def used(self) -> int:
        return sum(PROMPT + sampled for sampled, _ in self.running)

    async def generate(self, length: int) -> None:
        request = [0, length]
        self.queue.append(request)
        while request[0] < length:
            await asyncio.sleep(TOKEN_SECONDS)

    async def serve(self) -> None:
        while True:
            while self.queue and len(self.running) < self.max_running:
                if self.used() + PROMPT + self.queue[0][0] > self.admits_below * self.kv_tokens:
                    break
                self.running.append(self.queue.pop(0))
            self.recent = 0
            while self.used() + len(self.running) > self.kv_tokens:
                self.queue.insert(0, self.running.pop())
                self.num_retracted += 1
                self.recent += 1
            self.largest = max(self.largest, len(self.running))
            for request in self.running:
                request[0] += 1
            self.running = [request for request in self.running if request[0] < request[1]]
            await asyncio.sleep(TOKEN_SECONDS)

    def load(self) -> SglangLoad:
        return SglangLoad(
            timestamp=asyncio.get_running_loop().time(),
            num_queued=len(self.queue),
            num_retracted=self.recent,
            kv_usage=self.used() / self.kv_tokens,
            kv_tokens=self.kv_tokens,
            max_running=self.max_running,
        )


async def send(gate: RequestGate, scheduler: FakeScheduler, length: int, priority: int = 0) -> float:
    """Return the time at which a request has ended."""
    ticket = gate.register(priority, PROMPT + MAX_NEW)
    try:
        assert await gate.wait_turn(ticket)
        await scheduler.generate(length)
    finally:
        gate.leave(ticket)
    return asyncio.get_running_loop().time()


async def sampled(scheduler: FakeScheduler, lengths: list[int], gate: RequestGate) -> float:
    serving = asyncio.create_task(scheduler.serve())
    ends = await asyncio.gather(*(send(gate, scheduler, length) for length in lengths))
    serving.cancel()
    return max(ends)


def draw_lengths(count: int) -> list[int]:
    return [random.Random(number).randrange(5, MAX_NEW) for number in range(count)]


@in_virtual_time
async def test_few_requests_are_retracted_and_none_is_slower() -> None:
    lengths = draw_lengths(600)
    open_gate, open_scheduler = RequestGate(lambda: None), FakeScheduler(2000)
    without = await sampled(open_scheduler, lengths, open_gate)
    scheduler = FakeScheduler(2000)
    gate = RequestGate(scheduler.load)
    began = asyncio.get_running_loop().time()
    seconds = await sampled(scheduler, lengths, gate) - began
    assert open_scheduler.num_retracted > 100
    assert scheduler.num_retracted <= open_scheduler.num_retracted / 4
    assert seconds <= 1.15 * without
    assert gate.num_admitted == gate.num_waiting == 0


@in_virtual_time
async def test_the_limit_does_not_slow_an_engine_with_room() -> None:
    """All places of the scheduler are taken until the last requests."""
    lengths = draw_lengths(300)
    without = await sampled(FakeScheduler(1_000_000, max_running=32), lengths, RequestGate(lambda: None))
    began = asyncio.get_running_loop().time()
    scheduler = FakeScheduler(1_000_000, max_running=32)
    assert await sampled(scheduler, lengths, RequestGate(scheduler.load)) - began == pytest.approx(without, rel=0.02)
    assert scheduler.largest == 32


@in_virtual_time
async def test_a_request_of_a_higher_priority_goes_before_a_queue_of_others() -> None:
    scheduler = FakeScheduler(1_000_000, max_running=16)
    gate = RequestGate(scheduler.load)
    serving = asyncio.create_task(scheduler.serve())
    others = [asyncio.create_task(send(gate, scheduler, 80)) for _ in range(640)]
    await asyncio.sleep(1.0)
    began = asyncio.get_running_loop().time()
    urgent = await asyncio.gather(*(send(gate, scheduler, 80, priority=1) for _ in range(4)))
    longest = 80 * TOKEN_SECONDS
    assert max(urgent) - began <= 2 * longest  # what runs, and the request itself
    ends = await asyncio.gather(*others)
    assert max(ends) - began > 35 * longest
    assert all(later >= earlier - 2 * TOKEN_SECONDS for earlier, later in itertools.pairwise(ends))
    serving.cancel()


def load(**changes: float) -> SglangLoad:
    fields = {"timestamp": 1.0, "num_queued": 0, "num_retracted": 0, "kv_usage": 0.5, "kv_tokens": 10_000}
    return SglangLoad(**{**fields, "max_running": 64, **changes})  # type: ignore[arg-type]


def test_the_limit_begins_with_what_fits_for_certain() -> None:
    assert ConcurrencyLimit(load(), 1000).value == 10
    assert ConcurrencyLimit(load(), 20_000).value == 1
    assert ConcurrencyLimit(load(), 10).value == 64 + 8


def test_the_limit_falls_once_until_requests_have_ended() -> None:
    limit = ConcurrencyLimit(load(), 10)
    limit.update(load(kv_usage=0.97), num_sent=40, is_waiting=True)
    assert limit.value == 34
    limit.update(load(num_retracted=3), num_sent=40, is_waiting=True)
    assert limit.value == 34  # the first decrease has had no effect yet
    limit.update(load(num_retracted=3), num_sent=34, is_waiting=True)
    assert limit.value == 28
    limit.update(load(kv_usage=0.9), num_sent=28, is_waiting=True)
    assert limit.value == 28
    limit.update(load(), num_sent=28, is_waiting=False)
    assert limit.value == 28
    limit.update(load(), num_sent=28, is_waiting=True)
    assert limit.value == 31
    for _ in range(20):
        limit.update(load(), num_sent=28, is_waiting=True)
    assert limit.value == 64 + 8


def test_the_limit_falls_by_requests_that_stay_in_the_queue_of_sglang() -> None:
    limit = ConcurrencyLimit(load(), 10)
    for queued in (70, 60, 50, 45, 40, 40, 40, 40, 40):
        limit.update(load(num_queued=queued), num_sent=72, is_waiting=True)
        assert limit.value == 72
    limit.update(load(num_queued=40), num_sent=72, is_waiting=True)
    assert limit.value == 72 - (40 - 9)


@in_virtual_time
async def test_a_closed_gate_keeps_places_and_a_withdrawn_request_ends_its_wait() -> None:
    scheduler = FakeScheduler(200, max_running=1)
    gate = RequestGate(scheduler.load)
    tickets = [gate.register(0, PROMPT + MAX_NEW) for _ in range(4)]
    order: list[int] = []

    async def wait(ticket: Ticket) -> bool:
        passes = await gate.wait_turn(ticket)
        order.append(ticket.number)
        return passes

    assert await wait(tickets[0])
    assert await wait(tickets[1])
    third, fourth = (asyncio.create_task(wait(ticket)) for ticket in tickets[2:])
    await asyncio.sleep(0)
    assert (gate.num_admitted, gate.num_waiting) == (2, 2)
    gate.close()
    held = asyncio.create_task(wait(tickets[1]))  # continues after an update
    await asyncio.sleep(0)
    gate.leave(tickets[0])
    gate.withdraw(tickets[2])
    assert not await third
    assert order == [0, 1, 2]
    gate.open()
    assert await held
    assert await fourth
    assert order == [0, 1, 2, 1, 3]
    fifth = asyncio.create_task(wait(gate.register(0, PROMPT + MAX_NEW)))
    await asyncio.sleep(0)
    fifth.cancel()
    await asyncio.gather(fifth, return_exceptions=True)
    gate.leave(tickets[1])
    gate.leave(tickets[3])
    assert (gate.num_admitted, gate.num_waiting) == (0, 0)
    await asyncio.sleep(2 * LOOK_SECONDS)
