"""Completions reach their callers as they finish, within timeouts on a clock that pauses."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import pytest
from ray.exceptions import ActorUnavailableError

from megarl.cluster.workers.dispatch import LINGER_SECONDS, CallBatches
from megarl.engines.engine import FinishedRequest, Generation, GenerationRequest, Sampling
from megarl.engines.engine_pool import PooledEngine
from megarl.engines.request_clock import RequestClock
from megarl.engines.sglang.sglang_engine import RequestBatches
from megarl.errors import MegarlError, WorkerError
from megarl.run.remote import remote_engine
from megarl.run.remote.remote_engine import RemoteEngine
from tests.errors import expect_error
from tests.rollout.clock import in_virtual_time
from tests.rollout.whole_batches import make_generation
from tests.run.remote.test_engine_group import FakeActor

SAMPLING = Sampling(temperature=1.0, max_new_tokens=4)


def request(seconds: float) -> GenerationRequest:
    return GenerationRequest(request_id=str(seconds), token_ids=(1,), sampling=SAMPLING)


async def complete(request: GenerationRequest) -> Generation:
    """Take as many seconds as the id of the request says; a negative one fails."""
    seconds = float(request.request_id)
    await asyncio.sleep(abs(seconds))
    if seconds < 0:
        raise WorkerError(f"request {request.request_id} is too long")
    return make_generation([1])


class Engine:
    """An engine in this process."""

    def __init__(self) -> None:
        self.batches, self.num_calls = RequestBatches(complete), 0

    async def stream(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[list[FinishedRequest]]:
        left, self.num_calls = len(requests), self.num_calls + 1
        finished = await self.batches.begin("batch", requests)
        while True:
            yield finished
            left -= len(finished)
            if not left:
                return
            finished = await self.batches.collect("batch")


@in_virtual_time
async def test_each_request_returns_when_it_is_done() -> None:
    """Not when the slowest of its batch is."""
    wrapped: Any = Engine()
    engine, ended = PooledEngine(wrapped), dict[float, float]()

    async def generate(seconds: float) -> None:
        began = asyncio.get_running_loop().time()
        await engine.generate(request(seconds))
        ended[seconds] = asyncio.get_running_loop().time() - began

    await asyncio.gather(*map(generate, [1.0, 0.1, 0.1, 0.5]))
    assert wrapped.num_calls == 1
    assert wrapped.batches.num_unfinished == 0
    for seconds, took in ended.items():
        assert seconds <= took <= seconds + LINGER_SECONDS


@in_virtual_time
async def test_completions_that_finish_together_are_collected_together() -> None:
    batches = RequestBatches(complete)
    requests = [request(seconds) for seconds in (0.3, 0.1, -0.1 - LINGER_SECONDS / 3)]
    first = await batches.begin("batch", requests)
    assert [index for index, _ in first] == [1, 2]
    assert isinstance(first[1][1], WorkerError)
    assert batches.num_unfinished == 1
    assert [index for index, _ in await batches.collect("batch")] == [0]


@in_virtual_time
async def test_at_most_the_asked_number_of_results_is_collected_and_canceled_calls_have_none() -> None:
    async def sleep(seconds: float) -> float:
        await asyncio.sleep(seconds)
        return seconds

    batches = CallBatches(sleep)
    assert await batches.begin("batch", [0.0, 0.01, 0.0, 9.0, 0.5], 2) == [(0, 0.0), (2, 0.0)]
    batches.cancel("batch", [0, 3])
    await asyncio.sleep(0.1)
    assert batches.num_ready("batch") == 1
    assert await batches.collect("batch", 2) == [(1, 0.01)]
    assert (batches.num_unfinished, batches.num_ready("batch"), batches.num_ready("another")) == (1, 0, 0)
    last = asyncio.ensure_future(batches.collect("batch", 2))
    await asyncio.sleep(0)
    batches.cancel("batch", [4])
    assert await last == []
    assert await batches.collect("batch", 2) == []


@in_virtual_time
async def test_the_error_of_one_request_does_not_end_the_others() -> None:
    wrapped: Any = Engine()
    engine = PooledEngine(wrapped)
    work = [engine.generate(request(seconds)) for seconds in (-0.1, 0.2)]
    failed, completed = await asyncio.gather(*work, return_exceptions=True)
    assert isinstance(failed, MegarlError)
    assert isinstance(completed, Generation)


def test_requests_whose_completions_were_lost_are_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_engine, "RETRY_SECONDS", 0.0)
    calls: list[tuple[Any, ...]] = []
    lost = ActorUnavailableError("the connection was reset", b"x" * 16)
    actor = FakeActor([(1, "b")], lost, [(1, "c")], [(0, "a")])
    answer = actor.invoke.remote
    actor.invoke.remote = lambda *arguments: calls.append(arguments) or answer(*arguments)
    requests = [request(seconds) for seconds in (1.0, 2.0, 3.0)]

    async def main() -> list[Any]:
        engine = RemoteEngine(actor, "engine 1")  # type: ignore[arg-type]
        return [pair async for finished in engine.stream(requests) for pair in finished]

    assert asyncio.run(main()) == [(1, "b"), (2, "c"), (0, "a")]
    assert [call[0] for call in calls] == ["begin_requests", "finished_requests"] * 2
    assert calls[2][2] == [requests[0], requests[2]]
    assert calls[0][1] == calls[1][1] != calls[2][1] == calls[3][1]


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


PAUSES = {
    "one": ([(2, 9)], 12),
    "two": ([(1, 2), (4, 14)], 16),
    "from the start": ([(0, 3)], 8),
    "soon after each other": ([(2, 4), (4.5, 6)], 8.5),
}


@pytest.mark.parametrize(("pauses", "end"), PAUSES.values(), ids=PAUSES.keys())
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
    works = [(5, lambda: asyncio.sleep(3)), (2, forever), (1, forever)]
    first, second, third = await asyncio.gather(*(duration(clock, seconds, work) for seconds, work in works))
    assert (first, second, third[1]) == ((3, False), (11, True), True)


@in_virtual_time
async def test_errors_and_cancellation_pass_through() -> None:
    clock = RequestClock()

    async def fail() -> None:
        raise ValueError("of the request")

    with expect_error(ValueError, "request"):
        await duration(clock, 5, fail)
    task = asyncio.ensure_future(duration(clock, 5, forever))
    await asyncio.sleep(1)
    clock.pause()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    clock.resume()
