"""Reservation of slot pools."""

import os
import signal
import subprocess
import sys
from contextlib import contextmanager

import pytest
import ray
from ray.util import placement_group_table, remove_placement_group

from megarl.cluster.placement import pool
from megarl.cluster.placement.assign import ClusterNode, resolve_device
from megarl.cluster.placement.pool import reserve, reserve_pools, start_cluster
from megarl.config.placement import PlacementConfig
from megarl.errors import ConfigError, WorkerError
from tests.errors import expect_error
from tests.time_limits import HANG_SECONDS

pytestmark = pytest.mark.usefixtures("cluster")


def num_cpus():
    """Return the number of CPU slots of the cluster, at least 8."""
    return int(ray.cluster_resources()["CPU"])


@contextmanager
def reserved(**sections):
    """Reserve the pools of a placement for a block."""
    config = PlacementConfig.model_validate(sections)
    pools = reserve_pools(config, config.all_pools)
    try:
        yield pools
    finally:
        remove_placement_group(pools["main"].group)


def test_slots_are_bundles_in_order_on_this_node():
    with reserved(slots_per_node=3) as pools:
        slots = pools["main"]
        assert slots.device == "cpu"
        assert [slot.bundle for slot in slots.slots] == [0, 1, 2]
        assert {slot.node for slot in slots.slots} == {ray.get_runtime_context().get_node_id()}
        assert {(slot.cpus, slot.gpus, slot.gpu_id) for slot in slots.slots} == {(1.0, 0.0, None)}


def test_pools_are_reserved_together():
    with reserved(slots_per_node=2, pools={"b": {"slots_per_node": 3}}, critic={"pool": "b"}) as pools:
        bundles = {name: [slot.bundle for slot in pool.slots] for name, pool in pools.items()}
        assert bundles == {"main": [0, 1], "b": [2, 3, 4]}
        table = placement_group_table(pools["b"].group)["bundles_to_node_id"]
        assert [table[slot.bundle] for slot in pools["b"].slots] == [slot.node for slot in pools["b"].slots]


def test_more_slots_than_the_cluster_has_are_a_configuration_error():
    with expect_error(ConfigError, "=", "CPU", "1", "0", "placement", "cluster"):
        reserve(PlacementConfig(slots_per_node=num_cpus() + 1))


def test_slots_in_use_are_waited_for_until_the_timeout():
    message = r"^placement needs 6 slots of .* within 0\.5 s; unused resources: \{"
    with reserved(slots_per_node=num_cpus() - 3), pytest.raises(WorkerError, match=message):
        reserve(PlacementConfig(slots_per_node=6, start_timeout_seconds=0.5))


class Holder:
    """An actor that Ray restarts."""

    def hold(self):
        return len(self._reserve().slots)

    def release(self):
        remove_placement_group(self._reserve().group)

    def _reserve(self):
        return reserve(PlacementConfig(slots_per_node=num_cpus() - 3, start_timeout_seconds=HANG_SECONDS))

    def pid(self):
        return os.getpid()


def test_restarted_actor_takes_over_its_slots():
    holder = ray.remote(Holder).options(num_cpus=0, max_restarts=-1, max_task_retries=-1).remote()
    for _ in range(2):
        assert ray.get(holder.hold.remote(), timeout=HANG_SECONDS) > num_cpus() / 2
        os.kill(ray.get(holder.pid.remote()), signal.SIGKILL)
    assert ray.get(holder.hold.remote(), timeout=HANG_SECONDS) > num_cpus() / 2
    ray.get(holder.release.remote(), timeout=HANG_SECONDS)
    ray.kill(holder)


@pytest.mark.parametrize(
    ("device", "gpus", "expected"),
    [("auto", 0, "cpu"), ("auto", 1, "cpu"), ("auto", 2, "cuda"), ("cuda", 2, "cuda"), ("cpu", 8, "cpu")],
)
def test_device_is_cuda_if_the_cluster_has_enough_gpus(device, gpus, expected):
    config = PlacementConfig.model_validate({"slots_per_node": 2, "device": device})
    assert resolve_device(config, [_node("a", gpus // 2), _node("b", gpus - gpus // 2)]) == expected
    with expect_error(ConfigError, "placement.device", "2 GPUs", "0"):
        resolve_device(PlacementConfig(slots_per_node=2, device="cuda"), [_node("a", 0)])


def test_address_where_no_cluster_answers_is_a_configuration_error(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    with expect_error(ConfigError, "RAY_ADDRESS=127.0.0.1:1", "Ray"):
        start_cluster(PlacementConfig())

    def refuse(**_):
        raise ConnectionError("Could not find any running Ray instance")

    monkeypatch.setenv("RAY_ADDRESS", "auto")  # which only Ray can parse
    monkeypatch.setattr(pool.ray, "init", refuse)
    with expect_error(ConfigError, "RAY_ADDRESS=auto", "Ray", "Could"):
        start_cluster(PlacementConfig())


START_SLOWLY = """
from types import SimpleNamespace
import ray, ray._private.node, time
from ray._private import services
from megarl.config.placement import PlacementConfig
from megarl.errors import WorkerError
from megarl.cluster.placement import pool
from megarl.cluster.placement import pool

clock = SimpleNamespace(seconds=0.0)
virtual = SimpleNamespace(**{**vars(time), "monotonic": lambda: clock.seconds})
pool.time = ray._private.node.time = virtual
registered = services.get_node

def register_after(seconds):
    def get_node(*args):
        clock.seconds += 10
        if clock.seconds < seconds:
            raise RuntimeError("node not found")
        return registered(*args)
    services.get_node = get_node

register_after(1000)
try:
    pool.start_cluster(PlacementConfig(start_timeout_seconds=200))
except WorkerError as e:
    print(e, "at", clock.seconds)
clock.seconds = 0.0
register_after(150)
print(pool.start_cluster(PlacementConfig(start_timeout_seconds=200)), clock.seconds >= 150)
print(ray.get(ray.remote(lambda: "works").remote()))
"""


def test_local_cluster_may_take_the_whole_start_timeout():
    env = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    program = subprocess.run([sys.executable, "-c", START_SLOWLY], env=env, capture_output=True, text=True, check=True)
    assert program.stdout.splitlines() == [
        "Ray did not start within 200 s (placement.start_timeout_seconds) at 200.0",
        "True True",
        "works",
    ]


def _node(name, gpus):
    return ClusterNode(id=name, address="10.0.0.1", hostname=name, cpus=4, gpus=gpus)
