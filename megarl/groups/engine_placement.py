"""Which trainer rank serves which rank of which engine in a run: what `megarl reshard explain` plans for."""

from __future__ import annotations

from collections.abc import Iterable

from megarl.config import RunConfig
from megarl.errors import ConfigError
from megarl.megatron.families.load_architecture import read_model
from megarl.megatron.families.trainer_layouts import trainer_layouts
from megarl.placement.pool import Slot, SlotPool
from megarl.placement.rank_grid import RankGrid
from megarl.reshard.layout.engine_ranks import (
    Servers,
    TensorGroup,
    consecutive_servers,
    fits_strided,
    overlapping_servers,
    require_one_machine,
    resolve_strategy,
    strided_servers,
)
from megarl.reshard.layout.topology import Topology
from megarl.rollout.engine_spec import engine_spec
from megarl.rollout.sglang.weight_layout.offline_trace import trace_layouts


def machines(pool: SlotPool) -> Topology:
    """By trainer rank, the machine of its slot."""
    return Topology(number_machines(pool.slots))


def number_machines(slots: Iterable[Slot]) -> tuple[int, ...]:
    """By slot, the number of its machine."""
    number: dict[str, int] = {}
    return tuple(number.setdefault(slot.node, len(number)) for slot in slots)


def own_servers(config: RunConfig, pool: SlotPool) -> list[TensorGroup]:
    """[engine][tensor rank] -> slot of `pool`, which the engines have to themselves: neighbours on one machine.

    Raises:
        ConfigError: the machines have too few slots.
    """
    tp, replicas, nodes = config.rollout.tp, config.rollout.replicas, machines(pool).nodes
    groups: list[TensorGroup] = []
    for node in sorted(set(nodes)):
        here = [slot for slot, at in enumerate(nodes) if at == node]
        groups += [tuple(here[i : i + tp]) for i in range(0, len(here) - tp + 1, tp)]
    if len(groups) < replicas:
        raise ConfigError(
            f"rollout.replicas: engines need rollout.tp = {tp} slots of one machine each, which the pool has "
            f"for {len(groups)}, got {replicas}"
        )
    return groups[:replicas]


def choose_servers(config: RunConfig, pool: SlotPool, grid: RankGrid) -> list[TensorGroup]:
    """[engine][tensor rank] -> trainer rank that serves it, on the same machine: buckets cross in shared memory.

    Raises:
        ConfigError: `micro_dp` does not serve these sizes on these machines, or an engine fits no machine.
    """
    tp, replicas, topology = config.rollout.tp, config.rollout.replicas, machines(pool)
    strategy = resolve_strategy(config.weight_sync.strategy, grid, topology, gen_tp=tp)
    match strategy:
        case "gather_hf":
            servers = consecutive_servers(replicas, gen_tp=tp)
        case "exact" if not fits_strided(grid, topology, gen_tp=tp):
            return _groups(_overlapping_servers(config, pool.device, grid, topology))
        case _:
            servers = strided_servers(grid, gen_tp=tp)[:replicas]
    require_one_machine(strategy, servers, topology)
    return _groups(servers)


def _groups(servers: Iterable[Servers]) -> list[TensorGroup]:
    return [group for (group,) in servers]


def _overlapping_servers(config: RunConfig, device: str, grid: RankGrid, topology: Topology) -> list[Servers]:
    """By both sides' layouts, before either is built: the trainer's from its family's table, the engine's traced."""
    model, _ = read_model(config.model.path)
    tp, dtype = config.rollout.tp, engine_spec(config, 0, device).dtype
    engine = trace_layouts(config.model.path, tp=tp, device=device, dtype=dtype)
    sources = trainer_layouts(model, grid, dtype)
    return overlapping_servers(sources, [engine], replicas=config.rollout.replicas, topology=topology)
