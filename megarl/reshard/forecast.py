"""What a sync will count on every rank, from its plan alone: no process group, no byte moved.

A run's books have to equal it, field by field.
"""

from __future__ import annotations

import mmap
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from megarl.reshard.bounds import missing_bytes
from megarl.reshard.bucket import ALIGNMENT, torch_dtype
from megarl.reshard.cache import cached_moves
from megarl.reshard.layout import WeightLayout, volume
from megarl.reshard.plan import Move, Topology
from megarl.reshard.rounds import cut_moves
from megarl.reshard.scenario import Arrangement, Scenario
from megarl.reshard.strategies.full_gather import model_bytes, owned_parts, whole_layout
from megarl.reshard.strategies.gather_hf import plan_buckets
from megarl.reshard.strategy import SyncStats


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


@dataclass(slots=True)
class _Books:
    """Of one rank, while its plan is read."""

    sent: int = 0
    received: int = 0
    delivered: int = 0
    messages: int = 0
    buckets: int = 0
    largest_bucket: int = 0
    largest_packed: int = 0
    between: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    """By source."""

    def stats(self, *, buffers: bool) -> SyncStats:
        return SyncStats(
            bytes_sent=self.sent,
            bytes_received=self.received,
            bytes_delivered=self.delivered,
            buckets=self.buckets,
            peak_extra_bytes=self.largest_packed + (2 * max(self.largest_bucket, mmap.PAGESIZE) if buffers else 0),
            messages=self.messages,
        )


def forecast(arrangement: Arrangement, scenario: Scenario) -> Forecast:
    """What every rank will count."""
    match arrangement.strategy:
        case "gather_hf":
            return _gather_hf(arrangement.senders, scenario)
        case "ds_chat" | "hybridflow_v":
            return _full_gather(arrangement, scenario)
    moves = cached_moves(scenario.sources, arrangement.needs, scenario.topology, arrangement.groups)
    return _of_moves(moves, len(scenario.sources), arrangement.needs, scenario.bucket_bytes // 2)


def _of_moves(moves: Sequence[Move], world: int, with_sink: Iterable[int], bucket_bytes: int) -> Forecast:
    books = [_Books() for _ in range(world)]
    for of_round in cut_moves(moves, bucket_bytes):
        messages: dict[tuple[int, int], int] = defaultdict(int)
        for move in of_round:
            messages[move.source, move.destination] += move.num_bytes
        buckets: dict[int, int] = defaultdict(int)
        packed: dict[int, int] = defaultdict(int)
        for (source, destination), num_bytes in messages.items():
            buckets[destination] += -(-num_bytes // ALIGNMENT) * ALIGNMENT
            books[destination].delivered += num_bytes
            if source != destination:
                packed[source] += num_bytes
                _send(books, source, destination, num_bytes)
        for rank, num_bytes in buckets.items():
            books[rank].buckets += 1
            books[rank].largest_bucket = max(books[rank].largest_bucket, num_bytes)
        for rank, num_bytes in packed.items():
            books[rank].largest_packed = max(books[rank].largest_packed, num_bytes)
    return _close(books, set(with_sink))


def _full_gather(arrangement: Arrangement, scenario: Scenario) -> Forecast:
    """The gather, and then each rank's own part of it, one after the other, beside the whole model."""
    world, bucket = len(scenario.sources), scenario.bucket_bytes // 2
    sources = owned_parts(scenario.sources) if arrangement.strategy == "ds_chat" else scenario.sources
    whole = whole_layout(scenario.sources[0])
    moves = cached_moves(sources, dict.fromkeys(range(world), whole), scenario.topology, arrangement.groups)
    gather = _of_moves(moves, world, range(world), bucket)
    keeps: dict[int, SyncStats] = {}
    for need in arrangement.needs.values():
        if id(need) not in keeps:
            keeps[id(need)] = _of_moves(cached_moves([whole], {0: need}, Topology.single(1)), 1, {0}, bucket).stats[0]
    nothing = SyncStats(bytes_sent=0, bytes_received=0, bytes_delivered=0, buckets=0, peak_extra_bytes=0)
    stats = []
    for rank, of_rank in enumerate(gather.stats):
        keep = keeps[id(arrangement.needs[rank])] if rank in arrangement.needs else nothing
        peak = model_bytes(whole) + max(of_rank.peak_extra_bytes, keep.peak_extra_bytes)
        stats.append(
            replace(of_rank, bytes_delivered=keep.bytes_delivered, buckets=keep.buckets, peak_extra_bytes=peak)
        )
    return Forecast(stats=tuple(stats), bytes_between=gather.bytes_between)


def _gather_hf(senders: Sequence[int], scenario: Scenario) -> Forecast:
    books = [_Books() for _ in scenario.sources]
    tensors = scenario.sources[0].tensors
    for plan in plan_buckets(scenario.sources, scenario.bucket_bytes):
        for of_rank in books:
            of_rank.buckets += 1
            of_rank.largest_bucket = max(of_rank.largest_bucket, plan.num_bytes)
        for sender in senders:
            books[sender].delivered += sum(slot.num_bytes for slot in plan.slots)
            for rank, pieces in enumerate(plan.pieces):
                num_bytes = sum(volume(p.box) * torch_dtype(tensors[p.tensor].dtype).itemsize for p in pieces)
                if num_bytes and rank != sender:
                    _send(books, rank, sender, num_bytes)
                    for each in (rank, sender):
                        books[each].largest_packed = max(books[each].largest_packed, num_bytes)
    return _close(books, set(senders))


def _send(books: Sequence[_Books], source: int, destination: int, num_bytes: int) -> None:
    books[source].sent += num_bytes
    books[destination].received += num_bytes
    books[destination].messages += 1
    books[destination].between[source] += num_bytes


def _close(books: Sequence[_Books], with_buffers: set[int]) -> Forecast:
    return Forecast(
        stats=tuple(of_rank.stats(buffers=rank in with_buffers) for rank, of_rank in enumerate(books)),
        bytes_between={(source, rank): n for rank, b in enumerate(books) for source, n in b.between.items()},
    )


def kept_twice(arrangement: Arrangement, sources: Sequence[WeightLayout]) -> int:
    """HybridFlow's redundancy: the most that a rank holds for training and its engine rank does not need."""
    held = owned_parts(sources) if arrangement.strategy == "ds_chat" else sources
    seen: dict[tuple[int, int], int] = {}
    for rank, need in arrangement.needs.items():
        key = id(held[rank]), id(need)
        if key not in seen:
            seen[key] = missing_bytes([need], [held[rank]])
    return max(seen.values(), default=0)
