"""HybridFlow's grouping of trainer ranks into generation shards and micro-DP groups (arXiv 2409.19256, section 5).

Training p-t-d, generation p_g-t_g; each generation shard is the union of T*P training shards, T = t/t_g, P = p/p_g.
The generation ranks are *strided*, so that every rank's training shard lies inside its own generation shard:

    t = 4, t_g = 2       training tensor rank   0 1 2 3
                         generation shard       0 0 1 1     i // T
                         replica served         0 1 0 1     i % T
    micro-DP groups      [0 1] [2 3]            all-gather within; no redundant memory
    generation TP        [0 2] [1 3]            stride T
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import lru_cache

from megarl.cluster.placement.rank_grid import RankGrid
from megarl.errors import ConfigError

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
