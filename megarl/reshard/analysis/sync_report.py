"""Report of one strategy, as benchmarks write it and `megarl reshard explain` shows it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace

from megarl.reshard.analysis.forecast import (
    Traffic,
    compute_traffic,
    find_unmatched_routes,
    forecast,
    forecast_rank,
    redundant_bytes,
    sync_index,
    time_sync,
)
from megarl.reshard.analysis.scenario import Arrangement, Scenario, arrange, sync_context
from megarl.reshard.analysis.sync_clock import SyncTiming
from megarl.reshard.layout.lower_bounds import node_bounds, rank_bounds, seconds_bound
from megarl.reshard.layout.topology import LinkRates, Topology
from megarl.reshard.planning.plan_cache import clear_plan_cache
from megarl.reshard.planning.rounds import gc_disabled
from megarl.reshard.planning.strategy import SyncStats
from megarl.reshard.strategies.box_strategy import plan_boxes
from megarl.reshard.strategies.gather_hf import plan_replica

DEFAULT_RATES = LinkRates()

MAX_PLANNED_PIECES = 500_000
"""Limit on the shard pieces of all ranks: above it, `explain` plans a few ranks only. A piece takes about 50 us."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncReport:
    """Figures of one strategy on one scenario, from its plan. Sizes are in bytes."""

    strategy: str
    world: int
    train: str
    gen: str
    model: str
    bytes_total: int
    """Bytes received by all ranks from other ranks."""
    bytes_in_max: int
    """Largest number of bytes received by one rank."""
    bytes_in_mean: float
    bytes_in_bound_max: int
    """Lower bound of `bytes_in_max` for this placement, for any method."""
    bytes_cross_node: int | None
    """None, here and below, if planning every rank would take too long (`MAX_PLANNED_PIECES`)."""
    peak_extra_bytes: int | None
    redundant_bytes_after: int
    """The most that a rank holds for training and its generation shard does not contain."""
    messages: int | None
    collectives: int | None
    plan_seconds_cold: float
    plan_seconds_cached: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """A report without a run, with further numbers from the plan."""

    report: SyncReport
    model_bytes: int
    bytes_into_node_max: int | None
    """Bytes received by the ranks of one node from other nodes; None as in the report."""
    bytes_into_node_bound_max: int
    """The most bytes that have to enter one node, each missing byte once."""
    busiest_rank: int
    """First of the ranks that receive the most bytes."""
    busiest_rank_stats: SyncStats
    """Statistics of the busiest rank from its own plan, which is made at any scale."""
    machines_per_tensor_group: int
    """Largest number of nodes that the tensor ranks of one engine span; a run needs 1."""
    stalls: tuple[str, ...] | None
    """What keeps the messages from completing under NCCL's rules, one clause per rank or pair of ranks: found by
    simulation if all ranks are planned (`nccl_progress`), else by comparing plans (`forecast`). None: unknown, as
    even that takes too long."""
    seconds_bound: float
    """Least seconds of a sync with any method, for this placement."""
    timing: SyncTiming | None
    """Times of a simulated sync; None if planning every rank would take too long."""

    @property
    def fraction_in_max(self) -> float:
        """`bytes_in_max` as a fraction of the model's bytes."""
        return self.report.bytes_in_max / self.model_bytes

    def as_json(self) -> dict[str, object]:
        """Return the JSON fields: those of the report, and the further numbers."""
        return asdict(self.report) | {
            "model_bytes": self.model_bytes,
            "fraction_in_max": self.fraction_in_max,
            "bytes_into_node_max": self.bytes_into_node_max,
            "bytes_into_node_bound_max": self.bytes_into_node_bound_max,
            "machines_per_tensor_group": self.machines_per_tensor_group,
            "nccl_progress": None if self.stalls is None else not self.stalls,
            "seconds_bound": self.seconds_bound,
            **dict.fromkeys(field.name for field in fields(SyncTiming)),
            **(asdict(self.timing) if self.timing else {}),
            "busiest_rank": self.busiest_rank,
            "busiest_rank_messages": self.busiest_rank_stats.messages,
            "busiest_rank_collectives": self.busiest_rank_stats.collectives,
            "busiest_rank_peak_extra_bytes": self.busiest_rank_stats.peak_extra_bytes,
        }


