"""Engine hosts with fakes of SGLang: pings, messages to the schedulers, and the host of several nodes."""

import asyncio
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from megarl.engines.engine_spec import EngineSpec
from megarl.engines.sglang import engine_host
from megarl.engines.sglang.engine_host import EngineHost, make_tokenizer_manager_class
from megarl.engines.sglang.sglang_engine import MultiNodeHost
from megarl.engines.sglang.weight_update.messages import (
    Reply,
    checked_path,
    find_unresponsive,
    reply_prefix,
    send_reply,
)
from megarl.errors import LostEngineError, WeightSyncError, WorkerError
from tests.errors import expect_error
from tests.rollout.clock import LOOP_CLOCK, in_virtual_time, iterate


class FakeTokenizerManager:
    """Replaces SGLang's tokenizer manager: schedulers reply once `gate` is set."""

    def __init__(self):
        self.gate, self.num_pings = asyncio.Event(), 0

    async def get_internal_state(self):
        self.num_pings += 1
        await self.gate.wait()


@pytest.fixture
def host(monkeypatch):
    """An engine host whose two schedulers have used `spent` seconds of CPU time."""
    monkeypatch.setattr(engine_host, "time", LOOP_CLOCK)
    host = EngineHost(EngineSpec(model_path=""))
    host._engine = SimpleNamespace(tokenizer_manager=FakeTokenizerManager())
    host.spent = [1.0, 1.0]

    async def processor_seconds():
        return list(host.spent)

    monkeypatch.setattr(host, "processor_seconds", processor_seconds)
    return host


async def ping_returns(host, seconds=60):
    ping = asyncio.create_task(host.ping_schedulers())
    done, _ = await asyncio.wait([ping], timeout=seconds)
    ping.cancel()
    return bool(done)


@in_virtual_time
async def test_ping_returns_if_all_schedulers_use_cpu_time(host):
    ping = asyncio.create_task(host.ping_schedulers())
    await asyncio.sleep(5)
    host.spent = [2.0, 1.0]
    await asyncio.sleep(5)
    assert not ping.done()
    host.spent = [2.0, 1.5]
    await ping


@in_virtual_time
async def test_ping_is_sent_once_and_returns_when_a_hung_engine_replies(host):
    assert not await ping_returns(host)
    assert not await ping_returns(host)
    assert host.tokenizer_manager.num_pings == 1
    host.tokenizer_manager.gate.set()
    assert await ping_returns(host)


@in_virtual_time
async def test_cpu_time_counts_only_for_max_busy_seconds(host):
    async def spin():
        while True:
            host.spent = [spent + 1 for spent in host.spent]
            await asyncio.sleep(engine_host.PING_POLL_SECONDS / 2)

    spinning = asyncio.create_task(spin())
    assert await ping_returns(host)
    await asyncio.sleep(engine_host.MAX_BUSY_SECONDS)
    assert not await ping_returns(host)
    host.tokenizer_manager.gate.set()
    assert await ping_returns(host)
    host.tokenizer_manager.gate.clear()
    assert await ping_returns(host)  # a second ping
    spinning.cancel()


SPEC = EngineSpec(model_path="", tp=6, nnodes=3, dist_init_addr="10.0.0.1:1", answer_timeout_seconds=20)
NUMBER = 7


class FakeNode:
    """Another node: its host without schedulers, in this process."""

    def __init__(self, rank, folder):
        self.name, self.host, self.calls = f"node{rank}", EngineHost(SPEC.on_node(rank, f"node{rank}", "")), []
        self.host.directory = str(folder / self.name)
        (folder / self.name).mkdir()
        self.starting, self.ended, self.hangs = asyncio.Future(), asyncio.Future(), False

    async def start(self, dist_init_addr):
        self.calls.append(("start", dist_init_addr))
        await self.starting

    async def ask(self, method, *args):
        if self.hangs:
            await asyncio.Event().wait()
        return await (self.ended if method is EngineHost.watch else method(self.host, *args))

    async def shutdown(self):
        self.calls.append("shutdown")
        if self.hangs:
            await asyncio.Event().wait()


