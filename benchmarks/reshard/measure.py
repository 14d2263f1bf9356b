"""Measurement of a contender on real ranks: times syncs, verifies every bit, and sums up the ranks' statistics."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, replace

import torch.distributed as dist

from benchmarks.reshard.contender import Contender
from megarl.reshard.analysis.forecast import Forecast
from megarl.reshard.analysis.scenario import Scenario
from megarl.reshard.analysis.sync_report import SyncReport, planned_report
from megarl.reshard.planning.strategy import SyncStats


@dataclass(frozen=True, slots=True, kw_only=True)
class _Measured:
    """Measurements of one rank."""

    stats: SyncStats
    received_from: dict[int, int]
    plan_seconds: tuple[float, float]
    seconds: list[float]
    mismatched_bytes: int


def measure(contender: Contender, scenario: Scenario, syncs: int) -> SyncReport:
    """Run `syncs` syncs, with new weights for each, and return the same report on every rank.

    Raises:
        AssertionError: a rank's statistics differ from its plan's, or between syncs.
    """
    seconds, mismatched, all_stats = [], 0, set()
    for sync in range(syncs):
        contender.fill(sync)
        dist.barrier()
        start = time.perf_counter()
        all_stats.add(contender.push())
        dist.barrier()  # a sync takes as long as its slowest rank
        seconds.append(time.perf_counter() - start)
        mismatched += contender.mismatched_bytes(sync)
    assert len(all_stats) == 1, all_stats
    mine = _Measured(
        stats=all_stats.pop(),
        received_from=contender.received_from(),
        plan_seconds=contender.plan_seconds,
        seconds=seconds,
        mismatched_bytes=mismatched,
    )
    ranks = [mine] * dist.get_world_size()
    dist.all_gather_object(ranks, mine)
    return _report(contender, scenario, ranks)


def _report(contender: Contender, scenario: Scenario, ranks: list[_Measured]) -> SyncReport:
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
    return replace(
        planned_report(contender.arrangement, scenario, counted, (cold, cached)),
        sync_seconds_p50=statistics.median(slowest),
        sync_seconds_max=max(slowest),
        mismatched_bytes=sum(of_rank.mismatched_bytes for of_rank in ranks),
    )
