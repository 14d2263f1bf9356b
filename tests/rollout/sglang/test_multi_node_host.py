"""The host of an engine's first node, with fake schedulers and fake other nodes."""

import asyncio

import pytest

from megarl.errors import LostEngineError, WeightSyncError, WorkerError
from megarl.rollout.engine_spec import EngineSpec
from megarl.rollout.sglang.engine_host import EngineHost
from megarl.rollout.sglang.multi_node_host import MultiNodeHost
from megarl.rollout.sglang.weight_update.messages import Reply, checked_path, send_reply
from megarl.rollout.sglang.weight_update.rank_files import find_unresponsive, reply_prefix
from tests.rollout.clock import in_virtual_time

SPEC = EngineSpec(model_path="", tp=6, nnodes=3, dist_init_addr="10.0.0.1:1", answer_timeout_seconds=20)
NUMBER = 7


class FakeNode:
    """Another node: its host without schedulers, in this process."""

    def __init__(self, rank, folder):
        self.name, self.host, self.calls = f"node{rank}", EngineHost(SPEC.on_node(rank, f"node{rank}", "")), []
        self.host.directory = str(folder / self.name)
        (folder / self.name).mkdir()
        self.starting = asyncio.Future()
        self.ended = asyncio.Future()
        self.hangs = False

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


@pytest.fixture
def make_world(tmp_path, monkeypatch):
    return lambda: World(tmp_path, monkeypatch)


def test_nodes_have_the_ranks_of_the_engine_in_order():
    assert [SPEC.on_node(rank, "", "").node_ranks for rank in range(3)] == [range(2), range(2, 4), range(4, 6)]
    assert EngineSpec(model_path="", tp=4).node_ranks == range(4)
    assert EngineSpec(model_path="", log_dir="logs/engine-0", nnodes=2, tp=2).on_node(1, "b", "").log_dir == (
        "logs/engine-0/node-1"
    )


@in_virtual_time
async def test_all_nodes_start_at_the_same_time(make_world):
    world = make_world()
    start = asyncio.ensure_future(world.host.start())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
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
    with pytest.raises(WorkerError, match="no memory on node2"):
        await world.host.start()
    assert world.stopped
    assert all("shutdown" in node.calls for node in world.nodes)


@in_virtual_time
async def test_killed_process_explains_the_errors_of_the_other_nodes(make_world):
    world = make_world()
    world.starting.set_exception(WorkerError("connection closed by peer"))
    asyncio.get_running_loop().call_later(1, world.nodes[0].starting.set_exception, LostEngineError("SIGKILL on node1"))
    with pytest.raises(LostEngineError, match="SIGKILL on node1"):
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
    assert world.stopped
    assert all("shutdown" in node.calls for node in world.nodes)


@in_virtual_time
async def test_loss_of_a_node_is_the_loss_of_the_engine(make_world):
    world = make_world()
    await world.start()
    assert world.host.failure is None
    world.nodes[1].ended.set_exception(LostEngineError("the scheduler process of TP rank 4 on node2 was ended"))
    while world.host.failure is None:
        await asyncio.sleep(0.001)
    assert str(world.host.failure) == "the scheduler process of TP rank 4 on node2 was ended"
    assert isinstance(world.host.failure, LostEngineError)


@in_virtual_time
async def test_replies_come_from_the_folders_of_all_nodes(make_world):
    world = make_world()
    await world.start()
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


@pytest.mark.parametrize(
    ("states", "unresponsive"),
    [
        (["replied", "replied"], []),
        (["missing", "missing"], [0, 1]),
        (["checked", "missing", "replied"], [1]),
        (["checked", "replied"], [0]),
    ],
)
def test_ranks_that_wait_for_others_are_not_unresponsive(states, unresponsive):
    assert find_unresponsive(states) == unresponsive


@in_virtual_time
async def test_shared_file_can_be_read_on_every_node(make_world):
    world = make_world()
    await world.start()
    paths = await world.host.share_file("spec", b"plan")
    assert len(paths) == 6
    assert len(set(paths)) == 3
    assert {open(path, "rb").read() for path in paths} == {b"plan"}  # noqa: SIM115
    await world.host.remove_file("spec")
    with pytest.raises(FileNotFoundError):
        open(paths[5], "rb")  # noqa: SIM115


@in_virtual_time
async def test_node_that_does_not_answer_is_named(make_world):
    world = make_world()
    await world.start()
    world.nodes[0].hangs = True
    with pytest.raises(WeightSyncError, match=r"the engine's host on node1 did not answer within 20 s"):
        await world.host.take_replies(NUMBER)
    ping = asyncio.ensure_future(world.host._ping())
    await asyncio.sleep(30)
    assert not ping.done()
    ping.cancel()
    await world.host.shutdown()
    assert world.stopped
