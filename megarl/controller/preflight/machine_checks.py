"""Checks of GPUs, slots, ports, packages and folders, and of schedules on these, without starting a process."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

from megarl.cluster.placement.assign import ClusterNode, assign_nodes, resolve_device
from megarl.cluster.placement.hardware import GpuType, find_gpu_type, package_version, visible_gpu_names
from megarl.cluster.placement.rank_grid import RankGrid
from megarl.cluster.process.launcher_env import torchrun_world
from megarl.cluster.process.ports import is_port_free
from megarl.config.algorithm import DapoConfig, PrimeConfig
from megarl.config.engine_options import find_variable_problems
from megarl.config.placement import PlacementConfig, pool_key
from megarl.config.run import RunConfig, StageConfig
from megarl.engines.engine_spec import PORTS_PER_REPLICA
from megarl.errors import ConfigError


def find_local_gpu_problems(config: StageConfig) -> Iterator[str]:
    """Find a lack of GPUs on this node, if all workers will run on it."""
    placement = config.placement
    # The GPUs of a joined cluster and of torchrun's other nodes are not visible here.
    if placement.device == "cuda" and "RAY_ADDRESS" not in os.environ and torchrun_world() is None:
        gpus = len(visible_gpu_names())
        if gpus < placement.total_slots:
            pools = f", with placement.pools {placement.total_slots}" if placement.pools else ""
            yield (
                f"placement.device: cuda needs nodes * slots_per_node = {placement.nodes} * "
                f"{placement.slots_per_node} = {placement.slots}{pools} GPUs, this machine has {gpus} (RAY_ADDRESS "
                "joins a cluster)"
            )


def find_local_gpu_types(device: str | None) -> list[GpuType]:
    """Return the types of this node's GPUs whose layers would be Transformer Engine's; empty if workers run elsewhere.

    Args:
        device: as `find_device` returns it.
    """
    if device != "cuda" or "RAY_ADDRESS" in os.environ or package_version("transformer-engine") is None:
        return []
    return [gpu for gpu in map(find_gpu_type, visible_gpu_names()) if gpu is not None]


def find_device(placement: PlacementConfig, nodes: Sequence[ClusterNode] | None) -> str | None:
    """Return `cpu` or `cuda`; None if only the cluster to be joined can tell, in which case the engines check again."""
    if placement.device != "auto":
        return placement.device
    if nodes is not None:
        return resolve_device(placement, nodes)
    if "RAY_ADDRESS" in os.environ:
        return None
    return "cuda" if len(visible_gpu_names()) >= placement.total_slots else "cpu"


def find_allocation_problems(placement: PlacementConfig, nodes: Sequence[ClusterNode]) -> Iterator[str]:
    """Find slots that cannot be assigned to the nodes of a cluster."""
    try:
        assign_nodes(placement.all_pools, nodes, resolve_device(placement, nodes))
    except ConfigError as e:
        yield str(e)


def find_engine_placement_problems(config: RunConfig) -> Iterator[str]:
    """Find engines that fit on no node, or that weight_sync.strategy would spread over nodes.

    This assumes that slots fill the nodes in order; the cluster may assign them otherwise.
    """
    placement, tp, replicas, pool = config.placement, config.rollout.tp, config.rollout.replicas, config.rollout_pool
    per_node = pool.slots_per_node // tp
    if config.nodes_per_engine == 1 and pool.nodes * per_node < replicas:
        of_pool = f" of {pool_key(placement.rollout.pool)}" if config.disaggregated else ""
        yield (
            f"rollout.replicas: engines need rollout.tp = {tp} slots of one node each, got replicas = {replicas} > "
            f"nodes * (slots_per_node // tp){of_pool} = {pool.nodes} * ({pool.slots_per_node} // {tp}) = "
            f"{pool.nodes * per_node}"
        )
    if config.weight_sync.strategy != "micro_dp":
        return
    # imports torch, which most checks do without
    from megarl.reshard.layout.engine_ranks import place_engines_strided, require_single_node_groups
    from megarl.reshard.layout.topology import Topology

    grid = RankGrid.of(config.trainer.parallel, placement.slots)
    topology = Topology(tuple(rank // placement.slots_per_node for rank in range(placement.slots)))
    try:
        servers = place_engines_strided(grid, gen_tp=tp)[:replicas]
    except ConfigError as e:
        yield f"weight_sync.strategy: {e}"
        return
    try:
        require_single_node_groups("micro_dp", servers, topology)
    except ConfigError as e:
        yield str(e)


def find_schedule_problems(config: RunConfig, device: str | None) -> Iterator[str]:
    """Yield a sentence for each setting with which the schedule cannot work.

    Args:
        device: of the engines, `cpu` or `cuda`; None: unknown.
    """
    schedule = config.schedule.resolved()
    if schedule.type == "sync":
        return
    yield from config.schedule.engine_problems(config.rollout.engine)
    releases_memory = device is not None and config.releases_engine_memory(device)
    if schedule.update == "in_place" and releases_memory:
        yield (
            "schedule.update: in_place keeps the KV cache of running requests, but engines that share the trainer's "
            "devices release it: give them a pool of their own (placement.rollout.pool), set "
            "rollout.engine.release_memory: false, or use update: retract"
        )
    if schedule.update == "drain" and releases_memory:
        yield (
            "schedule.update: drain waits for requests after the training of a step, when engines that share the "
            "trainer's devices have released their memory: give them a pool of their own (placement.rollout.pool), set "
            "rollout.engine.release_memory: false, or use schedule.type: async with update: retract"
        )
    if isinstance(config.algorithm, DapoConfig | PrimeConfig) and (models := sorted(config.reward.models)):
        yield (
            f"schedule.type: {schedule.type} filters groups by rules as they finish, but reward.terms.{models[0]} is a "
            f"model, which scores whole batches: {config.algorithm.type} needs rules only, or schedule.type: sync"
        )


def find_profile_problems(config: StageConfig) -> Iterator[str]:
    """Find ranks to be traced that the trainer does not have."""
    profile, slots = config.trainer.profile, config.placement.slots
    for rank in () if profile is None else profile.ranks:
        if not 0 <= rank < slots:
            yield f"trainer.profile.ranks: the trainer has ranks 0 to {slots - 1}, got {rank}"


def find_port_problems(config: RunConfig) -> Iterator[str]:
    """Find ports of rollout.engine.base_port that are out of range or in use on this node."""
    base = config.rollout.engine.base_port
    # On several nodes, it is not known here which node runs a replica.
    if base is None or config.rollout_pool.nodes > 1 or "RAY_ADDRESS" in os.environ:
        return
    for replica in range(config.rollout.replicas):
        port = base + PORTS_PER_REPLICA * replica
        sum_ = f"{base} + {PORTS_PER_REPLICA} * {replica} = {port}"
        if port > 65535:
            yield f"rollout.engine.base_port: replica {replica} needs a port up to 65535, got {sum_}"
        elif not is_port_free(port):
            yield f"rollout.engine.base_port: replica {replica} needs a free port, {sum_} is in use"


def find_engine_variable_problems() -> Iterator[str]:
    """Find environment variables of this process that engines would have too, and must not have."""
    yield from find_variable_problems(os.environ)


def find_package_problems(config: StageConfig) -> Iterator[str]:
    """Find configured trackers whose package is not installed."""
    # find_spec alone is not enough: W&B's own output folder, wandb/, imports as an empty package.
    wandb = find_spec("wandb")
    if config.tracking.wandb is not None and (wandb is None or wandb.origin is None):
        yield "tracking.wandb: needs the package wandb, which is not installed"


def find_folder_problems(config: StageConfig) -> Iterator[str]:
    """Find output folders that cannot be created or written."""
    for key, folder in (("run_dir", config.run_dir), ("export_dir", config.export_path)):
        existing = Path(folder)
        while not existing.exists() and existing != existing.parent:
            existing = existing.parent
        if not existing.is_dir():
            yield f"{key}: {folder} cannot be made, {existing} is not a folder"
        elif not os.access(existing, os.W_OK | os.X_OK):
            yield f"{key}: {folder} needs a folder that can be written, {existing} cannot"
