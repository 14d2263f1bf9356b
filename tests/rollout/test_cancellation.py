"""Every way in which a group ends before its requests have, and what the engine is told then."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from megarl.batch.trajectory import Trajectory
from megarl.cluster.workers.dispatch import CallBatches
from megarl.cluster.workers.worker_host import AsyncWorkerHost
from megarl.engines.engine import FinishedRequest, Generation, GenerationRequest, Sampling
from megarl.engines.engine_pool import PooledEngine
from megarl.engines.sglang import request_runner
from megarl.engines.sglang.request_runner import ABORT_SECONDS, EARLY_ABORT_SECONDS, RequestRunner, SglangLoad
from megarl.errors import AgentError, LostEngineError, MegarlError
from megarl.rollout.agents.agent import Agent
from megarl.rollout.agents.episode import Episode
from megarl.rollout.agents.single_turn import single_turn
from megarl.rollout.rollout_worker import RolloutWorker, RolloutWorkerSpec
from tests.errors import expect_error
from tests.rollout.clock import LOOP_CLOCK, in_virtual_time
from tests.rollout.whole_batches import NoScores, make_generation, make_group_job

SECONDS = 4.0


class Engine:
    """Takes `SECONDS` for each request."""

    def __init__(self, abort_seconds: float = 0.0) -> None:
        self.abort_seconds = abort_seconds
        self.requests: list[str] = []
        self.aborted: list[str] = []

    async def _complete(self, index: int, request: GenerationRequest) -> FinishedRequest:
        self.requests.append(request.request_id)
        await asyncio.sleep(SECONDS)
        return index, make_generation([7, 8])

    async def stream(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[list[FinishedRequest]]:
        for finished in asyncio.as_completed([self._complete(i, request) for i, request in enumerate(requests)]):
            yield [await finished]

    async def partial_outputs(self, known: Mapping[str, int]) -> dict[str, Generation]:
        return {}

    async def abort(self, request_id: str) -> None:
        await asyncio.sleep(self.abort_seconds)
        self.aborted.append(request_id)


def make_worker(engine: Any, scorer: Any = None, agent: Agent = single_turn) -> RolloutWorker:
    spec = RolloutWorkerSpec(request_timeout_seconds=1e6, agent=agent)
    return RolloutWorker(spec, [engine], scorer or NoScores(), tokenizer=None)  # type: ignore[arg-type]


JOB = make_group_job(group_id=0, num_samples=8)
ALL = sorted(f"step-1-0-{sample}" for sample in range(8))


@in_virtual_time
async def test_a_cancelled_call_aborts_its_requests() -> None:
    """The controller drops the group, closes the stream or an evaluation, or has lost its trainer."""
    engine = Engine()
    batches = CallBatches(make_worker(engine).rollout_group)
    collecting = asyncio.ensure_future(batches.begin("1", [JOB]))
    await asyncio.sleep(1.0)
    batches.cancel("1", [0])
    await asyncio.sleep(0.1)
    assert sorted(engine.aborted) == ALL
    assert await collecting == []


@in_virtual_time
async def test_the_error_of_a_sample_aborts_the_others() -> None:
    engine = Engine()
    numbers = itertools.count()

    async def fail_fourth(episode: Episode) -> Trajectory:
        if next(numbers) == 3:
            await asyncio.sleep(1.0)
            raise KeyError("answer")
        return await single_turn(episode)

    with pytest.raises(AgentError, match="answer"):
        await make_worker(engine, agent=fail_fourth).rollout_group(JOB)
    await asyncio.sleep(0.1)
    assert sorted(engine.aborted) == [each for each in ALL if not each.endswith("-3")]


@in_virtual_time
async def test_finished_and_unsent_requests_are_not_aborted() -> None:
    worker = make_worker(engine := Engine())
    unsent = asyncio.ensure_future(worker.rollout_group(JOB))
    await asyncio.sleep(0)
    unsent.cancel()
    await worker.rollout_group(make_group_job(group_id=1))
    assert sorted(engine.requests) == ["step-1-1-0", "step-1-1-1"]
    assert engine.aborted == []


@in_virtual_time
async def test_a_worker_that_stops_cancels_its_groups_and_tells_the_engines() -> None:
    engine = Engine(abort_seconds=0.5)
    closed: list[int] = []

    class Scorer(NoScores):
        async def close(self) -> None:
            closed.append(len(engine.aborted))

    host: Any = AsyncWorkerHost.__new__(AsyncWorkerHost)
    host.worker = make_worker(engine, Scorer())
    host.batches = CallBatches(host.invoke_with_value)
    collecting = asyncio.ensure_future(host.begin_calls("1", "rollout_group", [JOB], 1, 1))
    await asyncio.sleep(1.0)
    await host.stop()
    assert sorted(engine.aborted) == ALL
    assert closed == [8]
    await collecting


@in_virtual_time
async def test_an_engine_that_does_not_answer_delays_the_end_of_a_worker_for_a_few_seconds() -> None:
    worker = make_worker(Engine(abort_seconds=1e4), SimpleNamespace(close=lambda: asyncio.sleep(0)))
    group = asyncio.ensure_future(worker.rollout_group(JOB))
    await asyncio.sleep(1.0)
    group.cancel()
    await asyncio.sleep(0)
    await worker.shutdown()
    assert asyncio.get_running_loop().time() < 10.0


@in_virtual_time
async def test_calls_that_are_canceled_before_they_begin_do_not_begin() -> None:
    """A small message overtakes a large one."""
    begun: list[int] = []

    async def call(argument: int) -> int:
        begun.append(argument)
        return argument

    batches = CallBatches(call)
    batches.cancel("1", [0, 2])
    assert await batches.begin("1", [10, 11, 12]) == [(1, 11)]
    batches.cancel("2", [0])
    assert await batches.begin("2", [20]) == []
    assert begun == [11]
    for number in range(3000):
        batches.cancel(f"over-{number}", [0])
    assert len(batches._canceled) == 1000


@in_virtual_time
async def test_a_repeated_request_is_sent_after_the_abort_of_the_first() -> None:
    wrapped: Any = Engine(abort_seconds=2.0)
    engine = PooledEngine(wrapped)
    request = GenerationRequest(request_id="1", token_ids=(1,), sampling=Sampling(temperature=1.0, max_new_tokens=4))
    first = asyncio.ensure_future(engine.generate(request))
    await asyncio.sleep(1.0)
    first.cancel()
    await asyncio.sleep(0)
    second = asyncio.ensure_future(engine.generate(request))
    await asyncio.sleep(1.9)
    assert wrapped.requests == ["1"]
    assert (await second).finish_reason == "stop"
    assert (wrapped.requests, wrapped.aborted) == (["1", "1"], ["1"])


@in_virtual_time
async def test_the_abort_on_a_lost_engine_fails_silently() -> None:
    class Lost(Engine):
        async def abort(self, request_id: str) -> None:
            await super().abort(request_id)
            raise LostEngineError("SIGKILL")

    engine = Lost()
    group = asyncio.ensure_future(make_worker(engine).rollout_group(JOB))
    await asyncio.sleep(1.0)
    group.cancel()
    await asyncio.gather(group, return_exceptions=True)
    await asyncio.sleep(0.1)
    assert sorted(engine.aborted) == ALL


class FakeManager:
    """SGLang's tokenizer manager: a request takes 10 s, and knows an abort from 0.2 s after its start."""

    def __init__(self, max_running: int = 1000) -> None:
        self.rid_to_state: dict[str, SimpleNamespace] = {}
        self.aborts: list[str] = []
        self.max_running = max_running
        self.load_snapshot_reader = SimpleNamespace(read_all=list)

    def abort_request(self, rid: str) -> None:
        self.aborts.append(rid)
        state = self.rid_to_state[rid]
        assert not state.abort_sent
        state.abort_sent = True
        if asyncio.get_running_loop().time() - state.begun >= 0.2:
            state.ended.set()