class World:
    def __init__(self, folder, monkeypatch):
        self.nodes = [FakeNode(rank, folder) for rank in (1, 2)]
        self.host = MultiNodeHost(SPEC.on_node(0, "node0", ""), self.nodes)
        self.host.directory = str(folder / "node0")
        (folder / "node0").mkdir()
        self.starting, self.stopped = asyncio.Future(), False

        async def start(_):
            self.host._loop = asyncio.get_running_loop()
            await self.starting

        async def shutdown(_):
            self.stopped = True

        monkeypatch.setattr(EngineHost, "start", start)
        monkeypatch.setattr(EngineHost, "shutdown", shutdown)

    async def start(self):
        for each in (self, *self.nodes):
            each.starting.set_result(None)
        await self.host.start()
        return self

    def assert_stopped(self):
        assert self.stopped
        assert all("shutdown" in node.calls for node in self.nodes)


@pytest.fixture
def make_world(tmp_path, monkeypatch):
    return lambda: World(tmp_path, monkeypatch)


def test_nodes_have_the_ranks_of_the_engine_in_order():
    assert [SPEC.on_node(rank, "", "").node_ranks for rank in range(3)] == [range(2), range(2, 4), range(4, 6)]
    assert EngineSpec(model_path="", tp=4).node_ranks == range(4)
    spec = EngineSpec(model_path="", log_dir="logs/engine-0", nnodes=2, tp=2)
    assert spec.on_node(1, "b", "").log_dir == "logs/engine-0/node-1"


@in_virtual_time
async def test_all_nodes_start_at_the_same_time(make_world):
    world = make_world()
    start = asyncio.ensure_future(world.host.start())
    await iterate(2)
    assert [node.calls for node in world.nodes] == [[("start", "10.0.0.1:1")]] * 2
    assert not start.done()
    await asyncio.sleep(0)
    for each in (world, *world.nodes):
        each.starting.set_result(None)
    await start
    assert not world.stopped


@in_virtual_time
async def test_first_error_of_a_start_is_raised_and_all_nodes_are_stopped(make_world):
    world = make_world()
    world.nodes[1].starting.set_exception(WorkerError("no memory on node2"))
    with expect_error(WorkerError, "node2", "memory"):
        await world.host.start()
    world.assert_stopped()


@in_virtual_time
async def test_killed_process_explains_the_errors_of_the_other_nodes(make_world):
    world = make_world()
    world.starting.set_exception(WorkerError("connection closed by peer"))
    asyncio.get_running_loop().call_later(1, world.nodes[0].starting.set_exception, LostEngineError("SIGKILL on node1"))
    with expect_error(LostEngineError, "SIGKILL", "node1"):
        await world.host.start()


@in_virtual_time
async def test_cancelled_start_stops_all_nodes(make_world):
    world = make_world()
    world.nodes[0].hangs = True
    start = asyncio.ensure_future(world.host.start())
    await asyncio.sleep(0.01)
    start.cancel()
    with pytest.raises(asyncio.CancelledError):
        await start
    world.assert_stopped()


@in_virtual_time
async def test_loss_of_a_node_is_the_loss_of_the_engine(make_world):
    world = await make_world().start()
    assert world.host.failure is None
    world.nodes[1].ended.set_exception(LostEngineError("the scheduler process of TP rank 4 on node2 was ended"))
    await asyncio.sleep(1)
    assert isinstance(world.host.failure, LostEngineError)
    assert str(world.host.failure) == "the scheduler process of TP rank 4 on node2 was ended"


@in_virtual_time
async def test_replies_come_from_the_folders_of_all_nodes(make_world):
    world = await make_world().start()
    folders = await world.host.folders()
    assert [folder[-5:] for folder in folders] == ["node0", "node0", "node1", "node1", "node2", "node2"]
    for rank in (0, 1, 3):
        send_reply(Reply(rank, result=rank), {"reply": reply_prefix(folders[rank], NUMBER)})
    checked_path(reply_prefix(folders[2], NUMBER), 2).touch()
    states = await world.host.reply_states(NUMBER)
    assert states == ["replied", "replied", "checked", "replied", "missing", "missing"]
    assert find_unresponsive(states) == [4, 5]
    replies = await world.host.take_replies(NUMBER)
    assert replies == [Reply(0, result=0), Reply(1, result=1), None, Reply(3, result=3), None, None]
    assert await world.host.reply_states(NUMBER) == ["missing"] * 6


