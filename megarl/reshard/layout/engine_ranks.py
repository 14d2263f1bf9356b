"""Which trainer rank serves which rank of which engine.

The tensor ranks of one pipeline stage of an engine (a tensor group) share a machine; its stages may lie on several.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from scipy.optimize import linear_sum_assignment

from megarl.errors import ConfigError
from megarl.placement.rank_grid import RankGrid
from megarl.reshard.layout.layout import WeightLayout
from megarl.reshard.layout.micro_dp import strided_places
from megarl.reshard.layout.overlap import Ints, layout_bytes, overlap_bytes
from megarl.reshard.layout.topology import Topology

TensorGroup = tuple[int, ...]
"""By tensor rank, the trainer rank that serves it."""
Servers = tuple[TensorGroup, ...]
"""Of one engine, by pipeline stage."""


def resolve_strategy(name: str, grid: RankGrid, topology: Topology, *, gen_tp: int, gen_pp: int = 1) -> str:
    """What `auto` stands for: `micro_dp` where `fits_strided`, else `exact`."""
    if name != "auto":
        return name
    return "micro_dp" if fits_strided(grid, topology, gen_tp=gen_tp, gen_pp=gen_pp) else "exact"


def fits_strided(grid: RankGrid, topology: Topology, *, gen_tp: int, gen_pp: int = 1) -> bool:
    """True where every rank's training shard can lie inside its own generation shard, tensor groups on one machine.

    That is: the training sizes are multiples of the generation sizes, strided tensor groups span no machines, and
    routed experts are not dealt otherwise than the rest.
    """
    if grid.tp % gen_tp or grid.pp % gen_pp or grid.ep > 1 or grid.expert_tp != grid.tp:
        return False
    return spanning_group(strided_servers(grid, gen_tp=gen_tp, gen_pp=gen_pp), topology) is None


def spanning_group(servers: Iterable[Servers], topology: Topology) -> tuple[int, TensorGroup] | None:
    """The first engine that has a tensor group on several machines, and that group."""
    for engine, groups in enumerate(servers):
        for group in groups:
            if len({topology.nodes[rank] for rank in group}) > 1:
                return engine, group
    return None


def strided_servers(grid: RankGrid, *, gen_tp: int, gen_pp: int = 1) -> list[Servers]:
    """By engine, HybridFlow's grouping, over all ranks; raises as `strided_places` does."""
    places = strided_places(grid, gen_tp=gen_tp, gen_pp=gen_pp)
    by_place = {(place.replica, place.pp, place.tp): rank for rank, place in enumerate(places)}
    return [
        tuple(tuple(by_place[replica, pp, tp] for tp in range(gen_tp)) for pp in range(gen_pp))
        for replica in range(grid.size // (gen_tp * gen_pp))
    ]


def consecutive_servers(replicas: int, *, gen_tp: int) -> list[Servers]:
    """By engine, the next ranks that no other engine has."""
    return [(tuple(range(i * gen_tp, (i + 1) * gen_tp)),) for i in range(replicas)]


def overlapping_servers(
    sources: Sequence[WeightLayout],
    engine: Sequence[Sequence[WeightLayout]],
    *,
    replicas: int,
    topology: Topology,
) -> list[Servers]:
    """By engine, such that the rank that lacks most lacks as little as possible, and then all ranks together.

    Which machine gets how many tensor groups of a stage is decided one group after another, each going where it finds
    the most; which of the machine's ranks serve them is an assignment problem. Where `fits_strided`, every rank's
    training shard lies inside its generation shard, as under `micro_dp`.

    Args:
        sources: by trainer rank.
        engine: [stage][tensor rank] of one engine; engines are alike.

    Raises:
        ConfigError: the machines have too few ranks.
    """
    stages, tp = len(engine), len(engine[0])
    machines = [
        np.array([rank for rank, at in enumerate(topology.nodes) if at == node]) for node in sorted(set(topology.nodes))
    ]
    room = sum(len(ranks) // tp for ranks in machines)
    if room < replicas * stages:
        raise ConfigError(
            f"rollout needs {replicas * stages} groups of {tp} tensor ranks, each on one machine; the trainer's "
            f"machines have room for {room}"
        )
    needs = [need for stage in engine for need in stage]
    gain = overlap_bytes(sources, needs)
    lack = np.array([layout_bytes(need) for need in needs]) - gain
    gain, lack = (of_pair.reshape(len(sources), stages, tp) for of_pair in (gain, lack))
    groups: list[list[TensorGroup]] = [[] for _ in engine]
    for ranks, counts in zip(machines, _deal_groups(gain, machines, replicas), strict=True):
        for stage, found in enumerate(_assign(lack[ranks], counts) if counts.any() else ()):
            groups[stage] += [tuple(ranks[group].tolist()) for group in found]
    return list(zip(*groups, strict=True))


def _deal_groups(gain: Ints, machines: Sequence[Ints], replicas: int) -> Ints:
    """[machine, stage] -> how many of the stage's tensor groups, `replicas` over all machines.

    Args:
        gain: [rank, stage, tensor rank] -> bytes that the rank holds of it.
        machines: their ranks.
    """
    _, stages, tp = gain.shape
    counts = np.zeros((len(machines), stages), np.int64)
    free = list(machines)
    best = np.full((len(machines), stages), -1, np.int64)  # what the next group would find there; -1: no room
    taken: dict[tuple[int, int], Ints] = {}

    def look(machine: int) -> None:
        best[machine] = -1
        for stage in range(stages) if len(free[machine]) >= tp else ():
            of_stage = gain[free[machine], stage]
            rows, columns = linear_sum_assignment(of_stage, maximize=True)
            best[machine, stage] = of_stage[rows, columns].sum()
            taken[machine, stage] = rows

    for machine in range(len(machines)):
        look(machine)
    for _ in range(replicas * stages):
        open_stages = counts.sum(axis=0) < replicas
        machine, stage = divmod(int(np.where(open_stages, best, -1).argmax()), stages)
        counts[machine, stage] += 1
        free[machine] = np.delete(free[machine], taken[machine, stage])
        look(machine)
    return counts


def _assign(lack: Ints, counts: Ints) -> list[Ints]:
    """By stage, [group, tensor rank] -> rank, numbered within the machine; groups of a stage take ranks in order.

    Args:
        lack: [rank, stage, tensor rank] -> bytes that the machine's rank would have to receive.
        counts: by stage, its groups.
    """
    columns = np.repeat(lack, counts, axis=1)
    _, groups, tp = columns.shape
    rows, places = _least_maximum(columns.reshape(len(lack), groups * tp))
    rank_of = np.empty(groups * tp, np.int64)
    rank_of[places] = rows
    of_stages = np.split(rank_of.reshape(groups, tp), np.cumsum(counts)[:-1])
    return [np.sort(of_stage, axis=0) for of_stage in of_stages]


def _least_maximum(cost: Ints) -> tuple[Ints, Ints]:
    """Rows and columns of the assignment whose largest cost is least; of several, the one with the least sum."""
    limits = np.unique(cost)
    low, high = 0, len(limits) - 1
    while low < high:
        middle = (low + high) // 2
        above = cost > limits[middle]
        if above[linear_sum_assignment(above)].any():
            low = middle + 1
        else:
            high = middle
    prohibitive = (limits[-1] + 1) * (len(cost) + 1)
    rows, columns = linear_sum_assignment(np.where(cost > limits[low], prohibitive, cost))
    return rows, columns


def require_one_machine(strategy: str, servers: Iterable[Servers], topology: Topology) -> None:
    """Return if every engine is on one machine.

    Raises:
        ConfigError: `strategy` has put one on several.
    """
    found = spanning_group(servers, topology)
    if found is None:
        return
    engine, ranks = found
    nodes = {topology.nodes[rank] for rank in ranks}
    raise ConfigError(
        f"weight_sync.strategy: {strategy} puts engine {engine} on the slots of trainer ranks {list(ranks)}, which are "
        f"on {len(nodes)} machines; an engine and the ranks that serve it share one, as they do with exact"
    )
