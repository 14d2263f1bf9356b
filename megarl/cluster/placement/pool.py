"""Slot pools: the GPUs, or CPU slots, that a run reserves in the Ray cluster."""

from __future__ import annotations

import inspect
import os
import re
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray
from ray._private import services
from ray._raylet import persist_port  # type: ignore[attr-defined]
from ray.util.placement_group import get_placement_group, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from megarl.cluster.placement.assign import GPU_LABEL, assign_nodes, cluster_nodes, resolve_device
from megarl.cluster.placement.hardware import inline_environment, object_store_bytes
from megarl.cluster.process.ports import find_unused_ports
from megarl.config.placement import MAIN_POOL, PlacementConfig, PoolConfig
from megarl.errors import ConfigError, WorkerError

LISTEN_PORT = "dashboard_agent_listen_port"
AGENT_PORTS = ("metrics_agent_port", "metrics_export_port", LISTEN_PORT, "runtime_env_agent_port")
"""Parameters of Ray's `start_raylet` with the ports of the raylet's two agents."""

_FAILURE = re.compile(r"\[[^]]* [CEF] [^]]*\] \(raylet\) ")
"""Beginning of a line in the raylet's log that reports an error."""


@contextmanager
def node_start(seconds: float, limit_name: str) -> Iterator[None]:
    """Let the Ray node that is started within the block take up to `seconds`; stop waiting when its raylet has ended.

    Ray itself waits 30 s for a node, and its raylet aborts when an agent, a Python program with many imports, needs
    more than 15 s to choose its ports (ray-project/ray#65983). So the ports are chosen here, and the raylet need not
    wait. Ray looks a node up for up to 30 s (RAY_raylet_start_wait_time_s), so that the block may end that much later.

    Args:
        limit_name: name of the time limit in messages.

    Raises:
        WorkerError: the raylet ended, with the end of its log, or the node did not start in time.
    """
    get_node, start_raylet = services.get_node, services.start_raylet
    deadline = time.monotonic() + seconds
    raylet: Any = None
    logs: list[str | None] = []

    def start_raylet_with_ports(*args: Any, **kwargs: Any) -> Any:
        nonlocal raylet, logs
        given = inspect.signature(start_raylet).bind(*args, **kwargs).arguments
        given |= zip(AGENT_PORTS, find_unused_ports(len(AGENT_PORTS)), strict=True)
        # Ray passes this port to the agent only; the raylet looks for it in the file that the agent writes
        persist_port(given["session_dir"], given["node_id"], LISTEN_PORT, given[LISTEN_PORT])
        # time that the raylet gives its agents to answer, from the first request on; 30 s by default
        patience = {"RAY_agent_register_timeout_ms": f"{1000 * seconds:.0f}"}
        given["env_updates"] = patience | (given.get("env_updates") or {})
        logs = [given.get("raylet_stdout_filepath"), given.get("raylet_stderr_filepath")]
        started = start_raylet(**given)
        raylet = started.process
        return started

    def wait_for_node(gcs_address: str, node_id: str) -> Any:
        while True:
            try:
                return get_node(gcs_address, node_id)
            except RuntimeError as e:  # the node is not registered yet
                if raylet is not None and (code := raylet.poll()) is not None:
                    how = f"signal {-code}" if code < 0 else f"exit code {code}"
                    raise WorkerError(f"Ray did not start: its raylet ended with {how}: {_read_failure(logs)}") from e
                if time.monotonic() >= deadline:
                    raise WorkerError(f"Ray did not start within {seconds:g} s ({limit_name})") from e

    services.get_node, services.start_raylet = wait_for_node, start_raylet_with_ports
    try:
        yield
    finally:
        services.get_node, services.start_raylet = get_node, start_raylet


def _read_failure(logs: list[str | None]) -> str:
    """Return the last error that the raylet reported in `logs`, or the last line; name the logs if they are empty."""
    lines = [line for log in logs if log for line in Path(log).read_text(errors="replace").splitlines() if line.strip()]
    failures = [line for line in lines if _FAILURE.match(line)]
    return (failures or lines or [f"its logs {logs} are empty"])[-1].strip()


SPARE_CPUS = 2
"""CPU slots of a local cluster beyond those of the pools, for the controller and light workers."""

MAX_OBJECT_STORE_BYTES = 2 * 2**30
"""Maximum size of a local cluster's object store."""

CONNECT_TIMEOUT_SECONDS = 10.0
"""Timeout for the connection to a cluster."""

NODE_ID_LABEL = "ray.io/node-id"
"""Node label that Ray itself sets on every node."""


@dataclass(frozen=True, slots=True)
class Slot:
    """The resources of one trainer rank."""

    bundle: int
    """Index in the placement group."""
    cpus: float
    gpus: float
    node: str
    """Ray's id of the node."""
    gpu_id: int | None
    """Index of the GPU on its node; None for a CPU slot."""


@dataclass(frozen=True, slots=True)
class SlotPool:
    """The slots of a pool, in rank order."""

    group: Any
    """Ray placement group of the run, with one bundle per slot."""
    slots: tuple[Slot, ...]
    device: str
    """Device type of the slots: `cpu` or `cuda`."""
    gpus: tuple[str, ...] = ()
    """Names of the types of GPUs of the slots' nodes, as far as Ray knows them."""

    def subset(self, slots: Sequence[int]) -> SlotPool:
        """Return a pool of the slots at these indices, in this order; they also remain slots of this pool."""
        return replace(self, slots=tuple(self.slots[i] for i in slots))


