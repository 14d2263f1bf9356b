"""A training layout, a generation layout, and how each strategy would arrange the two."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megarl.errors import ConfigError
from megarl.placement.rank_grid import RankGrid
from megarl.reshard.layout.engine_ranks import overlapping_servers
from megarl.reshard.layout.layout import WeightLayout
from megarl.reshard.layout.micro_dp import (
    GenerationPlace,
    consecutive_places,
    micro_dp_groups,
    replica_cells,
    strided_places,
)
from megarl.reshard.layout.topology import Topology
from megarl.reshard.planning.strategy import Strategy, SyncContext
from megarl.reshard.strategies.box_strategy import BoxStrategy, plan_boxes
from megarl.reshard.strategies.full_gather import FullGather, plan_full_gather
from megarl.reshard.strategies.gather_hf import GatherHf, plan_replica

STRATEGIES = ("ds_chat", "hybridflow_v", "gather_hf", "micro_dp", "exact")
"""In the order of reports."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """Both sides of a sync, on one set of ranks."""

    model: str
    grid: RankGrid
    gen_pp: int
    gen_tp: int
    sources: tuple[WeightLayout, ...]
    """By trainer rank."""
    engine: tuple[tuple[WeightLayout, ...], ...]
    """[pipeline stage][tensor rank] of one engine; engines are alike."""
    topology: Topology
    bucket_bytes: int

    @property
    def replicas(self) -> int:
        """Engines that the ranks have room for."""
        return self.grid.size // (self.gen_pp * self.gen_tp)

    @property
    def train(self) -> str:
        """`p-t-d`, context parallelism counted as data parallelism."""
        return f"{self.grid.pp}-{self.grid.tp}-{self.grid.dp * self.grid.cp}"

    @property
    def gen(self) -> str:
        """`p_g-t_g`."""
        return f"{self.gen_pp}-{self.gen_tp}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrangement:
    """Who serves what, and whom it prefers to ask, under one strategy."""

    strategy: str
    places: dict[int, GenerationPlace]
    """By trainer rank that serves an engine rank."""
    needs: dict[int, WeightLayout]
    """Likewise."""
    groups: tuple[tuple[int, ...], ...] = ()
    senders: tuple[int, ...] = ()
    """gather_hf: ranks that take their engine rank's part of whole tensors, as all do that share a device with one."""


def even_nodes(world: int, nodes: int) -> Topology:
    """Consecutive ranks share a machine, equally many on each.

    Raises:
        ConfigError: they do not divide.
    """
    if nodes < 1 or world % nodes:
        raise ConfigError(
            f"--nodes needs to divide the ranks, got {world} % {nodes}" + (f" = {world % nodes}" if nodes > 0 else "")
        )
    return Topology(tuple(rank // (world // nodes) for rank in range(world)))


def arrange(strategy: str, scenario: Scenario) -> Arrangement:
    """Places and groups of one of `STRATEGIES`.

    Raises:
        ConfigError: the strategy cannot serve these sizes, or an engine fits no machine.
    """
    grid, pp, tp = scenario.grid, scenario.gen_pp, scenario.gen_tp
    if not scenario.replicas:
        raise ConfigError(f"an engine takes gen pp {pp} * tp {tp} = {pp * tp} ranks, the trainer has {grid.size}")
    groups: Sequence[Sequence[int]] = ()
    match strategy:
        case "micro_dp":
            placed = dict(enumerate(strided_places(grid, gen_tp=tp, gen_pp=pp)))
            groups = micro_dp_groups(grid, gen_tp=tp, gen_pp=pp)
        case "exact":
            placed = _overlapping_places(scenario)
        case _:
            placed = dict(enumerate(consecutive_places(grid.size, gen_tp=tp, gen_pp=pp)))
            groups = replica_groups(grid) if strategy == "hybridflow_v" else ()
    return Arrangement(
        strategy=strategy,
        places=placed,
        needs={rank: scenario.engine[place.pp][place.tp] for rank, place in placed.items()},
        groups=tuple(map(tuple, groups)),
        senders=tuple(placed) if strategy == "gather_hf" else (),
    )


def replica_groups(grid: RankGrid) -> list[tuple[int, ...]]:
    """The ranks of each training replica: all tensor ranks of all its stages."""
    return [tuple(rank for cell in cells for rank in cell) for cells in replica_cells(grid)[0]]


def _overlapping_places(scenario: Scenario) -> dict[int, GenerationPlace]:
    servers = overlapping_servers(
        scenario.sources, scenario.engine, replicas=scenario.replicas, topology=scenario.topology
    )
    placed = {
        rank: GenerationPlace(replica, pp, tp)
        for replica, stages in enumerate(servers)
        for pp, ranks in enumerate(stages)
        for tp, rank in enumerate(ranks)
    }
    return dict(sorted(placed.items()))


def sync_context(arrangement: Arrangement, scenario: Scenario, rank: int) -> SyncContext:
    """What the strategy plans from on one rank."""
    return SyncContext(
        rank=rank,
        sources=scenario.sources,
        topology=scenario.topology,
        senders=arrangement.senders,
        needs=arrangement.needs,
        groups=arrangement.groups,
        copies=replica_cells(scenario.grid),
    )


def plan_strategy(arrangement: Arrangement, scenario: Scenario, rank: int) -> None:
    """What a strategy does before its first push, but for process groups and buckets."""
    context = sync_context(arrangement, scenario, rank)
    match arrangement.strategy:
        case "ds_chat" | "hybridflow_v" as method:
            plan_full_gather(context, scenario.bucket_bytes, method)
        case "gather_hf":
            plan_replica(rank, context, scenario.bucket_bytes)
        case _:
            plan_boxes(context, scenario.bucket_bytes)


def build_strategy(arrangement: Arrangement, scenario: Scenario, rank: int) -> Strategy:
    """The strategy as it runs on one rank."""
    context = sync_context(arrangement, scenario, rank)
    match arrangement.strategy:
        case "ds_chat" | "hybridflow_v" as method:
            return FullGather(context, scenario.bucket_bytes, method)
        case "gather_hf":
            return GatherHf(context, scenario.bucket_bytes)
        case "micro_dp" | "exact":
            return BoxStrategy(context, scenario.bucket_bytes)
    raise AssertionError(arrangement.strategy)
