"""The numbers of one strategy, as benchmarks write them and `megarl reshard explain` shows them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace

from megarl.reshard.analysis.forecast import Forecast, can_plan_all, forecast, forecast_rank, kept_twice
from megarl.reshard.analysis.scenario import Arrangement, Scenario, arrange, plan_strategy
from megarl.reshard.analysis.traffic import Traffic, find_traffic, wanted
from megarl.reshard.layout.engine_ranks import resolve_strategy
from megarl.reshard.layout.topology import Topology
from megarl.reshard.planning.lower_bounds import node_bounds, rank_bounds
from megarl.reshard.planning.plan_cache import forget_plans
from megarl.reshard.planning.rounds import no_collection
from megarl.reshard.planning.strategy import SyncStats
from megarl.reshard.strategies.full_gather import model_bytes

NEEDS_RUN = ("sync_seconds_p50", "sync_seconds_max", "mismatched_bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncReport:
    """One JSON object of a benchmark; sizes in bytes."""

    strategy: str
    world: int
    train: str
    gen: str
    model: str
    bytes_total: int
    """Received by all ranks from other ranks."""
    bytes_in_max: int
    """Received by one rank."""
    bytes_in_mean: float
    bytes_in_bound_max: int
    """The most that a rank has to receive, placed as it is, whatever the method."""
    bytes_cross_node: int | None
    """None, here and below: it takes the plan of every rank, and they are too many (`PLANNED_PIECES`)."""
    peak_extra_bytes: int | None
    redundant_bytes_after: int
    """The most that a rank holds for training and its generation shard does not contain."""
    messages: int | None
    collectives: int | None
    plan_seconds_cold: float
    plan_seconds_cached: float
    sync_seconds_p50: float | None = None
    """None where nothing was moved."""
    sync_seconds_max: float | None = None
    mismatched_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """A report without a run, and what only a plan tells."""

    report: SyncReport
    model_bytes: int
    bytes_into_node_max: int | None
    """Received by the ranks of one machine from other machines; None as in the report."""
    bytes_into_node_bound_max: int
    """The most that has to enter one machine, each missing byte once."""
    busiest_rank: int
    """The first of those that receive the most."""
    of_busiest_rank: SyncStats
    """By its own plan, which is made at any scale."""
    machines_per_tensor_group: int
    """The most that the tensor ranks of one engine's stage lie on; a run needs 1."""

    @property
    def fraction_in_max(self) -> float:
        """Of the model."""
        return self.report.bytes_in_max / self.model_bytes

    def as_json(self) -> dict[str, object]:
        """The report's fields without those that need a run, and the rest."""
        fields = {name: value for name, value in asdict(self.report).items() if name not in NEEDS_RUN}
        return fields | {
            "model_bytes": self.model_bytes,
            "fraction_in_max": self.fraction_in_max,
            "bytes_into_node_max": self.bytes_into_node_max,
            "bytes_into_node_bound_max": self.bytes_into_node_bound_max,
            "machines_per_tensor_group": self.machines_per_tensor_group,
            "busiest_rank": self.busiest_rank,
            "busiest_rank_messages": self.of_busiest_rank.messages,
            "busiest_rank_collectives": self.of_busiest_rank.collectives,
            "busiest_rank_peak_extra_bytes": self.of_busiest_rank.peak_extra_bytes,
        }


def planned_report(
    arrangement: Arrangement, scenario: Scenario, plan: Forecast, seconds: tuple[float, float]
) -> SyncReport:
    """What the plan says; `seconds` is planning time, cold and cached."""
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
        redundant_bytes_after=kept_twice(arrangement, scenario.sources),
        messages=None if stats is None else sum(of_rank.messages for of_rank in stats),
        collectives=None if stats is None else sum(of_rank.collectives for of_rank in stats),
        plan_seconds_cold=seconds[0],
        plan_seconds_cached=seconds[1],
    )