def start_cluster(config: PlacementConfig) -> bool:
    """Connect to the cluster at RAY_ADDRESS or start a local one; return True if it was started here.

    Raises:
        ConfigError: no cluster answers at RAY_ADDRESS.
        WorkerError: the local cluster did not start, or not within `start_timeout_seconds`.
    """
    address = os.environ.get("RAY_ADDRESS")
    quiet = {"logging_level": "error", "log_to_driver": False}
    if address:
        try:
            _check_is_listening(address)
            ray.init(address=address, **quiet)
        except OSError as e:
            why = e.strerror.lower() if e.strerror else str(e)  # Ray's own errors have no errno
            raise ConfigError(f"RAY_ADDRESS={address}: no Ray cluster answers there: {why}") from e
        return False
    os.environ |= inline_environment()
    cpus = max(os.cpu_count() or 1, config.total_slots + SPARE_CPUS)
    with node_start(config.start_timeout_seconds, "placement.start_timeout_seconds"):
        ray.init(
            address="local",
            num_cpus=cpus,
            include_dashboard=False,
            object_store_memory=object_store_bytes(max_bytes=MAX_OBJECT_STORE_BYTES),
            **quiet,
        )
    return True


def _check_is_listening(address: str) -> None:
    """Check that something listens at `address`, since Ray would retry for minutes; skip addresses such as `auto`.

    Raises:
        OSError: nothing listens there.
    """
    host, _, port = address.rpartition(":")
    if host and "/" not in host and port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_TIMEOUT_SECONDS).close()


def reserve(config: PlacementConfig) -> SlotPool:
    """Reserve the slots of a run with a single pool, as `reserve_pools` does."""
    assert not config.pools, f"use reserve_pools for the pools {sorted(config.pools)}"
    return reserve_pools(config, config.all_pools)[MAIN_POOL]


def reserve_pools(config: PlacementConfig, pools: Mapping[str, PoolConfig]) -> dict[str, SlotPool]:
    """Reserve the slots of `pools` in one placement group; wait until the cluster grants them.

    Raises:
        ConfigError: the cluster has too few slots for a pool.
        WorkerError: it did not grant them within `start_timeout_seconds`.
    """
    nodes = cluster_nodes()
    device = resolve_device(config, nodes)
    chosen = assign_nodes(pools, nodes, device)
    gpus = 1.0 if device == "cuda" else 0.0
    bundle = {"CPU": 1.0, "GPU": gpus} if gpus else {"CPU": 1.0}
    places = [
        (name, node) for name, of_pool in chosen.items() for node in of_pool for _ in range(pools[name].slots_per_node)
    ]
    group = placement_group(
        [bundle] * len(places),
        strategy="PACK",
        name=_release_previous_slots(),
        bundle_label_selector=[{NODE_ID_LABEL: node.id} for _, node in places],
    )
    if not group.wait(config.start_timeout_seconds):
        remove_placement_group(group)  # otherwise it would be granted later and stay unused
        have = {k: v for k, v in ray.available_resources().items() if k in ("CPU", "GPU")}
        raise WorkerError(
            f"placement needs {len(places)} slots of {bundle}, the cluster did not grant them within "
            f"{config.start_timeout_seconds:g} s; unused resources: {have}"
        )
    gpu_ids = _gpu_ids(group, len(places)) if gpus else [None] * len(places)
    slots = [Slot(i, 1.0, gpus, node.id, gpu_ids[i]) for i, (_, node) in enumerate(places)]
    granted = {}
    for name, of_pool in chosen.items():
        order = {node.id: i for i, node in enumerate(of_pool)}
        mine = [slot for slot, (pool, _) in zip(slots, places, strict=True) if pool == name]
        # adjacent ranks get adjacent GPUs
        mine.sort(key=lambda slot: (order[slot.node], -1 if slot.gpu_id is None else slot.gpu_id, slot.bundle))
        types = dict.fromkeys(node.labels[GPU_LABEL] for node in of_pool if GPU_LABEL in node.labels)
        granted[name] = SlotPool(group, tuple(mine), device, tuple(types))
    return granted


def _release_previous_slots() -> str:
    """Release the placement group that this actor held before Ray restarted it; return the name for the new one.

    Ray keeps an actor's placement groups over a restart. The name is empty in a driver, whose slots end with it.
    """
    actor = ray.get_runtime_context().get_actor_id()
    if actor is None:
        return ""
    name = f"slots of {actor}"
    try:
        former = get_placement_group(name)
    except ValueError:
        return name  # this actor has no slots yet
    remove_placement_group(former)
    return name


def _gpu_ids(group: Any, count: int) -> list[int | None]:
    """Return for each bundle the index of its GPU on its node."""

    def look() -> int:
        return int(ray.get_gpu_ids()[0])

    task = ray.remote(look)
    strategies = [PlacementGroupSchedulingStrategy(group, bundle) for bundle in range(count)]
    found: list[int | None] = ray.get(
        [task.options(num_cpus=1, num_gpus=1, scheduling_strategy=strategy).remote() for strategy in strategies]
    )
    return found
