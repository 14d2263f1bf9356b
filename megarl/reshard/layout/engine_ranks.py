"""Placement of engine ranks: which trainer rank serves which rank of which engine.

Engines have one pipeline stage, whose tensor ranks share a node.

HybridFlow's grouping of trainer ranks into generation shards and micro-DP groups (arXiv 2409.19256, section 5):
training p-t-d, generation 1-t_g; each generation shard is the union of T*p training shards, T = t/t_g.
The generation ranks are *strided*, so that every rank's training shard lies inside its own generation shard:

    t = 4, t_g = 2       training tensor rank   0 1 2 3
                         generation shard       0 0 1 1     i // T
                         replica served         0 1 0 1     i % T
    micro-DP groups      [0 1] [2 3]            all-gather within; no redundant memory
    generation TP        [0 2] [1 3]            stride T
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import lru_cache

import numpy as np

from megarl.cluster.placement.rank_grid import RankGrid
from megarl.errors import ConfigError
from megarl.reshard.layout.layout import Ints, WeightLayout, once_each
from megarl.reshard.layout.lower_bounds import NeedIndex
from megarl.reshard.layout.topology import Topology

ModelReplica = tuple[tuple[int, ...], ...]
"""Ranks of one copy of some parameters, by shard group: the ranks of a group (ascending) split the same parameters."""


TensorGroup = tuple[int, ...]
"""Trainer ranks that serve one engine, by tensor rank."""


def micro_dp_groups(grid: RankGrid, *, gen_tp: int) -> list[tuple[int, ...]]:
    """Return the groups of ranks that share a generation shard within one training replica, if `gen_tp` divides tp."""
    groups: dict[tuple[int, int, int], list[int]] = {}
    for rank in range(grid.size):
        at = grid.coordinates(rank)
        groups.setdefault((at.dp, at.cp, at.tp // (grid.tp // gen_tp)), []).append(rank)
    return [tuple(ranks) for ranks in groups.values()]


@lru_cache
def model_replicas(grid: RankGrid) -> tuple[tuple[ModelReplica, ...], ...]:
    """Return the trainer's model replicas, [kind][replica]; routed experts are a second kind if sharded differently."""
    replicas: dict[tuple[int, int], list[list[int]]] = defaultdict(lambda: [[] for _ in range(grid.pp)])
    expert_replicas: dict[int, list[list[int]]] = defaultdict(lambda: [[] for _ in range(grid.pp * grid.ep)])
    for rank in range(grid.size):
        at, expert = grid.coordinates(rank), grid.expert_coordinates(rank)
        replicas[at.dp, at.cp][at.pp].append(rank)
        expert_replicas[expert.dp][expert.pp * grid.ep + expert.ep].append(rank)
    is_uniform = grid.ep == 1 and grid.expert_tp == grid.tp
    both = [replicas.values()] if is_uniform else [replicas.values(), expert_replicas.values()]
    return tuple(tuple(tuple(map(tuple, replica)) for replica in of_kind) for of_kind in both)


def resolve_strategy(name: str, grid: RankGrid, topology: Topology, *, gen_tp: int) -> str:
    """Resolve `auto` to the strategy of the least planned seconds; return other names unchanged.

    Within a node, `micro_dp` moves as many bytes as `exact`, and between ranks of one group only. Where a micro-DP
    group spans nodes, each of its engines fetches a copy of its own over the network, and `exact` one for the node. So
    `auto` is `micro_dp` if it is possible with each group on one node, else `exact`; `benchmarks.reshard.clock`
    compares this with the planned seconds of all strategies.
    """
    if name != "auto":
        return name
    if not can_place_strided(grid, topology, gen_tp=gen_tp):
        return "exact"
    groups = micro_dp_groups(grid, gen_tp=gen_tp)
    return "micro_dp" if find_cross_node_group(groups, topology) is None else "exact"


def can_place_strided(grid: RankGrid, topology: Topology, *, gen_tp: int) -> bool:
    """Return whether every rank's training shard can lie inside its generation shard, tensor groups on one node each.

    That is: the training tp is a multiple of the generation tp, strided tensor groups do not span nodes, and routed
    experts are sharded like the other parameters.
    """
    if grid.tp % gen_tp or grid.ep > 1 or grid.expert_tp != grid.tp:
        return False
    return find_cross_node_group(place_engines_strided(grid, gen_tp=gen_tp), topology) is None


def find_cross_node_group(placements: Iterable[TensorGroup], topology: Topology) -> tuple[int, TensorGroup] | None:
    """Return the first engine whose tensor group spans several nodes, and that group; None if there is none."""
    for engine, group in enumerate(placements):
        if len({topology.nodes[rank] for rank in group}) > 1:
            return engine, group
    return None


