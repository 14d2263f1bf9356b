"""Runs one strategy on real ranks, counts, verifies every bit, and compares the books with the plan."""

from __future__ import annotations

import statistics
import time
from dataclasses import replace

import torch.distributed as dist

from benchmarks.reshard.content import Shard, WholeEngine
from megarl.reshard.forecast import forecast
from megarl.reshard.report import SyncReport, planned_report, time_planning
from megarl.reshard.scenario import Arrangement, Scenario, arrange, build_strategy
from megarl.reshard.strategy import Outlets, SyncStats


def measure(name: str, scenario: Scenario, syncs: int) -> SyncReport:
    """`syncs` syncs, the weights changed before each; the same report on every rank.

    Raises:
        ConfigError: the strategy cannot serve these sizes.
        AssertionError: a rank's books differ from its plan.
    """
    rank, arrangement = dist.get_rank(), arrange(name, scenario)
    planning = time_planning(arrangement, scenario, rank)
    plan = forecast(arrangement, scenario)
    strategy = build_strategy(arrangement, scenario, rank)
    held, engines = Shard(scenario.sources[rank]), _destinations(arrangement, rank)
    outlets = _outlets(arrangement, engines)
    seconds, mismatched = [], 0
    for sync in range(syncs):
        held.fill(sync)
        for shard in engines:
            shard.poison()
        dist.barrier()
        start = time.perf_counter()
        counted = strategy.push(held.tensors, outlets)
        dist.barrier()  # a sync takes as long as its slowest rank
        seconds.append(time.perf_counter() - start)
        mismatched += sum(shard.mismatched_bytes(sync) for shard in engines)
        assert counted == plan.stats[rank], f"{name}, rank {rank}: counted {counted}, planned {plan.stats[rank]}"
    strategy.close()
    return _gather(planned_report(arrangement, scenario, plan, planning), counted, seconds, mismatched)


def _destinations(arrangement: Arrangement, rank: int) -> list[Shard]:
    """What this rank serves: its own engine rank, or where whole tensors are sent, all of its engine's."""
    if arrangement.strategy != "gather_hf":
        return [Shard(arrangement.needs[rank])] if rank in arrangement.needs else []
    if rank not in arrangement.senders:
        return []
    replica = arrangement.places[rank].replica
    return [Shard(arrangement.needs[r]) for r, place in arrangement.places.items() if place.replica == replica]


def _outlets(arrangement: Arrangement, engines: list[Shard]) -> Outlets:
    if not engines:
        return Outlets()
    if arrangement.strategy == "gather_hf":
        return Outlets(whole=(WholeEngine(engines),))
    return Outlets(boxes=engines[0])


def _gather(planned: SyncReport, counted: SyncStats, seconds: list[float], mismatched: int) -> SyncReport:
    """The report with what the ranks measured in place of what was planned."""
    mine = (counted, seconds, mismatched, planned.plan_seconds_cold, planned.plan_seconds_cached)
    out: list[tuple[SyncStats, list[float], int, float, float]] = [mine] * dist.get_world_size()
    dist.all_gather_object(out, mine)
    books = [of_rank[0] for of_rank in out]
    slowest = [max(times) for times in zip(*(of_rank[1] for of_rank in out), strict=True)]
    received = [b.bytes_received for b in books]
    return replace(
        planned,
        bytes_total=sum(received),
        bytes_in_max=max(received),
        bytes_in_mean=sum(received) / len(received),
        peak_extra_bytes=max(b.peak_extra_bytes for b in books),
        messages=sum(b.messages for b in books),
        collectives=sum(b.collectives for b in books),
        plan_seconds_cold=max(of_rank[3] for of_rank in out),
        plan_seconds_cached=max(of_rank[4] for of_rank in out),
        sync_seconds_p50=statistics.median(slowest),
        sync_seconds_max=max(slowest),
        mismatched_bytes=sum(of_rank[2] for of_rank in out),
    )