def time_planning(arrangement: Arrangement, scenario: Scenario, rank: int) -> tuple[float, float]:
    """Seconds that rank `rank` plans for, cold and with the plan in the cache."""
    forget_plans()
    seconds = []
    for _ in range(2):
        with no_collection():  # of what others have made: it would take longer than the plan
            start = time.perf_counter()
            plan_strategy(arrangement, scenario, rank)
            seconds.append(time.perf_counter() - start)
    return seconds[0], seconds[1]


def _tell_nobody(_: str) -> None:
    """Progress that nobody follows."""


def explain(strategy: str, scenario: Scenario, tell: Callable[[str], None] = _tell_nobody) -> Explanation:
    """Everything about one strategy that is known before a run.

    Args:
        tell: is told what is being done; large scenarios take a minute.

    Raises:
        ConfigError: the strategy cannot serve these sizes.
    """
    tell(f"{strategy}: placing engine ranks")
    arrangement = _arrange_wide(strategy, scenario)
    topology, world = scenario.topology, len(scenario.sources)
    plan = None
    if can_plan_all(arrangement, scenario):
        tell(f"{strategy}: planning {world:,} ranks")
        plan = forecast(arrangement, scenario)
        traffic = plan.traffic(topology)
    else:
        tell(f"{strategy}: adding up {world:,} ranks")
        traffic = find_traffic(wanted(arrangement, scenario), arrangement.groups, topology)
    busiest = traffic.into_ranks.index(max(traffic.into_ranks))
    tell(f"{strategy}: planning rank {busiest}")
    seconds = [time_planning(arrangement, scenario, rank) for rank in _sample(strategy, world, busiest)]
    slowest = max(cold for cold, _ in seconds), max(cached for _, cached in seconds)
    of_busiest = plan.stats[busiest] if plan else forecast_rank(arrangement, scenario, busiest)
    tell(f"{strategy}: bounds")
    return Explanation(
        report=_report(arrangement, scenario, traffic, plan.stats if plan else None, slowest),
        model_bytes=model_bytes(scenario.sources[0]),
        bytes_into_node_max=None if traffic.into_nodes is None else max(traffic.into_nodes.values()),
        bytes_into_node_bound_max=max(node_bounds(scenario.sources, arrangement.needs, topology).values()),
        busiest_rank=busiest,
        of_busiest_rank=of_busiest,
        machines_per_tensor_group=_machines_per_tensor_group(arrangement, topology),
    )


def _arrange_wide(strategy: str, scenario: Scenario) -> Arrangement:
    """As `arrange`; tensor ranks that fit no machine lie on neighbouring ones, which no run does, but has its price."""
    room = min(Counter(scenario.topology.nodes).values())
    machines = -(-scenario.gen_tp // room)
    wide = Topology(tuple(node // machines for node in scenario.topology.nodes))
    return arrange(strategy, replace(scenario, topology=wide))


def _machines_per_tensor_group(arrangement: Arrangement, topology: Topology) -> int:
    machines: dict[tuple[int, int], set[int]] = {}
    for rank, place in arrangement.places.items():
        machines.setdefault((place.replica, place.pp), set()).add(topology.nodes[rank])
    return max(map(len, machines.values()))


def _sample(strategy: str, world: int, busiest: int) -> list[int]:
    """Ranks whose planning is timed, the busiest last; ranks of the baselines plan alike."""
    return [*sorted({0, world - 1} - {busiest}), busiest] if strategy in ("micro_dp", "exact") else [busiest]


def explain_auto(scenario: Scenario, known: Sequence[Explanation] = ()) -> Explanation:
    """The strategy that `auto` stands for in a run of these sizes on these machines; see `resolve_strategy`.

    Args:
        known: explanations of the same scenario that need not be made again.

    Raises:
        ConfigError: an engine fits no machine.
    """
    name = resolve_strategy("auto", scenario.grid, scenario.topology, gen_tp=scenario.gen_tp, gen_pp=scenario.gen_pp)
    return next((each for each in known if each.report.strategy == name), None) or explain(name, scenario)
