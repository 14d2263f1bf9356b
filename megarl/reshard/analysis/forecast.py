"""Forecast of the statistics of a sync: bytes from the layouts alone, the rest on every rank from its plan.

`compute_traffic` needs no plans and works at any scale; planning all ranks can take hours. Whatever the plan, a rank
receives each box that it needs and does not hold exactly once. The bytes that enter a node follow too, unless ranks
prefer sources in their group that are on other nodes, or one rank of the node needs a box twice and another once.

`forecast` needs no process group and transfers nothing. The statistics that a run counts have to equal it, field by
field.

Plans of too many ranks to simulate all of them are compared about the step of every operation: a step is one hop of one
round, or its all-gathers. Every rank passes through the same steps in the same order and posts one group in each
(`nccl_progress.posted_groups`). If both ends of every operation are in the same step, the plan makes progress: consider
the first step that some rank does not end. All ranks have ended the steps before it, so all that have operations in it
have started them, and all these operations have met.

Both ends of a message derive its step from the same tables (`SyncIndex`): the round from the tensor part, the hop from
`SourceSelector.sources`, of which `sends` is the inverse. What a rank derives for itself is which tensor parts it
all-gathers, and hence does not send. That depends only on what the members of its group hold and need, so it is
compared on one group of each kind. The argument is checked, message by message, on all that enters one node of each
class: see `find_unmatched_routes`.
"""

from __future__ import annotations

import mmap
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, zip_longest

import numpy as np

