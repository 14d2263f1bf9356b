"""Report of one strategy, as benchmarks write it and `megarl reshard explain` shows it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace

from megarl.reshard.analysis.forecast import (
    Forecast,
    Traffic,
    can_plan_all,
    compute_traffic,
    forecast,
    forecast_rank,
    redundant_bytes,
    sampled_disagreements,
    time_sync,
)
from megarl.reshard.analysis.scenario import Arrangement, Scenario, arrange, plan_strategy
from megarl.reshard.analysis.sync_clock import SyncTiming
from megarl.reshard.layout.engine_ranks import resolve_strategy
from megarl.reshard.layout.topology import LinkRates, Topology
from megarl.reshard.planning.lower_bounds import node_bounds, rank_bounds, seconds_bound
from megarl.reshard.planning.plan_cache import clear_plan_cache
from megarl.reshard.planning.rounds import gc_disabled
from megarl.reshard.planning.strategy import SyncStats

DEFAULT_RATES = LinkRates()
RUN_ONLY_FIELDS = (
    "hand_over",
    "sync_seconds_p50",
    "sync_seconds_min",
    "sync_seconds_max",
    "cpu_seconds_p50",
    "mismatched_bytes",
    "trained_layers",
    "bytes_unchanged",
    "count_bytes",
    "changed_share",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncReport:
    """Results of one strategy on one scenario; one JSON object of a benchmark. Sizes are in bytes."""

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
    hand_over: str | None = None
    """Where the engines' parameters are, `direct` or `shared-memory`; None, here and below, if no sync was run."""
    sync_seconds_p50: float | None = None
    sync_seconds_min: float | None = None
    sync_seconds_max: float | None = None
    cpu_seconds_p50: float | None = None
    """CPU time of all ranks together in one sync: it depends less than the others on what else the cores do."""
    mismatched_bytes: int | None = None
    trained_layers: int | None = None
    """Number of layers that change between syncs, of which only what has changed is sent; None: all weights are sent,
    and there are none of the fields below."""
    bytes_unchanged: int | None = None
    """Bytes that a sync of all weights would have received in addition, over all ranks."""
    count_bytes: int | None = None
    """Bytes of `bytes_total` that tell how many weights have changed."""
    changed_share: float | None = None
    """Share of the elements of boxes that have changed, over all ranks that send or copy them."""


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
        """Return the JSON fields: the report without the fields that need a run, and the further numbers."""
        reported = {name: value for name, value in asdict(self.report).items() if name not in RUN_ONLY_FIELDS}
        return reported | {
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


def planned_report(
    arrangement: Arrangement, scenario: Scenario, plan: Forecast, seconds: tuple[float, float]
) -> SyncReport:
    """Return the report of a forecast; `seconds` are the planning times, cold and cached."""
    return _report(arrangement, scenario, plan.traffic(scenario.topology), plan.stats, seconds)


def _report(
    arrangement: Arrangement,
    scenario: Scenario,
    traffic: Traffic,
    stats: Sequence[SyncStats] | None,
    seconds: tuple[float, float],
) -> SyncReport:
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
    clear_plan_cache()
    seconds = []
    for _ in range(2):
        with gc_disabled():  # collecting unrelated objects would take longer than planning
            start = time.perf_counter()
            plan_strategy(arrangement, scenario, rank)
            seconds.append(time.perf_counter() - start)
    return seconds[0], seconds[1]


def _ignore_progress(_: str) -> None:
    """Ignore a progress message."""


def explain(
    strategy: str,
    scenario: Scenario,
    report_progress: Callable[[str], None] = _ignore_progress,
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
    if can_plan_all(arrangement, scenario):
        report_progress(f"{strategy}: planning {world:,} ranks")
        plan = forecast(arrangement, scenario)
        traffic = plan.traffic(topology)
    else:
        report_progress(f"{strategy}: adding up {world:,} ranks")
        traffic = compute_traffic(scenario.sources, arrangement.needs, arrangement.groups, topology)
    busiest = traffic.into_ranks.index(max(traffic.into_ranks))
    report_progress(f"{strategy}: planning rank {busiest}")
    seconds = [time_planning(arrangement, scenario, rank) for rank in _sample(strategy, world, busiest)]
    slowest = max(cold for cold, _ in seconds), max(cached for _, cached in seconds)
    of_busiest = plan.stats[busiest] if plan else forecast_rank(arrangement, scenario, busiest)
    if plan is None:
        report_progress(f"{strategy}: comparing the plans of some ranks")
        stalls = sampled_disagreements(arrangement, scenario)
    else:
        stalls = [str(stall) for stall in plan.stalls]
    report_progress(f"{strategy}: bounds")
    return Explanation(
        report=_report(arrangement, scenario, traffic, plan.stats if plan else None, slowest),
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


def _sample(strategy: str, world: int, busiest: int) -> list[int]:
    """Return the ranks whose planning is timed, the busiest last; ranks of the baselines all plan the same."""
    return [*sorted({0, world - 1} - {busiest}), busiest] if strategy in ("micro_dp", "exact") else [busiest]


def explain_auto(
    scenario: Scenario, known: Sequence[Explanation] = (), rates: LinkRates = DEFAULT_RATES
) -> Explanation:
    """Explain the strategy that `auto` resolves to for this scenario; see `resolve_strategy`.

    Args:
        known: explanations of the same scenario and rates, which are reused.
        rates: of the links between the ranks.

    Raises:
        ConfigError: an engine fits on no node.
    """
    name = resolve_strategy("auto", scenario.grid, scenario.topology, gen_tp=scenario.gen_tp)
    return next((each for each in known if each.report.strategy == name), None) or explain(name, scenario, rates=rates)