class Runner(RequestRunner):
    """Runs requests on `FakeManager`."""

    def __init__(self, max_running: int = 1000) -> None:
        self.manager = FakeManager(max_running)
        host: Any = SimpleNamespace(tokenizer_manager=self.manager)
        super().__init__(host, ())
        self.begun: list[str] = []

    def _read_load(self) -> SglangLoad:
        return SglangLoad(timestamp=1.0, num_queued=0, num_retracted=0, kv_usage=0.1, kv_tokens=1_000, max_running=1)

    async def _run(self, attempt: Any) -> Generation:
        loop = asyncio.get_running_loop()
        attempt.sglang_id = f"{attempt.request.request_id}."
        self.begun.append(attempt.request.request_id)
        state = SimpleNamespace(
            begun=loop.time(), ended=asyncio.Event(), abort_sent=False, customized_info_accumulated={}
        )
        self.manager.rid_to_state[attempt.sglang_id] = state
        self._running.add(attempt)
        try:
            await asyncio.wait_for(state.ended.wait(), 10.0)
        except TimeoutError:
            return make_generation([1, 2, 3])
        finally:
            self._running.discard(attempt)
            del self.manager.rid_to_state[attempt.sglang_id]
        return make_generation([1], reason="abort")


def request(name: str, priority: int = 0) -> GenerationRequest:
    sampling = Sampling(temperature=1.0, max_new_tokens=498)
    return GenerationRequest(request_id=name, token_ids=(1, 2), sampling=sampling, priority=priority)


