"""The numbers of one strategy, as benchmarks write them and `megarl reshard explain` shows them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from megarl.errors import ConfigError
from megarl.reshard.bounds import node_bounds, rank_bounds
from megarl.reshard.cache import forget_plans
from megarl.reshard.forecast import Forecast, forecast, kept_twice
from megarl.reshard.scenario import Arrangement, Scenario, arrange, build_strategy
from megarl.reshard.strategies.full_gather import model_bytes
from megarl.reshard.strategies.gather_hf import plan_buckets

AUTO_CANDIDATES = ("micro_dp", "exact", "gather_hf")
"""What a run can be configured to; ties go to the first."""


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
    bytes_cross_node: int
    peak_extra_bytes: int
    redundant_bytes_after: int
    """The most that a rank holds for training and its generation shard does not contain."""
    messages: int
    collectives: int
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
    bytes_into_node_max: int
    """Received by the ranks of one machine from other machines."""
    bytes_into_node_bound_max: int
    """The most that has to enter one machine, each missing byte once."""

    @property
    def fraction_in_max(self) -> float:
        """Of the model."""
        return self.report.bytes_in_max / self.model_bytes

    def as_json(self) -> dict[str, object]:
        """The report's fields without those that need a run, and the rest."""
        fields = {name: value for name, value in asdict(self.report).items() if value is not None}
        return fields | {
            "model_bytes": self.model_bytes,
            "fraction_in_max": self.fraction_in_max,
            "bytes_into_node_max": self.bytes_into_node_max,
            "bytes_into_node_bound_max": self.bytes_into_node_bound_max,
        }


def planned_report(
    arrangement: Arrangement, scenario: Scenario, plan: Forecast, seconds: tuple[float, float]
) -> SyncReport:
    """What the plan says; `seconds` is planning time, cold and cached."""
    received = [of_rank.bytes_received for of_rank in plan.stats]
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
        bytes_cross_node=sum(plan.bytes_into_nodes(scenario.topology).values()),
        peak_extra_bytes=max(of_rank.peak_extra_bytes for of_rank in plan.stats),
        redundant_bytes_after=kept_twice(arrangement, scenario.sources),
        messages=sum(of_rank.messages for of_rank in plan.stats),
        collectives=sum(of_rank.collectives for of_rank in plan.stats),
        plan_seconds_cold=seconds[0],
        plan_seconds_cached=seconds[1],
    )


def time_planning(arrangement: Arrangement, scenario: Scenario, rank: int) -> tuple[float, float]:
    """Seconds that rank `rank` plans for, cold and with the plan in the cache."""
    forget_plans()
    seconds = []
    for _ in range(2):
        start = time.perf_counter()
        if arrangement.strategy == "gather_hf":
            plan_buckets(scenario.sources, scenario.bucket_bytes)  # the strategy itself would allocate its buckets
        else:
            build_strategy(arrangement, scenario, rank)
        seconds.append(time.perf_counter() - start)
    return seconds[0], seconds[1]


def explain(strategy: str, scenario: Scenario) -> Explanation:
    """Everything about one strategy that is known before a run.

    Raises:
        ConfigError: the strategy cannot serve these sizes.
    """
    arrangement = arrange(strategy, scenario)
    seconds = time_planning(arrangement, scenario, rank=0)
    plan = forecast(arrangement, scenario)
    topology = scenario.topology
    return Explanation(
        report=planned_report(arrangement, scenario, plan, seconds),
        model_bytes=model_bytes(scenario.sources[0]),
        bytes_into_node_max=max(plan.bytes_into_nodes(topology).values()),
        bytes_into_node_bound_max=max(node_bounds(scenario.sources, arrangement.needs, topology).values()),
    )


def explain_cheapest(scenario: Scenario, known: Sequence[Explanation] = ()) -> Explanation:
    """`auto`: of what a run can be configured to, the least bytes into one rank, then between machines, then messages.

    Args:
        known: explanations of the same scenario that need not be made again.
    """
    by_name = {each.report.strategy: each for each in known}
    found = []
    for name in AUTO_CANDIDATES:
        try:
            found.append(by_name.get(name) or explain(name, scenario))
        except ConfigError:
            continue
    if not found:
        raise ConfigError(f"none of {', '.join(AUTO_CANDIDATES)} serves {scenario.train} -> {scenario.gen}")
    return min(found, key=_cost)


def _cost(each: Explanation) -> tuple[int, int, int]:
    report = each.report
    return report.bytes_in_max, report.bytes_cross_node, report.messages
