"""Which trainer rank serves which rank of which engine."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy.optimize import linear_sum_assignment

from megarl.errors import ConfigError
from megarl.placement.grid import RankGrid
from megarl.reshard.bucket import torch_dtype
from megarl.reshard.groups import strided_places
from megarl.reshard.layout import WeightLayout, intersect, volume
from megarl.reshard.plan import Topology


def resolve_strategy(name: str, grid: RankGrid, *, gen_tp: int) -> str:
    """What `auto` stands for: `micro_dp` where the training size is a multiple of the generation size, else `exact`."""
    if name != "auto":
        return name
    return "micro_dp" if grid.tp % gen_tp == 0 else "exact"


def engine_servers(strategy: str, grid: RankGrid, *, gen_tp: int, replicas: int) -> list[tuple[int, ...]]:
    """[replica][tensor rank] -> trainer rank beside which it runs and which serves it, before an engine exists.

    Raises:
        ConfigError: `micro_dp` was asked for sizes that do not divide.
    """
    if strategy == "micro_dp" or (strategy == "exact" and grid.tp % gen_tp == 0):
        return strided_servers(grid, gen_tp=gen_tp, replicas=replicas)
    return [tuple(range(i * gen_tp, (i + 1) * gen_tp)) for i in range(replicas)]


def strided_servers(grid: RankGrid, *, gen_tp: int, replicas: int) -> list[tuple[int, ...]]:
    """[replica][tensor rank] -> trainer rank, HybridFlow's grouping; raises as `strided_places` does."""
    servers: dict[tuple[int, int], int] = {}
    for rank, place in enumerate(strided_places(grid, gen_tp=gen_tp)):
        servers[place.replica, place.tp] = rank
    return [tuple(servers[replica, tp] for tp in range(gen_tp)) for replica in range(replicas)]


def overlapping_servers(
    sources: Sequence[WeightLayout], engine: Sequence[WeightLayout], *, replicas: int, topology: Topology
) -> list[tuple[int, ...]]:
    """[replica][tensor rank] -> trainer rank, such that as many bytes as possible are where they are needed already.

    An assignment problem per machine; an engine never spans machines.

    Args:
        sources: by trainer rank.
        engine: by tensor rank of one engine; replicas are alike.

    Raises:
        ConfigError: the machines have too few ranks.
    """
    alike = {id(source): [overlap_bytes(source, need) for need in engine] for source in _distinct(sources)}
    overlap = np.array([alike[id(source)] for source in sources])
    servers: list[tuple[int, ...]] = []
    for node in sorted(set(topology.nodes)):
        ranks = [rank for rank, n in enumerate(topology.nodes) if n == node]
        here = min(len(ranks) // len(engine), replicas - len(servers))
        if here == 0:
            continue
        gain = np.tile(overlap[ranks], (1, here))
        rows, places = linear_sum_assignment(gain, maximize=True)
        rank_of = {int(place): ranks[row] for row, place in zip(rows, places, strict=True)}
        servers += [tuple(rank_of[replica * len(engine) + tp] for tp in range(len(engine))) for replica in range(here)]
    if len(servers) < replicas:
        raise ConfigError(
            f"rollout needs {replicas} engines of {len(engine)} ranks, each on one machine; the trainer's machines "
            f"have room for {len(servers)}"
        )
    return servers


def _distinct(layouts: Sequence[WeightLayout]) -> list[WeightLayout]:
    return list({id(layout): layout for layout in layouts}.values())


def overlap_bytes(source: WeightLayout, need: WeightLayout) -> int:
    """Bytes that `need` asks for and `source` holds."""
    held: dict[str, list[tuple[tuple[int, int], ...]]] = {}
    for piece in source.pieces:
        held.setdefault(piece.tensor, []).append(piece.box)
    total = 0
    for piece in need.pieces:
        size = torch_dtype(need.tensors[piece.tensor].dtype).itemsize
        for box in held.get(piece.tensor, ()):
            common = intersect(box, piece.box)
            total += size * volume(common) if common else 0
    return total