@pytest.fixture
def loop_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_runner, "time", SimpleNamespace(monotonic=LOOP_CLOCK.monotonic, time=lambda: 0.0))


@pytest.mark.usefixtures("loop_clock")
@in_virtual_time
async def test_an_abort_ends_its_request_in_sglang_also_if_sglang_does_not_know_it_yet() -> None:
    runner = Runner()
    running = asyncio.ensure_future(runner.complete(request("1-0-0")))
    await asyncio.sleep(0.1)
    await runner.abort("1-0-0")
    assert (await running).finish_reason == "abort"
    assert asyncio.get_running_loop().time() == pytest.approx(0.1 + ABORT_SECONDS)
    assert runner.manager.aborts == ["1-0-0."] * 2
    await asyncio.sleep(10 * ABORT_SECONDS)
    assert len(runner.manager.aborts) == 2


@pytest.mark.usefixtures("loop_clock")
@in_virtual_time
async def test_an_abort_that_overtakes_its_request_ends_it() -> None:
    runner = Runner()
    await runner.abort("1-0-0")
    overtaken = await runner.complete(request("1-0-0"))
    assert (overtaken.finish_reason, len(overtaken.token_ids), runner.begun) == ("abort", 0, [])
    assert (await runner.complete(request("1-0-0"))).finish_reason == "stop"  # it was asked again
    await runner.abort("1-0-0")  # of the request that has just ended
    assert (await runner.complete(request("1-0-0"))).finish_reason == "stop"
    await runner.abort("1-0-1")
    await asyncio.sleep(EARLY_ABORT_SECONDS + 1.0)
    assert (await runner.complete(request("1-0-1"))).finish_reason == "stop"
    await runner.abort("1-0-2")
    assert list(runner._early_aborts) == ["1-0-2"]  # others are forgotten


@pytest.mark.usefixtures("loop_clock")
@in_virtual_time
async def test_the_requests_of_a_lost_workers_groups_are_aborted() -> None:
    runner = Runner()
    names = ["1-0-0", "1-0-1.2", "1-1-0", "1-01-0", "1-0-again"]
    running = [asyncio.ensure_future(runner.complete(request(name))) for name in names]
    await asyncio.sleep(1.0)
    await runner.abort_groups(["1-0", "1-2"])
    reasons = [(await each).finish_reason for each in running]
    assert reasons == ["abort", "abort", "stop", "stop", "abort"]


@pytest.mark.usefixtures("loop_clock")
@in_virtual_time
async def test_waiting_requests_go_by_priority_end_when_aborted_and_are_reported_as_waiting() -> None:
    runner = Runner()  # two requests fit
    first = [asyncio.ensure_future(runner.complete(request(f"1-{n}"))) for n in range(4)]
    await asyncio.sleep(1.0)
    assert runner.begun == ["1-0", "1-1"]
    urgent = asyncio.ensure_future(runner.complete(request("evaluate", priority=1)))
    known = {"1-0": 0, "1-2": 0, "evaluate": 0}
    assert await runner.partial_outputs(known) == {}  # the first report
    await asyncio.sleep(1.0)
    assert await runner.partial_outputs(known) == {}  # nothing was sampled since
    await runner.abort("1-2")
    assert (await first[2]).finish_reason == "abort"
    assert asyncio.get_running_loop().time() == pytest.approx(2.0)
    await asyncio.sleep(8.5)  # two have ended
    assert runner.begun == ["1-0", "1-1", "evaluate", "1-3"]
    waiting = await runner.partial_outputs(known)
    assert {name: (len(part.token_ids), part.finish_reason) for name, part in waiting.items()} == {
        "evaluate": (0, "unfinished")
    }
    assert await runner.partial_outputs(known) == {}
    await asyncio.gather(first[0], first[1], first[3], urgent)


@pytest.mark.usefixtures("loop_clock")
@in_virtual_time
async def test_a_cancelled_waiter_and_a_replaced_request_leave_the_gate() -> None:
    runner = Runner()
    running = [asyncio.ensure_future(runner.complete(request(f"1-{n}"))) for n in range(3)]
    await asyncio.sleep(1.0)
    running[2].cancel()
    newer = asyncio.ensure_future(runner.complete(request("1-0")))
    with expect_error(MegarlError, "replaced", "request"):
        await running[0]
    assert (await newer).finish_reason == "stop"
    await running[1]
    assert (runner.gate.num_admitted, runner.gate.num_waiting) == (0, 0)
