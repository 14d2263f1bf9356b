"""A real engine over two nodes, which are faked by two processes on this machine."""

import dataclasses
import os
import re
import signal
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from megarl.cluster.process.ports import find_unused_port
from megarl.errors import LostEngineError, WeightSyncError, WorkerError
from tests.end_to_end.components import engine_host
from tests.engines.remote import RemoteEngine, requests, send_bucket, started, sync
from tests.engines.sglang.serving import PROMPTS, assert_blocked
from tests.engines.sglang.test_engine_failures import assert_all_exit
from tests.engines.sglang.weight_update.test_network_receive import World, assert_serves
from tests.errors import expect_error
from tests.time_limits import HANG_SECONDS

pytestmark = pytest.mark.slow


def over_two_nodes(spec, **changes):
    address = f"127.0.0.1:{find_unused_port()}"
    here = {"node_name": "node0", "node_address": "127.0.0.1", "dist_init_addr": address}
    return dataclasses.replace(spec, tp=2, nnodes=2, **here, **changes)


def processes_of(engine):
    """Return all processes of the engine on both nodes."""
    host = psutil.Process(engine.process.pid)
    return [host, *host.children(recursive=True)]


@pytest.fixture(scope="module")
def shared_world(spec, uneven_dir, tmp_path_factory):
    """The trainer ranks are on a third node."""
    with started(over_two_nodes(spec, model_path=uneven_dir)) as engine:
        world = World(engine, uneven_dir, tmp_path_factory.mktemp("versions"), nodes=(0, 0, 1, 2))
        yield world
        world.close()


@pytest.fixture
def world(shared_world):
    return shared_world.ready()


def test_completions_are_those_of_an_engine_on_one_node(world, spec):
    with started(spec, model_path=world.model_dir, tp=2) as on_one_node:
        assert on_one_node.call("layouts") == world.layouts
        sync(on_one_node, world.versions.all_of(world.version), world.version)
        for temperature in (0.0, 1.0):
            here, there = (
                engine.generate(PROMPTS, seeds=range(len(PROMPTS)), temperature=temperature)
                for engine in (world.engine, on_one_node)
            )
            for a, b in zip(here, there, strict=True):
                assert a.token_ids.tobytes() == b.token_ids.tobytes()
                assert a.logprobs.tobytes() == b.logprobs.tobytes()


def test_sync_is_bitwise_exact_on_both_nodes(world):
    for version in (1, 2):
        world.engine.call("randomize_weights")
        stats = world.sync(version)
        assert_serves(world)
        assert sum(rank.bytes_received for rank in stats) == sum(rank.bytes_sent for rank in stats)


def test_replies_of_both_nodes_are_reported(world):
    world.engine.call("begin_weights")
    bucket = {"nonsense": world.versions("model.norm.weight", 1)}
    with expect_error(WeightSyncError, "TP", "0", "1", "nonsense"):
        send_bucket(world.engine, bucket)
    assert_serves(world)


def test_ping_waits_for_the_hosts_of_all_nodes(world):
    assert world.engine.call("ping") is None
    children = psutil.Process(world.engine.process.pid).children()
    (host,) = [process for process in children if "engine_process.py" in " ".join(process.cmdline())]
    host.send_signal(signal.SIGSTOP)
    ping = world.engine.submit("ping")
    try:
        world.engine.generate(PROMPTS)  # which the schedulers of both nodes complete without the host
        assert not ping.done()
    finally:
        host.send_signal(signal.SIGCONT)
        assert ping.result(HANG_SECONDS) is None


def test_rank_of_the_second_node_that_does_not_answer_is_named(world):
    stalled = world.engine.scheduler_processes()[1]
    world.engine.call("begin_weights")
    stalled.send_signal(signal.SIGSTOP)
    bucket = {"model.norm.weight": world.versions("model.norm.weight", 3)}
    try:
        with ThreadPoolExecutor() as pool:
            sending = pool.submit(send_bucket, world.engine, bucket)
            world.engine.call("pass_time_limit", "the command to load model.norm.weight")
            message = r"TP rank 1 \(pid \d+, stopped\) on node1 did not answer .* 1200 s$"
            with pytest.raises(WeightSyncError, match=message):
                sending.result(HANG_SECONDS)
    finally:
        stalled.send_signal(signal.SIGCONT)
    assert_blocked(world.engine, world.version)
    world.engine.call("begin_weights")
    world.connect()
    world.sync(3)
    assert_serves(world)


@pytest.mark.last
def test_death_of_a_scheduler_of_the_second_node_ends_the_engine(world):
    processes = processes_of(world.engine)
    assert len(processes) > 6
    pending = world.engine.submit("generate_many", requests(PROMPTS, max_new_tokens=400))
    watch = world.engine.submit("watch")
    world.engine.scheduler_processes()[1].kill()
    with expect_error(LostEngineError, "engine's", "TP"):
        pending.result(HANG_SECONDS)
    assert isinstance(watch.result(HANG_SECONDS), LostEngineError)
    world.engine.close()
    assert_all_exit(processes)


def test_death_of_the_second_nodes_host_ends_the_engine(spec):
    engine = RemoteEngine(over_two_nodes(spec))
    engine.call("start")
    processes = processes_of(engine)
    watch = engine.submit("watch")
    os.kill(engine_host(engine.scheduler_processes()[1].pid), signal.SIGKILL)
    assert re.search("the engine's host on node1 died", str(watch.result(HANG_SECONDS)))
    with expect_error(LostEngineError, "engine's", "node1"):
        engine.generate(PROMPTS)
    engine.close()
    assert_all_exit(processes)


def test_failed_start_names_the_node_and_leaves_no_process(spec, tmp_path):
    engine = RemoteEngine(over_two_nodes(spec, model_path=str(tmp_path)))
    start = engine.submit("start")
    with pytest.raises(WorkerError, match=r"the engine did not start on node[01]: "):
        start.result(HANG_SECONDS)
    processes = processes_of(engine)
    engine.close()
    assert_all_exit(processes)