def test_ranks_that_wait_for_others_are_not_unresponsive():
    assert find_unresponsive(["replied", "replied"]) == []
    assert find_unresponsive(["missing", "missing"]) == [0, 1]
    assert find_unresponsive(["checked", "missing", "replied"]) == [1]
    assert find_unresponsive(["checked", "replied"]) == [0]


@in_virtual_time
async def test_shared_file_can_be_read_on_every_node(make_world):
    world = await make_world().start()
    paths = await world.host.share_file("spec", b"plan")
    assert len(paths) == 6
    assert len(set(paths)) == 3
    assert {Path(path).read_bytes() for path in paths} == {b"plan"}
    await world.host.remove_file("spec")
    assert not Path(paths[5]).exists()


@in_virtual_time
async def test_node_that_does_not_answer_is_named(make_world):
    world = await make_world().start()
    world.nodes[0].hangs = True
    with expect_error(WeightSyncError, "engine's", "node1", "20"):
        await world.host.take_replies(NUMBER)
    ping = asyncio.ensure_future(world.host.ping_schedulers())
    await asyncio.sleep(30)
    assert not ping.done()
    ping.cancel()
    await world.host.shutdown()
    assert world.stopped


@dataclass
class Request:
    """SGLang's message for a request."""

    rid: str
    time_stats: str = "encoded"


@dataclass
class Batch:
    """SGLang's message for several requests."""

    batch: list[Request]


class TokenizerManager:
    """Sends messages as SGLang's does: an encoded field of a request is decoded again after sending it."""

    def __init__(self) -> None:
        self.sent: list[object] = []
        self.control = self._dispatch_to_scheduler  # kept by SGLang before the engine has started

    async def generate(self, rid: str) -> None:
        request = Request(rid)
        self._dispatch_to_scheduler(request)
        request.time_stats = "decoded"

    def _dispatch_to_scheduler(self, obj: object) -> None:
        self.sent.append(obj)

    async def _async_dispatch_to_scheduler(self, obj: object) -> None:
        self.sent.append(obj)


@pytest.fixture
def manager(monkeypatch: pytest.MonkeyPatch) -> Any:
    messages, managers = ModuleType("io_struct"), ModuleType("tokenizer_manager")
    vars(messages).update(TokenizedGenerateReqInput=Request, BatchTokenizedGenerateReqInput=Batch)
    vars(managers).update(TokenizerManager=TokenizerManager)
    monkeypatch.setitem(sys.modules, "sglang.srt.managers.io_struct", messages)
    monkeypatch.setitem(sys.modules, "sglang.srt.managers.tokenizer_manager", managers)
    return make_tokenizer_manager_class()()


def test_requests_of_one_iteration_are_one_message(manager: Any) -> None:
    async def main() -> None:
        await asyncio.gather(*(manager.generate(f"a{i}") for i in range(3)))
        await asyncio.gather(*(manager.generate(f"b{i}") for i in range(2)))
        await manager.generate("c")
        await asyncio.sleep(0)

    asyncio.run(main())
    expected = [Batch([Request("a0"), Request("a1"), Request("a2")]), Batch([Request("b0"), Request("b1")])]
    assert manager.sent == [*expected, Request("c")]


@pytest.mark.parametrize("is_async", [False, True])
def test_other_messages_follow_the_requests_before_them(manager: Any, is_async: bool) -> None:
    async def main() -> None:
        await asyncio.gather(manager.generate("a"), manager.generate("b"))
        if is_async:
            await manager._async_dispatch_to_scheduler("abort")
        else:
            manager.control("abort")
        await manager.generate("c")
        await asyncio.sleep(0)

    asyncio.run(main())
    assert manager.sent == [Batch([Request("a"), Request("b")]), "abort", Request("c")]
