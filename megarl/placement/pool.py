"""Slot pools: the GPUs, or CPU slots, that a run reserves in the Ray cluster."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.util.placement_group import get_placement_group, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from megarl.config.placement import MAIN_POOL, PlacementConfig, PoolConfig
from megarl.errors import ConfigError, WorkerError
from megarl.placement.assign import assign_nodes, resolve_device
from megarl.placement.hardware import inline_environment, object_store_bytes
from megarl.placement.node_start import node_start
from megarl.placement.nodes import GPU_LABEL, cluster_nodes

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
