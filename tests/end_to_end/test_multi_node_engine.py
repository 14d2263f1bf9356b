"""An engine over two Ray nodes of this machine receives weights, is lost with any part of it, and is restarted."""

import signal
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

from megarl.reshard.layout.layout import slices
from tests.end_to_end import test_lost_engines as lost_engines
from tests.end_to_end.components import Components, engine_host
from tests.end_to_end.launched import MISMATCH, LaunchedCommand
from tests.engines.remote import digest, piece_hashes
from tests.time_limits import HANG_SECONDS, wait_until

pytestmark = pytest.mark.slow

SECTIONS: dict[str, Any] = {
    "placement": {
        "slots_per_node": 2,
        "pools": {"engines": {"nodes": 2, "slots_per_node": 1}},
        "rollout": {"pool": "engines"},
    },
    "rollout": {"tp": 2, "max_new_tokens": 100},
    "weight_sync": {"strategy": "exact", "bucket_bytes": 60_000},
}


def num_live_nodes() -> int:
    return sum(node["Alive"] for node in ray.nodes())


@pytest.fixture(scope="module")
def second_node(cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LaunchedCommand]:
    """Let another Ray node with one slot join the cluster."""
    address = ray.get_runtime_context().gcs_address
    options = ["--block", "--num-cpus=1", "--object-store-memory=100000000", "--disable-usage-stats"]
    node = LaunchedCommand(tmp_path_factory.mktemp("node"), "start", f"--address={address}", *options, program="ray")
    assert wait_until(lambda: num_live_nodes() == 2)
    yield node
    node.process.send_signal(signal.SIGTERM)  # the node leaves the cluster at once; if it is killed, after seconds
    with suppress(subprocess.TimeoutExpired):
        node.process.wait(HANG_SECONDS)
    node.end()
    assert wait_until(lambda: num_live_nodes() == 1)


@pytest.fixture(scope="module")
def run(second_node, world: Path, tmp_path_factory) -> Iterator[lost_engines.StartedRun]:
    with lost_engines.started_run(world, tmp_path_factory.mktemp("two-nodes") / "run", **SECTIONS) as one:
        yield one


def schedulers(run: lost_engines.StartedRun) -> list[int]:
    (health,) = run.components.engines.call("health")
    return list(health.scheduler_pids)


def assert_engine_holds_weights(components: Components, folder: Path) -> None:
    """Check that each TP rank holds its part of the trainer's weights bitwise."""
    exported = components.exported(folder)
    (layouts,) = components.engines.call("layouts")
    hashes = piece_hashes(components.engines, layouts)
    assert len(layouts) == 2
    for layout, of_rank in zip(layouts, hashes, strict=True):
        assert of_rank == {(p.tensor, p.box): digest(exported[p.tensor][slices(p.box)]) for p in layout.pieces}


def test_ranks_of_both_nodes_receive_the_weights_bitwise(run, tmp_path):
    components = run.components
    first, second = (components.engines.pool.slots[slot] for slot in components.engines.engine_slots[0])
    assert first.node != second.node
    components.overwrite_served(components.exported(tmp_path / "overwritten"))
    report = components.weights.push(2)
    assert report.stats.bytes_sent == report.stats.bytes_received > 0
    assert_engine_holds_weights(components, tmp_path / "exported")
    assert 0 < components.train(components.sample("synced")).metrics[MISMATCH] <= 1e-4
    components.weights.push(3)
    assert_engine_holds_weights(components, tmp_path / "trained")


@pytest.mark.parametrize("victim", ["host", "scheduler"])
def test_engine_is_restarted_after_a_death_on_the_second_node(victim, run, tmp_path):
    undisturbed, before = run.collect("undisturbed"), schedulers(run)
    hosts = [engine_host(pid) for pid in before]
    doomed = before[1] if victim == "scheduler" else hosts[1]
    with lost_engines.happening_during(run, lost_engines.kill(doomed)):
        disturbed = run.collect("disturbed")
    lost_engines.assert_same(undisturbed, disturbed)
    lost, back = run.messages[-2:]
    assert lost.startswith("engine 0 was lost (")
    assert back.startswith("engine 0 is serving again, ")
    lost_engines.assert_processes_gone(*before, *hosts)
    assert_engine_holds_weights(run.components, tmp_path / "exported")


@pytest.mark.last
def test_shutdown_leaves_no_process_on_any_node(run):
    pids = schedulers(run)
    hosts = [engine_host(pid) for pid in pids]
    assert len({psutil.Process(pid).ppid() for pid in hosts}) == 2  # the raylets of two nodes
    run.components.engines.shutdown()
    lost_engines.assert_processes_gone(*pids)