from megarl.reshard.analysis.nccl_progress import Stall, find_stalls, posted_groups
from megarl.reshard.analysis.scenario import Arrangement, Scenario, sync_context
from megarl.reshard.analysis.sync_clock import SyncTiming, box_schedule, gather_schedule, time_schedule
from megarl.reshard.layout.box_index import SyncIndex
from megarl.reshard.layout.engine_ranks import model_replicas
from megarl.reshard.layout.layout import Ints, WeightLayout
from megarl.reshard.layout.lower_bounds import NeedIndex, missing_by_node
from megarl.reshard.layout.topology import LinkRates, Topology
from megarl.reshard.planning.plan import Moves, RankPlan, plan_rank, plan_sends
from megarl.reshard.planning.plan_cache import cached_index
from megarl.reshard.planning.rounds import Round
from megarl.reshard.planning.strategy import SyncStats
from megarl.reshard.strategies.box_strategy import plan_boxes
from megarl.reshard.strategies.gather_hf import collectives, plan_replica
from megarl.reshard.transfer.executor import BufferSizes


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Bytes received in one sync."""

    into_ranks: tuple[int, ...]
    """By rank, bytes received from other ranks."""
    into_nodes: dict[int, int] | None
    """By node, bytes received from other nodes; None if only plans can determine it."""


def compute_traffic(
    sources: Sequence[WeightLayout],
    needs: Mapping[int, WeightLayout],
    groups: Sequence[Sequence[int]],
    topology: Topology,
) -> Traffic:
    """Sum up the bytes that every rank and every node receives, with any strategy other than `gather_hf`."""
    need_index = NeedIndex(needs.values())
    missing = {rank: need_index.missing([sources[rank]], [need]).boxes for rank, need in needs.items()}
    into_ranks = tuple(missing.get(rank, 0) for rank in range(len(sources)))
    if any(len({topology.nodes[rank] for rank in group}) > 1 for group in groups):
        return Traffic(into_ranks=into_ranks, into_nodes=None)
    nodes = missing_by_node(need_index, sources, needs, topology)
    known = not any(each.uneven for each in nodes.values())
    return Traffic(into_ranks=into_ranks, into_nodes={n: m.boxes for n, m in nodes.items()} if known else None)


MAX_REPRESENTATIVES = 128
"""Limit on the ranks that are planned: planning one takes up to a second for the largest models."""


def find_unmatched_routes(index: SyncIndex) -> list[str] | None:
    """Compare both ends of every message that enters one node, or all-gather group, of each class.

    The ranks of the node are planned; of all others that they receive from, what these send them.

    Returns:
        One sentence for each pair of ranks that disagree; None if the classes are too many to plan.
    """
    representatives = _representatives(index)
    if sum(map(len, representatives)) > MAX_REPRESENTATIVES:
        return None
    found = []
    for ranks in representatives:
        plans = [plan_rank(index, rank) for rank in ranks]
        sources = sorted({source for plan in plans for source in np.unique(plan.receives.peer).tolist()} - set(ranks))
        sends = {plan.rank: plan.sends for plan in plans} | {
            source: plan_sends(index, source, [plan.rank for plan in plans if source in plan.receives.peer])
            for source in sources
        }
        found += compare_ends(plans, sends)
    return found


def _representatives(index: SyncIndex) -> list[list[int]]:
    """Return the members of one all-gather group of each class, without groups the ranks that receive on such a node.

    The ranks of two groups or nodes of a class hold and need the same, one by one; those of two nodes only need the
    same if the classes would be many.
    """
    nodes = ([rank for rank in ranks if rank in index.class_of] for ranks in index.topology.ranks_of.values())
    candidates = [sorted(group) for group in index.groups] or [ranks for ranks in nodes if ranks]
    for with_held in (True,) if index.groups else (True, False):
        classes: dict[tuple[object, ...], list[int]] = {}
        for ranks in candidates:
            held = tuple(index.sources[rank].box_digest for rank in ranks) if with_held else ()
            classes.setdefault((tuple(map(index.class_of.get, ranks)), held), ranks)
        if sum(map(len, classes.values())) <= MAX_REPRESENTATIVES:
            break
    return list(classes.values())


def compare_ends(plans: Sequence[RankPlan], sends: Mapping[int, Moves]) -> list[str]:
    """Return one sentence for each pair of ranks of which one posts what the other does not expect; empty if all agree.

    Both ends of a message have to agree about its step, boxes, bytes and order among those of the pair.

    Args:
        plans: of the ranks that receive.
        sends: by rank that any of them receives from, or that could send to them, its sends.
    """
    sent = {source: _messages_by_peer(moves) for source, moves in sends.items()}
    nothing = np.zeros((0, 0), np.int64)
    found = []
    for plan in plans:
        receives = plan.receives
        expected = _messages_by_peer(receives.take(np.flatnonzero((receives.peer != plan.rank) & ~plan.gathered)))
        for source in sorted(expected.keys() | {source for source, to in sent.items() if plan.rank in to}):
            difference = _first_difference(expected.get(source, nothing), sent.get(source, {}).get(plan.rank, nothing))
            if difference is not None:
                step = f"hop {difference[1]} of round {difference[0]}"
                found.append(f"ranks {source} and {plan.rank} disagree about what the first sends the other in {step}")
    for one, other in combinations(plans, 2):
        if other.rank in one.group:
            difference = _first_difference(_gathered(one), _gathered(other))
            if difference is not None:
                step = f"the all-gathers of round {difference[0]}"
                found.append(f"ranks {one.rank} and {other.rank} disagree about {step}")
    return found


def _messages_by_peer(moves: Moves) -> dict[int, Ints]:
    """Return, by peer, its moves in message order: [N, 6 + 2 D] round, hop, item, bytes, path, tensor and box."""
    columns = moves.round, moves.hop, moves.item, moves.num_bytes, moves.path, moves.tensor, moves.start, moves.stop
    order = np.argsort(moves.peer, kind="stable")
    peers, first = np.unique(moves.peer[order], return_index=True)
    return dict(zip(peers.tolist(), np.split(np.column_stack(columns)[order], first[1:]), strict=False))


def _gathered(plan: RankPlan) -> Ints:
    """Return [N, 3] round, tensor part and bytes of what the plan all-gathers, sorted."""
    moves = plan.receives
    table = np.column_stack([moves.round, moves.item, moves.num_bytes])[plan.gathered]
    order: Ints = np.lexsort(table[:, ::-1].T)
    return table[order]


def _first_difference(a: Ints, b: Ints) -> list[int] | None:
    """Return the first row that only one of two tables has at its place, or None if they are equal."""
    if np.array_equal(a, b):
        return None
    pairs = zip_longest(a.tolist(), b.tolist())
    first: list[int] = next(min(row for row in pair if row is not None) for pair in pairs if pair[0] != pair[1])
    return first


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """Predicted statistics of one sync with one strategy."""

    stats: tuple[SyncStats, ...]
    """By rank, its statistics."""
    bytes_between: dict[tuple[int, int], int]
    """(source, destination) -> bytes, for pairs of different ranks."""
    stalls: tuple[Stall, ...] = ()
    """Ranks that would wait forever under NCCL's rules; with `gather_hf` none, because all ranks of a replica call the
    same collectives in the same order, bucket by bucket."""

    def traffic(self, topology: Topology) -> Traffic:
        """Return the bytes received by ranks and nodes."""
        into_nodes = dict.fromkeys(topology.nodes, 0)
        for (source, destination), num_bytes in self.bytes_between.items():
            if not topology.same_node(source, destination):
                into_nodes[topology.nodes[destination]] += num_bytes
        return Traffic(into_ranks=tuple(of_rank.bytes_received for of_rank in self.stats), into_nodes=into_nodes)


def time_sync(arrangement: Arrangement, scenario: Scenario, rates: LinkRates) -> SyncTiming:
    """Simulate the sync over links of these rates; see `sync_clock`."""
    if arrangement.strategy == "gather_hf":
        plan = plan_replica(0, sync_context(arrangement, scenario, 0), scenario.bucket_bytes)
        schedule = gather_schedule(plan, model_replicas(scenario.grid), set(arrangement.senders))
    else:
        index = sync_index(arrangement, scenario)
        plans = (plan_rank(index, rank) for rank in range(len(scenario.sources)))
        schedule = box_schedule(plans, index.large_bytes)
    return time_schedule(schedule, scenario.topology, rates)


def sync_index(arrangement: Arrangement, scenario: Scenario) -> SyncIndex:
    """Return the tables that ranks plan from, with any strategy other than `gather_hf`."""
    return cached_index(
        scenario.sources, arrangement.needs, scenario.topology, scenario.bucket_bytes, groups=arrangement.groups
    )


def forecast(arrangement: Arrangement, scenario: Scenario) -> Forecast:
    """Predict the statistics of every rank."""
    if arrangement.strategy == "gather_hf":
        return _forecast_gather_hf(arrangement, scenario)
    stats, posted, between = [], [], Counter[tuple[int, int]]()
    for rank in range(len(scenario.sources)):
        rounds = _rounds(arrangement, scenario, rank)
        group = next((sorted(group) for group in arrangement.groups if rank in group), [])
        stats.append(_round_stats(rounds))
        posted.append(posted_groups(rounds, group))
        for message in (message for this in rounds for hop in this.hops for message in hop.receives):
            between[message.source, rank] += message.num_bytes
        for gather in (gather for this in rounds for gather in this.gathers):
            for member in set(group) - {rank}:
                between[member, rank] += gather.share
    return Forecast(stats=tuple(stats), bytes_between=between, stalls=tuple(find_stalls(posted)))


def forecast_rank(arrangement: Arrangement, scenario: Scenario, rank: int) -> SyncStats:
    """Predict the statistics of one rank, for any strategy other than `gather_hf`."""
    return _round_stats(_rounds(arrangement, scenario, rank))


def _rounds(arrangement: Arrangement, scenario: Scenario, rank: int) -> Sequence[Round]:
    return plan_boxes(sync_context(arrangement, scenario, rank), scenario.bucket_bytes).rounds


def _round_stats(rounds: Sequence[Round]) -> SyncStats:
    messages = [message.num_bytes for r in rounds for hop in r.hops for message in hop.receives]
    gathers = [gather.num_bytes - gather.share for r in rounds for gather in r.gathers]
    return SyncStats(
        bytes_sent=sum(hop.bytes_sent for r in rounds for hop in r.hops) + sum(gathers),
        bytes_received=sum(messages) + sum(gathers),
        bytes_delivered=sum(r.bytes_delivered for r in rounds),
        buckets=sum(bool(r.bucket_bytes) for r in rounds),
        peak_extra_bytes=BufferSizes.for_rounds(rounds).total,
        messages=len(messages),
        collectives=len(gathers),
    )


def _forecast_gather_hf(arrangement: Arrangement, scenario: Scenario) -> Forecast:
    replicas, senders = model_replicas(scenario.grid), set(arrangement.senders)
    # all replicas have the same plan, except for rank numbers
    plan = plan_replica(0, sync_context(arrangement, scenario, 0), scenario.bucket_bytes)
    buffers = 2 * max(mmap.PAGESIZE, *(bucket.num_bytes for bucket in plan))
    world = len(scenario.sources)
    sent, received, num_collectives = [0] * world, [0] * world, [0] * world
    kinds_of: list[set[int]] = [set() for _ in range(world)]
    between = Counter[tuple[int, int]]()
    for each in collectives([gather for bucket in plan for gather in bucket.gathers], replicas, senders):
        for source, num_bytes in zip(each.ranks, each.bytes_from, strict=True):
            kinds_of[source].add(each.kind)
            num_collectives[source] += each.count
            for other in each.ranks:
                if num_bytes and other != source:
                    between[source, other] += num_bytes
                    sent[source] += num_bytes
                    received[other] += num_bytes
    packed = {of_rank: max(bucket.packed_bytes(of_rank) for bucket in plan) for of_rank in map(frozenset, kinds_of)}
    stats = [
        SyncStats(
            bytes_sent=sent[rank],
            bytes_received=received[rank],
            bytes_delivered=scenario.sources[0].tensors.num_bytes if rank in senders else 0,
            buckets=len(plan) if rank in senders else 0,
            peak_extra_bytes=packed[frozenset(kinds_of[rank])] + (buffers if rank in senders else 0),
            collectives=num_collectives[rank],
        )
        for rank in range(world)
    ]
    return Forecast(stats=tuple(stats), bytes_between=between)


def redundant_bytes(arrangement: Arrangement, sources: Sequence[WeightLayout]) -> int:
    """Return HybridFlow's redundancy: the most bytes a rank holds for training that its engine rank does not need."""
    holdings = NeedIndex(sources[rank] for rank in arrangement.needs)
    excess = (holdings.missing([need], [sources[rank]]).elements for rank, need in arrangement.needs.items())
    return max(excess, default=0)
