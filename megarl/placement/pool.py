"""Slots that the run owns: GPUs of the cluster, or worker processes on machines without."""

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
from megarl.placement.hardware import store_bytes
from megarl.placement.nodes import cluster_nodes

SPARE_CPUS = 2
"""CPU slots that a local cluster gets beyond the pool's, for the controller and light workers."""

MOST_STORE = 2 * 2**30
"""Bytes of a local cluster's object store."""

ANSWER_SECONDS = 10.0
"""How long a connection to a cluster may take."""

NODE_ID_LABEL = "ray.io/node-id"
"""Ray's own label of every node."""


@dataclass(frozen=True, slots=True)
class Slot:
    """Room for one trainer rank."""

    bundle: int
    """Index in the placement group."""
    cpus: float
    gpus: float
    node: str
    """Ray's id of the machine."""
    gpu_id: int | None
    """Index of the GPU on its machine; None without one."""


@dataclass(frozen=True, slots=True)
class SlotPool:
    """The slots of a pool, in rank order."""

    group: Any
    """Ray's placement group of the whole run, one bundle a slot."""
    slots: tuple[Slot, ...]
    device: str
    """`cpu` or `cuda`."""

    def part(self, slots: Sequence[int]) -> SlotPool:
        """The slots at these places, in this order; they stay slots of the whole pool as well."""
        return replace(self, slots=tuple(self.slots[i] for i in slots))


def start_cluster(config: PlacementConfig) -> bool:
    """Join the cluster at RAY_ADDRESS, or start one on this machine; True where it was started here."""
    address = os.environ.get("RAY_ADDRESS")
    quiet = {"logging_level": "error", "log_to_driver": False}
    if address:
        try:
            _require_listener(address)
            ray.init(address=address, **quiet)
        except OSError as e:
            why = e.strerror.lower() if e.strerror else str(e)  # Ray's own errors are no errno's
            raise ConfigError(f"RAY_ADDRESS={address}: no Ray cluster answers there: {why}") from e
        return False
    cpus = max(os.cpu_count() or 1, config.all_slots + SPARE_CPUS)
    ray.init(
        address="local",
        num_cpus=cpus,
        include_dashboard=False,
        object_store_memory=store_bytes(most=MOST_STORE),
        **quiet,
    )
    return True


def _require_listener(address: str) -> None:
    """Return where somebody listens; Ray itself would try for minutes. Addresses such as `auto` are Ray's to read.

    Raises:
        OSError: nobody listens there.
    """
    host, _, port = address.rpartition(":")
    if host and "/" not in host and port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), timeout=ANSWER_SECONDS).close()


def reserve(config: PlacementConfig) -> SlotPool:
    """The slots of a run that has but one pool; see `reserve_pools`."""
    assert not config.pools, f"reserve_pools is for {sorted(config.pools)}"
    return reserve_pools(config, config.all_pools)[MAIN_POOL]


def reserve_pools(config: PlacementConfig, pools: Mapping[str, PoolConfig]) -> dict[str, SlotPool]:
    """Wait for the cluster to grant the slots of `pools` at once.

    Raises:
        ConfigError: it does not have them, by pool.
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
        name=_release_former_slots(),
        bundle_label_selector=[{NODE_ID_LABEL: node.id} for _, node in places],
    )
    if not group.wait(config.start_timeout_seconds):
        remove_placement_group(group)  # or it would be granted later, to nobody
        have = {k: v for k, v in ray.available_resources().items() if k in ("CPU", "GPU")}
        raise WorkerError(
            f"placement needs {len(places)} slots of {bundle}, the cluster did not grant them within "
            f"{config.start_timeout_seconds:g} s; it has {have} that nobody uses"
        )
    gpu_ids = _gpu_ids(group, len(places)) if gpus else [None] * len(places)
    slots = [Slot(i, 1.0, gpus, node.id, gpu_ids[i]) for i, (_, node) in enumerate(places)]
    granted = {}
    for name, of_pool in chosen.items():
        order = {node.id: i for i, node in enumerate(of_pool)}
        mine = [slot for slot, (pool, _) in zip(slots, places, strict=True) if pool == name]
        # neighbours among ranks are neighbours among GPUs
        mine.sort(key=lambda slot: (order[slot.node], -1 if slot.gpu_id is None else slot.gpu_id, slot.bundle))
        granted[name] = SlotPool(group, tuple(mine), device)
    return granted


def _release_former_slots() -> str:
    """A name for the slots of this actor, from which those of its earlier life are taken: Ray keeps them for it.

    Empty in a driver, whose slots end with it.
    """
    actor = ray.get_runtime_context().get_actor_id()
    if actor is None:
        return ""
    name = f"slots of {actor}"
    try:
        former = get_placement_group(name)
    except ValueError:
        return name  # there are none
    remove_placement_group(former)
    return name


def _gpu_ids(group: Any, count: int) -> list[int | None]:
    """By bundle, the index of its GPU on its machine."""

    def look() -> int:
        return int(ray.get_gpu_ids()[0])

    task = ray.remote(look)
    strategies = [PlacementGroupSchedulingStrategy(group, bundle) for bundle in range(count)]
    found: list[int | None] = ray.get(
        [task.options(num_cpus=1, num_gpus=1, scheduling_strategy=strategy).remote() for strategy in strategies]
    )
    return found
