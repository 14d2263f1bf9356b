"""What a sync will count on every rank, from its plan alone: no process group, no byte moved.

A run's books have to equal it, field by field.
"""

from __future__ import annotations

import mmap
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from megarl.reshard.analysis.scenario import Arrangement, Scenario, sync_context
from megarl.reshard.analysis.traffic import Traffic, Wanted, wanted
from megarl.reshard.layout.layout import WeightLayout
from megarl.reshard.layout.micro_dp import replica_cells
from megarl.reshard.layout.topology import Topology
from megarl.reshard.planning.lower_bounds import Demand
from megarl.reshard.planning.plan_cache import cached_plan
from megarl.reshard.planning.rounds import Round
from megarl.reshard.planning.strategy import SyncStats
from megarl.reshard.strategies.full_gather import keep_plan, model_bytes, owned_parts
from megarl.reshard.strategies.gather_hf import TensorGather, plan_replica
from megarl.reshard.transfer.executor import Memory

PLANNED_PIECES = 500_000
"""Of all ranks together: with more, `explain` plans a few ranks only. Planning a piece takes about 50 us."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """One sync of one strategy."""

    stats: tuple[SyncStats, ...]
    """By rank."""
    bytes_between: dict[tuple[int, int], int]
    """By source and destination, two different ranks."""

    def bytes_into_nodes(self, topology: Topology) -> dict[int, int]:
        """By machine, what its ranks receive from other machines."""
        into = dict.fromkeys(topology.nodes, 0)
        for (source, destination), num_bytes in self.bytes_between.items():
            if not topology.same_node(source, destination):
                into[topology.nodes[destination]] += num_bytes
        return into

    def traffic(self, topology: Topology) -> Traffic:
        """The same without the details."""
        received = tuple(of_rank.bytes_received for of_rank in self.stats)
        return Traffic(into_ranks=received, into_nodes=self.bytes_into_nodes(topology))


def can_plan_all(arrangement: Arrangement, scenario: Scenario) -> bool:
    """True where the plans of all ranks are made in a matter of seconds."""
    if arrangement.strategy == "gather_hf":
        return True  # one plan serves all ranks
    needs = wanted(arrangement, scenario).needs
    return sum(len(need.pieces) for need in needs.values()) <= PLANNED_PIECES


def forecast(arrangement: Arrangement, scenario: Scenario) -> Forecast:
    """What every rank will count."""
    if arrangement.strategy == "gather_hf":
        return _gather_hf(arrangement, scenario)
    what, stats, between = wanted(arrangement, scenario), [], {}
    for rank in range(len(what.sources)):
        rounds = _rounds(what, arrangement, scenario, rank)
        group = next((sorted(group) for group in arrangement.groups if rank in group), [])
        stats.append(_of_rank(rounds, what, arrangement, scenario, rank))
        for source, num_bytes in _sources(rounds, rank, group).items():
            between[source, rank] = num_bytes
    return Forecast(stats=tuple(stats), bytes_between=between)


def forecast_rank(arrangement: Arrangement, scenario: Scenario, rank: int) -> SyncStats:
    """What one rank will count, under any strategy but `gather_hf`."""
    what = wanted(arrangement, scenario)
    return _of_rank(_rounds(what, arrangement, scenario, rank), what, arrangement, scenario, rank)


def _rounds(what: Wanted, arrangement: Arrangement, scenario: Scenario, rank: int) -> Sequence[Round]:
    return cached_plan(
        what.sources,
        what.needs,
        scenario.topology,
        rank,
        scenario.bucket_bytes,
        groups=arrangement.groups,
        relay=what.relay,
    ).rounds


def _of_rank(
    rounds: Sequence[Round], what: Wanted, arrangement: Arrangement, scenario: Scenario, rank: int
) -> SyncStats:
    stats = _of_rounds(rounds, scenario.bucket_bytes, receives=rank in what.needs)
    if arrangement.strategy in ("micro_dp", "exact"):
        return stats
    # the gather, and then the rank's own part of it, one after the other, beside the whole model
    whole = what.needs[rank]
    peak = model_bytes(whole) + stats.peak_extra_bytes
    if rank not in arrangement.needs:
        return replace(stats, bytes_delivered=0, buckets=0, peak_extra_bytes=peak)
    keep = _keep(whole, arrangement.needs[rank], scenario.bucket_bytes)
    peak = max(peak, model_bytes(whole) + keep.peak_extra_bytes)
    return replace(stats, bytes_delivered=keep.bytes_delivered, buckets=keep.buckets, peak_extra_bytes=peak)


@lru_cache
def _keep(whole: WeightLayout, need: WeightLayout, bucket_bytes: int) -> SyncStats:
    return _of_rounds(keep_plan(whole, need, bucket_bytes).rounds, bucket_bytes, receives=True)


def _of_rounds(rounds: Sequence[Round], bucket_bytes: int, *, receives: bool) -> SyncStats:
    messages = [message.num_bytes for r in rounds for hop in r.hops for message in hop.receives]
    gathers = [gather.num_bytes - gather.share for r in rounds for gather in r.gathers]
    return SyncStats(
        bytes_sent=sum(hop.bytes_sent for r in rounds for hop in r.hops) + sum(gathers),
        bytes_received=sum(messages) + sum(gathers),
        bytes_delivered=sum(r.bytes_delivered for r in rounds),
        buckets=sum(bool(r.bucket_bytes) for r in rounds),
        peak_extra_bytes=Memory.of(rounds, bucket_bytes).total(receives=receives),
        messages=len(messages),
        collectives=len(gathers),
    )


def _sources(rounds: Sequence[Round], rank: int, group: Sequence[int]) -> dict[int, int]:
    """Bytes that `rank` receives, by source."""
    found: dict[int, int] = defaultdict(int)
    for this in rounds:
        for hop in this.hops:
            for message in hop.receives:
                found[message.source] += message.num_bytes
        for gather in this.gathers:
            for member in group:
                found[member] += gather.share if member != rank else 0
    return found


def _gather_hf(arrangement: Arrangement, scenario: Scenario) -> Forecast:
    kinds, senders = replica_cells(scenario.grid), set(arrangement.senders)
    # copies are alike, but for the numbers of their ranks
    plan = plan_replica(0, sync_context(arrangement, scenario, 0), scenario.bucket_bytes)
    buffers = 2 * max(mmap.PAGESIZE, *(bucket.num_bytes for bucket in plan))
    world = len(scenario.sources)
    into, largest, collectives = [0] * world, [0] * world, [0] * world
    between: dict[tuple[int, int], int] = defaultdict(int)
    for kind, copies in enumerate(kinds):
        by_cell: dict[int, list[TensorGather]] = defaultdict(list)
        for gather in (gather for bucket in plan for gather in bucket.gathers if gather.kind == kind):
            by_cell[gather.cell].append(gather)
        if not by_cell:
            continue
        number_of = sum(map(len, by_cell.values()))
        most = max(gather.num_bytes for gathers in by_cell.values() for gather in gathers)
        in_all = {cell: sum(gather.num_bytes for gather in gathers) for cell, gathers in by_cell.items()}
        parts = {cell: [g.part_bytes for g in gathers if g.is_gathered] for cell, gathers in by_cell.items()}
        for cells in copies:
            if senders.isdisjoint(rank for cell in cells for rank in cell):
                continue
            for number, cell in enumerate(cells):
                of_cell = parts.get(number, [])
                _all_gather(cell, sum(of_cell), between)
                for index, source in enumerate(cell):
                    largest[source] = max(largest[source], most)
                    collectives[source] += len(of_cell) + (number_of if len(cells) > 1 else 0)
                    if number in in_all:
                        for other in (other[index] for other in cells if other is not cell):
                            between[source, other] += in_all[number]
    out_of = [0] * world
    for (source, destination), num_bytes in between.items():
        out_of[source] += num_bytes
        into[destination] += num_bytes
    stats = [
        SyncStats(
            bytes_sent=out_of[rank],
            bytes_received=into[rank],
            bytes_delivered=model_bytes(scenario.sources[0]) if rank in senders else 0,
            buckets=len(plan) if rank in senders else 0,
            peak_extra_bytes=largest[rank] + (buffers if rank in senders else 0),
            collectives=collectives[rank],
        )
        for rank in range(world)
    ]
    return Forecast(stats=tuple(stats), bytes_between=dict(between))


def _all_gather(ranks: Sequence[int], part_bytes: int, between: dict[tuple[int, int], int]) -> None:
    for source in ranks:
        for destination in ranks:
            if part_bytes and source != destination:
                between[source, destination] += part_bytes


def kept_twice(arrangement: Arrangement, sources: Sequence[WeightLayout]) -> int:
    """HybridFlow's redundancy: the most that a rank holds for training and its engine rank does not need."""
    held = owned_parts(sources) if arrangement.strategy == "ds_chat" else sources
    holdings = Demand(held[rank] for rank in arrangement.needs)
    return max((holdings.lacking([need], [held[rank]]).elements for rank, need in arrangement.needs.items()), default=0)