def make_report(
    arrangement: Arrangement,
    scenario: Scenario,
    traffic: Traffic,
    stats: Sequence[SyncStats] | None,
    seconds: tuple[float, float],
) -> SyncReport:
    """Return the report of a sync with these statistics by rank; `seconds`: of planning, cold and cached."""
    received = traffic.into_ranks
    return SyncReport(
        strategy=arrangement.strategy,
        world=len(scenario.sources),
        train=scenario.train,
        gen=scenario.gen,
        model=scenario.model,
        bytes_total=sum(received),
        bytes_in_max=max(received),
        bytes_in_mean=sum(received) / len(received),
        bytes_in_bound_max=max(rank_bounds(scenario.sources, arrangement.needs).values()),
        bytes_cross_node=None if traffic.into_nodes is None else sum(traffic.into_nodes.values()),
        peak_extra_bytes=None if stats is None else max(of_rank.peak_extra_bytes for of_rank in stats),
        redundant_bytes_after=redundant_bytes(arrangement, scenario.sources),
        messages=None if stats is None else sum(of_rank.messages for of_rank in stats),
        collectives=None if stats is None else sum(of_rank.collectives for of_rank in stats),
        plan_seconds_cold=seconds[0],
        plan_seconds_cached=seconds[1],
    )


def time_planning(arrangement: Arrangement, scenario: Scenario, rank: int) -> tuple[float, float]:
    """Return the seconds that planning takes on rank `rank`: without cache, and with the plan in the cache."""
    context = sync_context(arrangement, scenario, rank)
    clear_plan_cache()
    seconds = []
    for _ in range(2):
        with gc_disabled():  # collecting unrelated objects would take longer than planning
            start = time.perf_counter()
            if arrangement.strategy == "gather_hf":
                plan_replica(rank, context, scenario.bucket_bytes)
            else:
                plan_boxes(context, scenario.bucket_bytes)
            seconds.append(time.perf_counter() - start)
    return seconds[0], seconds[1]


def explain(
    strategy: str,
    scenario: Scenario,
    report_progress: Callable[[str], None] = lambda _: None,
    rates: LinkRates = DEFAULT_RATES,
) -> Explanation:
    """Compute everything about one strategy that is known before a run.

    Args:
        report_progress: called with progress messages; large scenarios take a minute.
        rates: of the links between the ranks.

    Raises:
        ConfigError: the strategy does not support these sizes.
    """
    report_progress(f"{strategy}: placing engine ranks")
    arrangement = _arrange_wide(strategy, scenario)
    topology, world = scenario.topology, len(scenario.sources)
    plan = None
    num_pieces = sum(len(need.pieces) for need in arrangement.needs.values())
    if strategy == "gather_hf" or num_pieces <= MAX_PLANNED_PIECES:  # one plan of `gather_hf` serves all ranks
        report_progress(f"{strategy}: planning {world:,} ranks")
        plan = forecast(arrangement, scenario)
        traffic = plan.traffic(topology)
    else:
        report_progress(f"{strategy}: adding up {world:,} ranks")
        traffic = compute_traffic(scenario.sources, arrangement.needs, arrangement.groups, topology)
    busiest = traffic.into_ranks.index(max(traffic.into_ranks))
    report_progress(f"{strategy}: planning rank {busiest}")
    # ranks of the baselines all plan the same; the busiest is last, so that its plan stays in the cache
    others = {0, world - 1} - {busiest} if strategy in ("micro_dp", "exact") else set[int]()
    seconds = [time_planning(arrangement, scenario, rank) for rank in [*sorted(others), busiest]]
    slowest = max(cold for cold, _ in seconds), max(cached for _, cached in seconds)
    of_busiest = plan.stats[busiest] if plan else forecast_rank(arrangement, scenario, busiest)
    if plan is None:
        report_progress(f"{strategy}: comparing the plans of some ranks")
        stalls = find_unmatched_routes(sync_index(arrangement, scenario))
    else:
        stalls = [str(stall) for stall in plan.stalls]
    report_progress(f"{strategy}: bounds")
    return Explanation(
        report=make_report(arrangement, scenario, traffic, plan.stats if plan else None, slowest),
        model_bytes=scenario.sources[0].tensors.num_bytes,
        bytes_into_node_max=None if traffic.into_nodes is None else max(traffic.into_nodes.values()),
        bytes_into_node_bound_max=max(node_bounds(scenario.sources, arrangement.needs, topology).values()),
        busiest_rank=busiest,
        busiest_rank_stats=of_busiest,
        machines_per_tensor_group=max(
            len({topology.nodes[rank] for rank in group}) for group in arrangement.placements
        ),
        stalls=None if stalls is None else tuple(stalls),
        seconds_bound=seconds_bound(scenario.sources, arrangement.needs, topology, rates),
        timing=time_sync(arrangement, scenario, rates) if plan and not plan.stalls else None,
    )


def _arrange_wide(strategy: str, scenario: Scenario) -> Arrangement:
    """Arrange as `arrange`, but spread tensor groups too large for a node over neighboring nodes, which no run does."""
    room = min(Counter(scenario.topology.nodes).values())
    nodes_per_group = -(-scenario.gen_tp // room)
    wide = Topology(tuple(node // nodes_per_group for node in scenario.topology.nodes))
    return arrange(strategy, replace(scenario, topology=wide))
