"""A real engine over two nodes, which are faked by two processes on this machine."""

import dataclasses
import os
import re
import signal
import time

import psutil
import pytest

from megarl.errors import LostEngineError, WeightSyncError, WorkerError
from megarl.process.ports import find_unused_port
from tests.end_to_end.components import engine_host
from tests.end_to_end.launched import wait_until
from tests.rollout.conftest import tiny_qwen3
from tests.rollout.remote import RemoteEngine, requests, send_bucket
from tests.rollout.sglang.test_engine_failures import has_exited
from tests.rollout.sglang.weight_update.test_network_receive import World, assert_blocked, assert_serves
from tests.rollout.sglang.weight_update.test_update_session import PROMPTS
from tests.time_limits import HANG_SECONDS

pytestmark = pytest.mark.slow

ANSWER_SECONDS = 10.0


def over_two_nodes(spec, **changes):
    address = f"127.0.0.1:{find_unused_port()}"
    here = {"node_name": "node0", "node_address": "127.0.0.1", "dist_init_addr": address}
    return dataclasses.replace(spec, tp=2, nnodes=2, **here, **changes)


def processes_of(engine):
    """Return all processes of the engine on both nodes."""
    host = psutil.Process(engine.process.pid)
    return [host, *host.children(recursive=True)]


@pytest.fixture(scope="module")
def world(spec, tmp_path_factory):
    """A model with one key-value head for both ranks and a padded vocabulary; the trainer ranks are on a third node."""
    folder = tmp_path_factory.mktemp("two_nodes")
    tiny_qwen3(folder / "model", num_key_value_heads=1, vocab_size=252)
    here = over_two_nodes(spec, model_path=str(folder / "model"), answer_timeout_seconds=ANSWER_SECONDS)
    world = World(here, folder, nodes=(0, 0, 1, 2))
    world.connect()
    yield world
    world.close()


def seeded(temperature):
    return [
        dataclasses.replace(request, sampling=dataclasses.replace(request.sampling, seed=seed))
        for seed, request in enumerate(requests(PROMPTS, temperature=temperature))
    ]


def test_completions_are_those_of_an_engine_on_one_node(world, spec):
    on_one_node = RemoteEngine(dataclasses.replace(spec, model_path=world.model_dir, tp=2))
    on_one_node.call("start")
    try:
        assert on_one_node.call("layouts") == world.layouts
        for temperature in (0.0, 1.0):
            here, there = (e.call("generate_many", seeded(temperature)) for e in (world.engine, on_one_node))
            for a, b in zip(here, there, strict=True):
                assert a.token_ids.tobytes() == b.token_ids.tobytes()
                assert a.logprobs.tobytes() == b.logprobs.tobytes()
    finally:
        on_one_node.close()


def test_sync_is_bitwise_exact_on_both_nodes(world):
    for version in (1, 2):
        world.engine.call("randomize_weights")
        stats = world.sync(version)
        assert_serves(world, version)
        assert sum(rank.bytes_received for rank in stats) == sum(rank.bytes_sent for rank in stats)


def test_replies_of_both_nodes_are_reported(world):
    world.engine.call("begin_weights")
    bucket = {"nonsense": world.versions("model.norm.weight", 1)}
    with pytest.raises(WeightSyncError, match=r"TP rank 0: nonsense is no .*; TP rank 1: nonsense is no "):
        send_bucket(world.engine, bucket)
    assert_serves(world, 2)


def stop_for_ping(world):
    """Stop the host of the second node and return whether a ping is answered then."""
    (host,) = [process for process in psutil.Process(world.engine.process.pid).children() if is_host(process)]
    host.send_signal(signal.SIGSTOP)
    ping = world.engine.submit("ping")
    try:
        time.sleep(1.0)
        return ping.done()
    finally:
        host.send_signal(signal.SIGCONT)
        assert ping.result(HANG_SECONDS) is None


def is_host(process):
    return "engine_process.py" in " ".join(process.cmdline())


def test_ping_waits_for_the_hosts_of_all_nodes(world):
    assert world.engine.call("ping") is None
    assert not stop_for_ping(world)


def test_rank_of_the_second_node_that_does_not_answer_is_named(world):
    stalled = world.engine.scheduler_processes()[1]
    world.engine.call("begin_weights")
    stalled.send_signal(signal.SIGSTOP)
    bucket = {"model.norm.weight": world.versions("model.norm.weight", 3)}
    try:
        with pytest.raises(WeightSyncError, match=r"TP rank 1 \(pid \d+, stopped\) on node1 did not answer .* 10 s$"):
            send_bucket(world.engine, bucket)
    finally:
        stalled.send_signal(signal.SIGCONT)
    assert_blocked(world, 2)
    world.engine.call("begin_weights")
    world.connect()
    world.sync(3)
    assert_serves(world, 3)


def test_death_of_a_scheduler_of_the_second_node_ends_the_engine(world):
    """Must be the last test with this engine, because it kills it."""
    processes = processes_of(world.engine)
    assert len(processes) > 6
    pending = world.engine.submit("generate_many", requests(PROMPTS, max_new_tokens=400))
    watch = world.engine.submit("watch")
    time.sleep(0.5)
    world.engine.scheduler_processes()[1].kill()
    with pytest.raises(LostEngineError, match=r"^the engine's scheduler process of TP rank "):
        pending.result(HANG_SECONDS)
    assert isinstance(watch.result(HANG_SECONDS), LostEngineError)
    world.engine.close()
    assert wait_until(lambda: all(map(has_exited, processes))), [p for p in processes if not has_exited(p)]


def test_death_of_the_second_nodes_host_ends_the_engine(spec):
    engine = RemoteEngine(over_two_nodes(spec))
    engine.call("start")
    processes = processes_of(engine)
    watch = engine.submit("watch")
    engine_host_pid = engine_host(engine.scheduler_processes()[1].pid)
    os.kill(engine_host_pid, signal.SIGKILL)
    assert re.search("the engine's host on node1 died", str(watch.result(HANG_SECONDS)))
    with pytest.raises(LostEngineError, match="the engine's host on node1 died"):
        engine.generate(PROMPTS)
    engine.close()
    assert wait_until(lambda: all(map(has_exited, processes))), [p for p in processes if not has_exited(p)]


def test_failed_start_names_the_node_and_leaves_no_process(spec, tmp_path):
    engine = RemoteEngine(over_two_nodes(spec, model_path=str(tmp_path)))
    start = engine.submit("start")
    with pytest.raises(WorkerError, match=r"the engine did not start on node[01]: "):
        start.result(HANG_SECONDS)
    processes = processes_of(engine)
    engine.close()
    assert wait_until(lambda: all(map(has_exited, processes)))
