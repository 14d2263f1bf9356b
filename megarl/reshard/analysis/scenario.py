"""Scenarios of a sync: a training layout, a generation layout, and the placement that each strategy gives them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megarl.cluster.placement.rank_grid import RankGrid
from megarl.errors import ConfigError
from megarl.reshard.layout.engine_ranks import (
    TensorGroup,
    micro_dp_groups,
    model_replicas,
    needs_by_rank,
    place_engines_by_overlap,
    place_engines_consecutively,
    place_engines_strided,
)
from megarl.reshard.layout.layout import WeightLayout
from megarl.reshard.layout.topology import Topology
from megarl.reshard.planning.strategy import SyncContext

STRATEGIES = ("gather_hf", "micro_dp", "exact")
"""Names of all strategies, in the order in which reports list them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """Layouts of both sides of a sync on one set of ranks."""

    model: str
    grid: RankGrid
    gen_tp: int
    sources: tuple[WeightLayout, ...]
    """By trainer rank, the layout it holds."""
    engine: tuple[WeightLayout, ...]
    """Layout of one engine, by tensor rank; all engines have the same."""
    topology: Topology
    bucket_bytes: int

    @property
    def replicas(self) -> int:
        """Number of engines that fit on the ranks."""
        return self.grid.size // self.gen_tp

    @property
    def train(self) -> str:
        """Training sizes as `p-t-d`; context parallelism counts as data parallelism."""
        return f"{self.grid.pp}-{self.grid.tp}-{self.grid.dp * self.grid.cp}"

    @property
    def gen(self) -> str:
        """Generation sizes as `1-t_g`: engines have one pipeline stage."""
        return f"1-{self.gen_tp}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrangement:
    """Placement of engine ranks and preferred sources with one strategy."""

    strategy: str
    placements: Sequence[TensorGroup] = ()
    """By engine, the ranks that serve it."""
    needs: dict[int, WeightLayout]
    """By trainer rank that serves an engine rank, the layout it needs."""
    groups: tuple[tuple[int, ...], ...] = ()

    @property
    def senders(self) -> tuple[int, ...]:
        """With gather_hf, ranks that deliver full tensors: all ranks that serve an engine rank."""
        return tuple(self.needs) if self.strategy == "gather_hf" else ()


def even_nodes(world: int, nodes: int) -> Topology:
    """Return a topology with consecutive ranks on each node and the same number on every node.

    Raises:
        ConfigError: the number of ranks is not a multiple of `nodes`.
    """
    if nodes < 1 or world % nodes:
        raise ConfigError(
            f"--nodes needs to divide the ranks, got {world} % {nodes}" + (f" = {world % nodes}" if nodes > 0 else "")
        )
    return Topology(tuple(rank // (world // nodes) for rank in range(world)))


def arrange(strategy: str, scenario: Scenario) -> Arrangement:
    """Place engine ranks and form groups for one of `STRATEGIES`.

    Raises:
        ConfigError: the strategy does not support these sizes, or an engine fits on no node.
    """
    grid, tp = scenario.grid, scenario.gen_tp
    if not scenario.replicas:
        raise ConfigError(f"an engine takes gen tp = {tp} ranks, the trainer has {grid.size}")
    match strategy:
        case "micro_dp":
            placements = place_engines_strided(grid, gen_tp=tp)
        case "exact":
            placements = place_engines_by_overlap(
                scenario.sources, scenario.engine, replicas=scenario.replicas, topology=scenario.topology
            )
        case _:
            placements = place_engines_consecutively(scenario.replicas, gen_tp=tp)
    return Arrangement(
        strategy=strategy,
        placements=placements,
        needs=needs_by_rank(placements, scenario.engine),
        groups=tuple(micro_dp_groups(grid, gen_tp=tp)) if strategy == "micro_dp" else (),
    )


def sync_context(arrangement: Arrangement, scenario: Scenario, rank: int) -> SyncContext:
    """Return the inputs that the strategy plans from on one rank."""
    return SyncContext(
        rank=rank,
        sources=scenario.sources,
        topology=scenario.topology,
        senders=arrangement.senders,
        needs=arrangement.needs,
        groups=arrangement.groups,
        model_replicas=model_replicas(scenario.grid),
    )
