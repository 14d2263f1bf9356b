"""Placement of a run's engines on slots, as `megarl reshard explain` plans it."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

from megarl.config import RunConfig
from megarl.errors import ConfigError
from megarl.megatron.families.load_architecture import load_architecture_and_dtype
from megarl.megatron.families.trainer_layouts import trainer_layouts
from megarl.placement.pool import Slot, SlotPool
from megarl.placement.rank_grid import RankGrid
from megarl.reshard.layout.engine_ranks import (
    EnginePlacement,
    TensorGroup,
    can_place_strided,
    place_engines_by_overlap,
    place_engines_consecutively,
    place_engines_strided,
    require_single_node_groups,
    resolve_strategy,
)
from megarl.reshard.layout.quantized_layout import quantize_sources
from megarl.reshard.layout.topology import Topology
from megarl.rollout.engine_spec import make_engine_spec


def pool_topology(pool: SlotPool) -> Topology:
    """Return the node index of each slot, which is that of each trainer rank."""
    return Topology(node_indices(pool.slots))


def node_indices(slots: Iterable[Slot]) -> tuple[int, ...]:
    """Return the node index of each slot, numbered in the order of appearance."""
    number: dict[str, int] = {}
    return tuple(number.setdefault(slot.node, len(number)) for slot in slots)


def place_dedicated_engines(config: RunConfig, pool: SlotPool) -> list[TensorGroup]:
    """Return [engine][tensor rank] -> slot for engines with a pool of their own.

    An engine has consecutive slots of one node, or all slots of `nodes_per_engine` consecutive nodes.

    Raises:
        ConfigError: the nodes have too few slots.
    """
    tp, replicas, nodes = config.rollout.tp, config.rollout.replicas, pool_topology(pool).nodes
    slots_of_nodes = [[slot for slot, at in enumerate(nodes) if at == node] for node in range(len(set(nodes)))]
    spanned = config.nodes_per_engine
    groups: list[TensorGroup] = []
    for first in range(0, len(slots_of_nodes) - spanned + 1, spanned):
        here = list(chain.from_iterable(slots_of_nodes[first : first + spanned]))
        groups += [tuple(here[i : i + tp]) for i in range(0, len(here) - tp + 1, tp)]
    if len(groups) < replicas:
        where = "one node" if spanned == 1 else f"{spanned} nodes"
        raise ConfigError(
            f"rollout.replicas: each engine needs rollout.tp = {tp} slots of {where}, which the pool has "
            f"for {len(groups)} engines, got {replicas}"
        )
    return groups[:replicas]


def place_engines(config: RunConfig, pool: SlotPool, grid: RankGrid) -> list[TensorGroup]:
    """Return [engine][tensor rank] -> trainer rank on whose slot it runs, for colocated engines.

    An engine stays on one node, because weights are passed on in shared memory.

    Raises:
        ConfigError: `micro_dp` does not support these sizes on these nodes, or an engine fits on no node.
    """
    tp, replicas, topology = config.rollout.tp, config.rollout.replicas, pool_topology(pool)
    strategy = resolve_strategy(config.weight_sync.strategy, grid, topology, gen_tp=tp)
    match strategy:
        case "gather_hf":
            placements = place_engines_consecutively(replicas, gen_tp=tp)
        case "exact" if not can_place_strided(grid, topology, gen_tp=tp):
            return _tensor_groups(_place_by_overlap(config, pool.device, grid, topology))
        case _:
            placements = place_engines_strided(grid, gen_tp=tp)[:replicas]
    require_single_node_groups(strategy, placements, topology)
    return _tensor_groups(placements)


def _tensor_groups(placements: Iterable[EnginePlacement]) -> list[TensorGroup]:
    return [group for (group,) in placements]


def _place_by_overlap(config: RunConfig, device: str, grid: RankGrid, topology: Topology) -> list[EnginePlacement]:
    """Place engines where their ranks already hold most of what they need.

    Neither side has been built yet: the trainer's layouts come from its architecture, the engine's from a trace.
    """
    from megarl.rollout.sglang.weight_layout.offline_trace import trace_layouts  # imports torch

    model, _ = load_architecture_and_dtype(config.model.path, family=config.model.family)
    tp, dtype = config.rollout.tp, make_engine_spec(config, 0, device).dtype
    engine = trace_layouts(config.model.path, tp=tp, ep=config.rollout.engine.ep_size, device=device, dtype=dtype)
    sources = quantize_sources(trainer_layouts(model, grid, dtype), engine)
    return place_engines_by_overlap(sources, [engine], replicas=config.rollout.replicas, topology=topology)
