"""Placement of engine ranks: which trainer rank serves which rank of which engine.

The tensor ranks of one pipeline stage of an engine (a tensor group) share a node; its stages may be on several nodes.

HybridFlow's grouping of trainer ranks into generation shards and micro-DP groups (arXiv 2409.19256, section 5):
training p-t-d, generation p_g-t_g; each generation shard is the union of T*P training shards, T = t/t_g, P = p/p_g.
The generation ranks are *strided*, so that every rank's training shard lies inside its own generation shard:

    t = 4, t_g = 2       training tensor rank   0 1 2 3
                         generation shard       0 0 1 1     i // T
                         replica served         0 1 0 1     i % T
    micro-DP groups      [0 1] [2 3]            all-gather within; no redundant memory
    generation TP        [0 2] [1 3]            stride T
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from megarl.cluster.placement.rank_grid import RankGrid
from megarl.errors import ConfigError
from megarl.reshard.layout.layout import Ints, PieceTable, WeightLayout
from megarl.reshard.layout.overlap import layout_bytes, overlap_bytes
from megarl.reshard.layout.topology import Topology

ModelReplica = tuple[tuple[int, ...], ...]
"""Ranks of one copy of some parameters, by shard group: the ranks of a group (ascending) split the same parameters."""


@dataclass(frozen=True, slots=True)
class GenerationPlace:
    """The engine rank that one trainer rank serves."""

    replica: int
    """Index of the generation replica, counted over all data-parallel replicas."""
    pp: int
    """Pipeline stage within the replica."""
    tp: int
    """Tensor-parallel rank within the replica."""


def strided_places(grid: RankGrid, *, gen_tp: int, gen_pp: int = 1) -> list[GenerationPlace]:
    """Return, by trainer rank, the place for which its training shard lies inside its generation shard.

    Raises:
        ConfigError: the sizes do not divide, so no such grouping exists.
    """
    if grid.tp % gen_tp or grid.pp % gen_pp:
        raise ConfigError(
            f"micro_dp needs the training sizes to be multiples of the generation sizes, got tp {grid.tp} % {gen_tp} = "
            f"{grid.tp % gen_tp}, pp {grid.pp} % {gen_pp} = {grid.pp % gen_pp}; strategy exact serves any sizes"
        )
    tp_per, pp_per = grid.tp // gen_tp, grid.pp // gen_pp
    places = []
    for rank in range(grid.size):
        at = grid.coordinates(rank)
        micro = (at.pp % pp_per) * tp_per + at.tp % tp_per
        data_replica = at.dp * grid.cp + at.cp
        places.append(GenerationPlace(data_replica * tp_per * pp_per + micro, at.pp // pp_per, at.tp // tp_per))
    return places


def consecutive_places(world: int, *, gen_tp: int, gen_pp: int = 1) -> list[GenerationPlace]:
    """Return, by trainer rank, the usual placement: replica after replica, tensor ranks on neighboring ranks."""
    size = gen_tp * gen_pp
    return [GenerationPlace(rank // size, rank % size // gen_tp, rank % gen_tp) for rank in range(world // size * size)]


def micro_dp_groups(grid: RankGrid, *, gen_tp: int, gen_pp: int = 1) -> list[tuple[int, ...]]:
    """Return the groups of ranks that share a generation shard within one training replica."""
    groups: dict[tuple[int, int, int], list[int]] = {}
    for rank, place in enumerate(strided_places(grid, gen_tp=gen_tp, gen_pp=gen_pp)):
        at = grid.coordinates(rank)
        groups.setdefault((at.dp * grid.cp + at.cp, place.pp, place.tp), []).append(rank)
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


_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)(?:\.|$)")
EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"


def split_stages(layout: WeightLayout, pp: int) -> list[WeightLayout]:
    """Return the layout of each pipeline stage: layers split evenly, embedding first, final norm and head last.

    If the head is tied to the embedding, the first and the last stage hold it, as in SGLang.

    Raises:
        ConfigError: the number of layers is not a multiple of `pp`.
    """
    if pp == 1:
        return [layout]
    table = layout.pieces
    layer = np.array([_layer(name) for name in table.tensors], np.int64)[table.tensor]
    layers = 1 + int(layer.max(initial=-1))
    if layers % pp:
        raise ConfigError(f"--gen pp needs to divide the layers, got {layers} % {pp} = {layers % pp}")
    embeds = np.array([name == EMBEDDING for name in table.tensors], bool)[table.tensor]
    stage = np.where(layer >= 0, layer * pp // max(layers, 1), np.where(embeds, 0, pp - 1))
    stages = [table.take(np.flatnonzero(stage == number)) for number in range(pp)]
    if HEAD not in layout.tensors:
        stages[-1] = PieceTable.join([stages[-1], _under(HEAD, table.take(np.flatnonzero(embeds)))])
    return [WeightLayout(layout.tensors, of_stage) for of_stage in stages]


def _under(name: str, table: PieceTable) -> PieceTable:
    """Return the same pieces as parts of a local tensor `name`."""
    return PieceTable(table.tensors, [name], replace(table.columns, local=np.zeros_like(table.local)))


def _layer(tensor: str) -> int:
    found = _LAYER.search(tensor)
    return int(found[1]) if found else -1


TensorGroup = tuple[int, ...]
"""Trainer ranks that serve one pipeline stage of an engine, by tensor rank."""
EnginePlacement = tuple[TensorGroup, ...]
"""Trainer ranks that serve one engine: its tensor groups, by pipeline stage."""


def resolve_strategy(name: str, grid: RankGrid, topology: Topology, *, gen_tp: int, gen_pp: int = 1) -> str:
    """Resolve `auto` to the strategy of the least planned seconds; return other names unchanged.

    Within a node, `micro_dp` moves as many bytes as `exact`, and between ranks of one group only. Where a micro-DP
    group spans nodes, each of its engines fetches a copy of its own over the network, and `exact` one for the node. So
    `auto` is `micro_dp` if it is possible with each group on one node, else `exact`; `benchmarks.reshard.clock`
    compares this with the planned seconds of all strategies.
    """
    if name != "auto":
        return name
    if not can_place_strided(grid, topology, gen_tp=gen_tp, gen_pp=gen_pp):
        return "exact"
    groups = micro_dp_groups(grid, gen_tp=gen_tp, gen_pp=gen_pp)
    return "micro_dp" if all(len({topology.nodes[rank] for rank in group}) == 1 for group in groups) else "exact"


def can_place_strided(grid: RankGrid, topology: Topology, *, gen_tp: int, gen_pp: int = 1) -> bool:
    """Return whether every rank's training shard can lie inside its generation shard, tensor groups on one node each.

    That is: the training sizes are multiples of the generation sizes, strided tensor groups do not span nodes, and
    routed experts are sharded like the other parameters.
    """
    if grid.tp % gen_tp or grid.pp % gen_pp or grid.ep > 1 or grid.expert_tp != grid.tp:
        return False
    return find_cross_node_group(place_engines_strided(grid, gen_tp=gen_tp, gen_pp=gen_pp), topology) is None


def find_cross_node_group(placements: Iterable[EnginePlacement], topology: Topology) -> tuple[int, TensorGroup] | None:
    """Return the first engine with a tensor group that spans several nodes, and that group; None if there is none."""
    for engine, groups in enumerate(placements):
        for group in groups:
            if len({topology.nodes[rank] for rank in group}) > 1:
                return engine, group
    return None


def place_engines_strided(grid: RankGrid, *, gen_tp: int, gen_pp: int = 1) -> list[EnginePlacement]:
    """Return HybridFlow's strided placement, by engine, over all ranks; raises as `strided_places` does."""
    places = strided_places(grid, gen_tp=gen_tp, gen_pp=gen_pp)
    by_place = {(place.replica, place.pp, place.tp): rank for rank, place in enumerate(places)}
    return [
        tuple(tuple(by_place[replica, pp, tp] for tp in range(gen_tp)) for pp in range(gen_pp))
        for replica in range(grid.size // (gen_tp * gen_pp))
    ]


def place_engines_consecutively(replicas: int, *, gen_tp: int) -> list[EnginePlacement]:
    """Return the placement that gives each engine the next `gen_tp` free ranks."""
    return [(tuple(range(i * gen_tp, (i + 1) * gen_tp)),) for i in range(replicas)]


def place_engines_by_overlap(
    sources: Sequence[WeightLayout],
    engine: Sequence[Sequence[WeightLayout]],
    *,
    replicas: int,
    topology: Topology,
) -> list[EnginePlacement]:
    """Return the placement, by engine, that minimizes the bytes missing on the worst rank, then their sum.

    Tensor groups are distributed over nodes greedily, each to the node that holds most of it; within a node, ranks are
    chosen by solving an assignment problem. If `can_place_strided`, every rank's training shard lies inside its
    generation shard, as with `micro_dp`.

    Args:
        sources: by trainer rank, the layout it holds.
        engine: layouts by stage and tensor rank; all engines have the same.

    Raises:
        ConfigError: the nodes have too few ranks.
    """
    stages, tp = len(engine), len(engine[0])
    node_ranks = [
        np.array([rank for rank, at in enumerate(topology.nodes) if at == node]) for node in sorted(set(topology.nodes))
    ]
    room = sum(len(ranks) // tp for ranks in node_ranks)
    if room < replicas * stages:
        raise ConfigError(
            f"rollout needs {replicas * stages} groups of {tp} tensor ranks, each on one node; the trainer's "
            f"nodes have room for {room}"
        )
    needs = [need for stage in engine for need in stage]
    overlap = overlap_bytes(sources, needs)
    missing = np.array([layout_bytes(need) for need in needs]) - overlap
    overlap, missing = (of_pair.reshape(len(sources), stages, tp) for of_pair in (overlap, missing))
    groups: list[list[TensorGroup]] = [[] for _ in engine]
    for ranks, counts in zip(node_ranks, _distribute_groups(overlap, node_ranks, replicas), strict=True):
        for stage, found in enumerate(_assign(missing[ranks], counts) if counts.any() else ()):
            groups[stage] += [tuple(ranks[group].tolist()) for group in found]
    return list(zip(*groups, strict=True))


def _distribute_groups(overlap: Ints, node_ranks: Sequence[Ints], replicas: int) -> Ints:
    """Return [node, stage] -> number of the stage's tensor groups on the node, `replicas` over all nodes.

    Args:
        overlap: [rank, stage, tensor rank] -> needed bytes that the rank holds.
        node_ranks: by node, its ranks.
    """
    _, stages, tp = overlap.shape
    counts = np.zeros((len(node_ranks), stages), np.int64)
    free = list(node_ranks)
    best = np.full((len(node_ranks), stages), -1, np.int64)  # overlap of the next group placed there; -1: no room
    taken: dict[tuple[int, int], Ints] = {}

    def update_best(node: int) -> None:
        best[node] = -1
        for stage in range(stages) if len(free[node]) >= tp else ():
            of_stage = overlap[free[node], stage]
            rows, columns = _best_assignment(of_stage, maximize=True)
            best[node, stage] = of_stage[rows, columns].sum()
            taken[node, stage] = rows

    for node in range(len(node_ranks)):
        update_best(node)
    for _ in range(replicas * stages):
        open_stages = counts.sum(axis=0) < replicas
        node, stage = divmod(int(np.where(open_stages, best, -1).argmax()), stages)
        counts[node, stage] += 1
        free[node] = np.delete(free[node], taken[node, stage])
        update_best(node)
    return counts


def _assign(missing: Ints, counts: Ints) -> list[Ints]:
    """Return, by stage, [group, tensor rank] -> rank within the node; groups of a stage take ranks in ascending order.

    Args:
        missing: [rank, stage, tensor rank] -> bytes that this rank of the node would have to receive.
        counts: by stage, its number of groups on the node.
    """
    columns = np.repeat(missing, counts, axis=1)
    _, groups, tp = columns.shape
    rows, places = _minimize_maximum(columns.reshape(len(missing), groups * tp))
    rank_of = np.empty(groups * tp, np.int64)
    rank_of[places] = rows
    of_stages = np.split(rank_of.reshape(groups, tp), np.cumsum(counts)[:-1])
    return [np.sort(of_stage, axis=0) for of_stage in of_stages]


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


def require_single_node_groups(strategy: str, placements: Iterable[EnginePlacement], topology: Topology) -> None:
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