def place_engines_strided(grid: RankGrid, *, gen_tp: int) -> list[TensorGroup]:
    """Return HybridFlow's strided placement, by engine, over all ranks.

    Raises:
        ConfigError: the sizes do not divide, so no such placement exists.
    """
    if grid.tp % gen_tp:
        raise ConfigError(
            f"micro_dp needs the training tp to be a multiple of the generation tp, got tp {grid.tp} % {gen_tp} = "
            f"{grid.tp % gen_tp}; strategy exact serves any sizes"
        )
    stride = grid.tp // gen_tp
    rank_at = {}
    for rank in range(grid.size):
        at = grid.coordinates(rank)
        replica = ((at.dp * grid.cp + at.cp) * grid.pp + at.pp) * stride + at.tp % stride
        rank_at[replica, at.tp // stride] = rank
    return [tuple(rank_at[replica, tp] for tp in range(gen_tp)) for replica in range(grid.size // gen_tp)]


def place_engines_consecutively(replicas: int, *, gen_tp: int) -> list[TensorGroup]:
    """Return the placement that gives each engine the next `gen_tp` free ranks."""
    return [tuple(range(i * gen_tp, (i + 1) * gen_tp)) for i in range(replicas)]


def needs_by_rank(placements: Iterable[TensorGroup], engine: Sequence[WeightLayout]) -> dict[int, WeightLayout]:
    """Return, by trainer rank that serves an engine rank, ascending, the layout it needs; `engine`: by tensor rank."""
    needs = {rank: need for group in placements for rank, need in zip(group, engine, strict=True)}
    return dict(sorted(needs.items()))


def place_engines_by_overlap(
    sources: Sequence[WeightLayout], engine: Sequence[WeightLayout], *, replicas: int, topology: Topology
) -> list[TensorGroup]:
    """Return the placement, by engine, that minimizes the bytes missing on the worst rank, then their sum.

    Tensor groups are distributed over nodes greedily, each to the node that holds most of it; within a node, ranks are
    chosen by solving an assignment problem. If `can_place_strided`, every rank's training shard lies inside its
    generation shard, as with `micro_dp`.

    Args:
        sources: by trainer rank, the layout it holds.
        engine: layouts by tensor rank; all engines have the same.

    Raises:
        ConfigError: the nodes have too few ranks.
    """
    tp = len(engine)
    node_ranks = [np.array(ranks) for ranks in topology.ranks_of.values()]
    room = sum(len(ranks) // tp for ranks in node_ranks)
    if room < replicas:
        raise ConfigError(
            f"rollout needs {replicas} groups of {tp} tensor ranks, each on one node; the trainer's "
            f"nodes have room for {room}"
        )
    need_index = NeedIndex(engine)
    missing = np.array(once_each(lambda held: [need_index.missing([held], [n]).boxes for n in engine], sources))
    overlap = np.array([need_index.missing([], [need]).boxes for need in engine]) - missing
    groups: list[TensorGroup] = []
    for ranks, count in zip(node_ranks, _distribute_groups(overlap, node_ranks, replicas), strict=True):
        if count:
            groups += [tuple(ranks[group].tolist()) for group in _assign(missing[ranks], count)]
    return groups


def _distribute_groups(overlap: Ints, node_ranks: Sequence[Ints], replicas: int) -> list[int]:
    """Return, by node, the number of its tensor groups, `replicas` over all nodes.

    Args:
        overlap: [rank, tensor rank] -> needed bytes that the rank holds.
        node_ranks: by node, its ranks.
    """
    tp = overlap.shape[1]
    counts, free = [0] * len(node_ranks), list(node_ranks)
    taken: list[Ints] = [np.zeros(0, np.int64)] * len(node_ranks)
    best = np.full(len(node_ranks), -1, np.int64)  # overlap of the next group placed there; -1: no room

    def update_best(node: int) -> None:
        best[node] = -1
        if len(free[node]) >= tp:
            held = overlap[free[node]]
            taken[node], columns = _best_assignment(held, maximize=True)
            best[node] = held[taken[node], columns].sum()

    for node in range(len(node_ranks)):
        update_best(node)
    for _ in range(replicas):
        node = int(best.argmax())
        counts[node] += 1
        free[node] = np.delete(free[node], taken[node])
        update_best(node)
    return counts


def _assign(missing: Ints, count: int) -> Ints:
    """Return [group, tensor rank] -> rank within the node; groups take ranks in ascending order.

    Args:
        missing: [rank, tensor rank] -> bytes that this rank of the node would have to receive.
        count: number of groups on the node.
    """
    rows, places = _minimize_maximum(np.tile(missing, count))
    rank_of = np.empty(len(places), np.int64)
    rank_of[places] = rows
    return np.sort(rank_of.reshape(count, -1), axis=0)


def _best_assignment(weights: Ints, *, maximize: bool = False) -> tuple[Ints, Ints]:
    """Return rows and columns of the assignment with the least, or the greatest, total weight."""
    from scipy.optimize import linear_sum_assignment  # imports much, for which few processes have a use

    return linear_sum_assignment(weights, maximize=maximize)  # type: ignore[no-any-return]


def _minimize_maximum(cost: Ints) -> tuple[Ints, Ints]:
    """Return rows and columns of the assignment with the least maximum cost and, among those, the least total cost."""
    limits = np.unique(cost)
    low, high = 0, len(limits) - 1
    while low < high:
        middle = (low + high) // 2
        above = cost > limits[middle]
        if above[_best_assignment(above)].any():
            low = middle + 1
        else:
            high = middle
    prohibitive = (limits[-1] + 1) * (len(cost) + 1)
    rows, columns = _best_assignment(np.where(cost > limits[low], prohibitive, cost))
    return rows, columns


def require_single_node_groups(strategy: str, placements: Iterable[TensorGroup], topology: Topology) -> None:
    """Check that no tensor group of an engine spans several nodes.

    Raises:
        ConfigError: one does; names `strategy`, the engine and its ranks.
    """
    found = find_cross_node_group(placements, topology)
    if found is None:
        return
    engine, ranks = found
    nodes = {topology.nodes[rank] for rank in ranks}
    raise ConfigError(
        f"weight_sync.strategy: {strategy} puts engine {engine} on the slots of trainer ranks {list(ranks)}, which are "
        f"on {len(nodes)} nodes; an engine and the ranks that serve it must share a node, as with strategy exact"
    )
