"""Measurement of a contender on real ranks: times syncs, verifies every bit, and sums up the ranks' statistics."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

import torch
import torch.distributed as dist

from benchmarks.reshard.contender import Contender
from megarl.megatron.runtime import platform
from megarl.reshard.analysis.forecast import Forecast
from megarl.reshard.analysis.scenario import Scenario
from megarl.reshard.analysis.sync_report import SyncReport, make_report
from megarl.reshard.planning.strategy import SyncStats

WARM_UP_SYNCS = 1
"""Syncs that are verified and not timed: the first one connects ranks and maps memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredReport(SyncReport):
    """Results of one contender on one scenario; one JSON object of the benchmark."""

    hand_over: str
    """Where the engines' parameters are, `direct` or `shared-memory`."""
    sync_seconds_p50: float
    sync_seconds_min: float
    sync_seconds_max: float
    cpu_seconds_p50: float
    """CPU time of all ranks together in one sync: it depends less than the others on what else the cores do."""
    mismatched_bytes: int
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
class _Measured:
    """Measurements of one rank."""

    stats: SyncStats
    received_from: dict[int, int]
    plan_seconds: tuple[float, float]
    seconds: list[float]
    cpu_seconds: list[float]
    mismatched_bytes: int


def measure(contender: Contender, scenario: Scenario, syncs: int) -> MeasuredReport:
    """Run a warm-up and `syncs` timed syncs, with new weights for each, and return the same report on every rank.

    Raises:
        AssertionError: a rank's statistics differ from its plan's, or between syncs.
    """
    seconds, cpu_seconds, mismatched, all_stats = [], [], 0, []
    for sync in range(WARM_UP_SYNCS + syncs):
        contender.fill(sync)
        start, cpu_start = _clock_of_all_ranks(), time.process_time()
        all_stats.append(contender.push())
        seconds.append(_clock_of_all_ranks() - start)  # a sync takes as long as its slowest rank
        cpu_seconds.append(time.process_time() - cpu_start)
        mismatched += contender.mismatched_bytes(sync)
    timed = all_stats[WARM_UP_SYNCS:] if contender.trained_layers is not None else all_stats
    assert all(stats == timed[0] for stats in timed), timed
    mine = _Measured(
        stats=timed[0],
        received_from=contender.received_from(),
        plan_seconds=contender.plan_seconds,
        seconds=seconds[WARM_UP_SYNCS:],
        cpu_seconds=cpu_seconds[WARM_UP_SYNCS:],
        mismatched_bytes=mismatched,
    )
    ranks = [mine] * dist.get_world_size()
    dist.all_gather_object(ranks, mine)
    return _report(contender, scenario, ranks)


def _clock_of_all_ranks() -> float:
    """Return the time in seconds at which all ranks, and their devices, have finished what they were given."""
    if platform.is_cuda():
        torch.cuda.synchronize()
    dist.barrier()
    if platform.is_cuda():
        torch.cuda.synchronize()  # the barrier itself
    return time.perf_counter()


def _report(contender: Contender, scenario: Scenario, ranks: list[_Measured]) -> MeasuredReport:
    counted = Forecast(
        stats=tuple(of_rank.stats for of_rank in ranks),
        bytes_between={
            (source, rank): num_bytes
            for rank, of_rank in enumerate(ranks)
            for source, num_bytes in of_rank.received_from.items()
        },
    )
    cold, cached = (max(of_rank.plan_seconds[i] for of_rank in ranks) for i in range(2))
    slowest = [max(times) for times in zip(*(of_rank.seconds for of_rank in ranks), strict=True)]
    cpu = [sum(times) for times in zip(*(of_rank.cpu_seconds for of_rank in ranks), strict=True)]
    traffic = counted.traffic(scenario.topology)
    planned = make_report(contender.arrangement, scenario, traffic, counted.stats, (cold, cached))
    report = MeasuredReport(
        **asdict(replace(planned, strategy=contender.name)),
        hand_over=contender.hand_over,
        sync_seconds_p50=statistics.median(slowest),
        sync_seconds_min=min(slowest),
        sync_seconds_max=max(slowest),
        cpu_seconds_p50=statistics.median(cpu),
        mismatched_bytes=sum(of_rank.mismatched_bytes for of_rank in ranks),
    )
    return report if contender.trained_layers is None else _with_delta(report, contender.trained_layers, counted.stats)


def _with_delta(report: MeasuredReport, trained_layers: int, stats: Sequence[SyncStats]) -> MeasuredReport:
    """Return the report of syncs that send what has changed; what depends on the whole plan is left out."""
    received = [of_rank.bytes_received for of_rank in stats]
    return replace(
        report,
        bytes_total=sum(received),
        bytes_in_max=max(received),
        bytes_in_mean=sum(received) / len(received),
        bytes_cross_node=None,
        trained_layers=trained_layers,
        bytes_unchanged=sum(of_rank.bytes_not_received for of_rank in stats),
        count_bytes=sum(of_rank.count_bytes for of_rank in stats),
        changed_share=sum(of_rank.changed_elements for of_rank in stats) / sum(of_rank.elements for of_rank in stats),
    )
