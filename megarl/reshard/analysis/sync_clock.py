"""The clock of a plan: how long a sync takes over links of given rates, from an event simulation of its groups.

A rank posts its messages in groups, one after another on each communicator. A message moves once both of its ends have
started the group that it is in. Each link works off the messages that it has, in the order in which they can move, at
its rate; a message ends when both of its links have, and a group when all of its messages have:

    rank 0    | group 0: to 1, to 2 .... | group 1: from 2 ............... |
    rank 1    | group 0: from 0 ..|      (waits) | group 2: from 2 ...
    rank 2    | group 0: from 0 ........ | group 1: to 0 ................. | group 2 ...

Links, each with a rate for sending and one for receiving: of each rank to the others of its node (NVLink), and the NICs
of each node. All-gathers and broadcasts go around a ring of their ranks in ascending order, and move their bytes over
all of its links at once. Packing, copies and engines take no time here.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from megarl.reshard.layout.engine_ranks import ModelReplica
from megarl.reshard.layout.topology import LinkRates, Topology
from megarl.reshard.planning.plan import RankPlan

if TYPE_CHECKING:
    from megarl.reshard.strategies.gather_hf import BucketPlan

GroupKey = tuple[int, int]
"""Identifies a group of a rank; groups of all ranks with the same key contain the ends of the same exchanges."""
GATHERS = 0
"""Second part of the key of all-gathers of a plan of boxes; the first is the step."""
MESSAGES = 1
"""The same of messages."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """Messages between two ranks in one group, or a collective."""

    key: GroupKey
    """Of the group in which every rank starts it."""
    ranks: tuple[int, ...]
    edges: tuple[tuple[int, int, int], ...]
    """(source, destination, bytes)."""
    calls: int = 0
    """Point-to-point calls at each end; 0 for a collective."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """All exchanges of a sync."""

    exchanges: Sequence[Exchange]
    waits_for: Callable[[Sequence[GroupKey]], list[list[int]]]
    """From the keys of one rank's groups in order: by group, indices of those that end before it starts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncTiming:
    """Times of one simulated sync and what its ranks post."""

    seconds_planned: float
    busiest_nic_bytes: int
    """The most bytes that one NIC sends, or receives."""
    nic_share: float | None
    """Share of the rate of its NICs that the node with the most bytes over the network uses; None: there are none."""
    groups: int
    """The most groups that one rank posts."""
    p2p_calls: int
    """The most sends and receives that one rank posts."""


def box_schedule(plans: Iterable[RankPlan], large_bytes: int) -> Schedule:
    """Return what ranks exchange by the plans of all of them.

    Args:
        large_bytes: a box of at least this size is a message of its own.
    """
    exchanges: list[Exchange] = []
    num_hops = 1
    for plan in plans:
        num_hops = plan.num_hops
        exchanges += _messages_to(plan, large_bytes)
        if plan.group and plan.rank == plan.group[0]:
            exchanges += _all_gathers(plan)
    return Schedule(exchanges, lambda keys: _waits_of_boxes(keys, num_hops))


def _messages_to(plan: RankPlan, large_bytes: int) -> list[Exchange]:
    """Return the messages that a rank receives."""
    moves = plan.receives
    rows = np.flatnonzero((moves.peer != plan.rank) & ~plan.gathered)
    columns = np.column_stack([moves.round[rows], moves.hop[rows], moves.peer[rows]])
    found, number = np.unique(columns, axis=0, return_inverse=True)
    size, number = moves.num_bytes[rows], number.reshape(-1)
    num_bytes = np.bincount(number, size, len(found)).astype(np.int64)
    # each large box is a message of its own, small ones of a path are one together
    is_large = size >= large_bytes
    small = np.unique(np.column_stack([number, moves.path[rows]])[~is_large], axis=0)[:, 0]
    calls = np.bincount(number[is_large], minlength=len(found)) + np.bincount(small, minlength=len(found))
    return [
        Exchange((this + hop, MESSAGES), (peer, plan.rank), ((peer, plan.rank, total),), count)
        for (this, hop, peer), total, count in zip(found.tolist(), num_bytes.tolist(), calls.tolist(), strict=True)
    ]


def _all_gathers(plan: RankPlan) -> list[Exchange]:
    """Return the all-gathers of the plan's group, one exchange for each round."""
    moves = plan.receives.take(np.flatnonzero(plan.gathered))
    num_bytes, size = np.bincount(moves.round, moves.num_bytes), len(plan.group)
    return [
        Exchange((this, GATHERS), plan.group, _ring(plan.group, [int(num_bytes[this]) // size] * size))
        for this in np.flatnonzero(num_bytes).tolist()
    ]


def _ring(ranks: Sequence[int], bytes_from: Sequence[int]) -> tuple[tuple[int, int, int], ...]:
    """Return the edges over which bytes of each rank reach all others: each passes on all but those of the next."""
    total, after = sum(bytes_from), (*range(1, len(ranks)), 0)
    edges = ((rank, ranks[i], total - bytes_from[i]) for rank, i in zip(ranks, after, strict=True))
    return tuple(edge for edge in edges if edge[2])


def _waits_of_boxes(keys: Sequence[GroupKey], num_hops: int) -> list[list[int]]:
    """Return what the groups of one rank wait for, as `BoxExecutor` posts them.

    Groups of messages follow each other on one communicator, all-gathers on another. An all-gather also waits until the
    round that used its bucket before has arrived, and what is relayed for the all-gathers of its round.
    """
    gathers = [(step, i) for i, (step, kind) in enumerate(keys) if kind == GATHERS]
    messages = [(step, i) for i, (step, kind) in enumerate(keys) if kind == MESSAGES]
    waits: list[list[int]] = [[] for _ in keys]
    for groups in (gathers, messages):
        for (_, before), (_, after) in pairwise(groups):
            waits[after].append(before)
    for step, i in gathers:
        waits[i] += [j for at, j in messages if at <= step - 2][-1:]
    behind = 1 if num_hops > 1 else 2
    for step, i in messages:
        waits[i] += [j for at, j in gathers if at <= step - behind][-1:]
    return waits


def gather_schedule(
    plan: Sequence[BucketPlan], model_replicas: Sequence[Sequence[ModelReplica]], senders: Collection[int]
) -> Schedule:
    """Return what ranks exchange with `gather_hf`.

    Args:
        plan: of any replica, all have the same.
        model_replicas: see `SyncContext`.
    """
    from megarl.reshard.strategies.gather_hf import collectives  # imports torch

    exchanges = [
        Exchange((2 * number + each.is_broadcast, each.kind), each.ranks, _ring(each.ranks, each.bytes_from))
        for number, bucket in enumerate(plan)
        for each in collectives(bucket.gathers, model_replicas, senders)
        if each.count
    ]
    return Schedule(exchanges, _waits_of_phases)


def _waits_of_phases(keys: Sequence[GroupKey]) -> list[list[int]]:
    """Return that each group waits for all groups of earlier phases: those of the last phase before it suffice."""
    waits = []
    for phase, _ in keys:
        before = max((other for other, _ in keys if other < phase), default=None)
        waits.append([i for i, (other, _) in enumerate(keys) if other == before])
    return waits


@dataclass(slots=True)
class RankGroup:
    """A group of one rank during the simulation."""

    exchanges: list[int] = field(default_factory=list)
    open: int = 0
    """Number of its exchanges that have not ended."""
    waits: int = 0
    """Number of groups that it still waits for; it has started if there are none."""
    then: list[int] = field(default_factory=list)
    """Groups that wait for it."""
    start: float = 0.0
    end: float = 0.0


class _Links:
    """The links of all ranks: when each has worked off its messages, and the bytes of each NIC."""

    def __init__(self, topology: Topology, rates: LinkRates) -> None:
        world = len(topology.nodes)
        self._nodes, self._nic_of = topology.nodes, [0] * world
        self._seconds_per_byte = [1 / rates.nvlink] * world
        """By link: NVLink of each rank, then NICs."""
        self.machine_of_nic: list[int] = []
        self.machine_rates: list[float] = []
        for ranks in topology.ranks_of.values():
            num_nics = rates.num_nics(len(ranks))
            used = min(num_nics, len(ranks))  # several NICs of one rank count as one of their joint rate
            for i, rank in enumerate(ranks):
                self._nic_of[rank] = len(self._seconds_per_byte) + i * used // len(ranks)
            self.machine_of_nic += [len(self.machine_rates)] * used
            self._seconds_per_byte += [used / (rates.network * num_nics)] * used
            self.machine_rates.append(rates.network * num_nics)
        self._free = [[0.0] * len(self._seconds_per_byte) for _ in range(2)]
        self._bytes = [[0] * len(self._seconds_per_byte) for _ in range(2)]

    @property
    def nic_bytes(self) -> list[list[int]]:
        """Bytes by direction (sent, received) and NIC."""
        return [of_links[len(self._nodes) :] for of_links in self._bytes]

    def move(self, source: int, to: int, num_bytes: int, now: float) -> float:
        """Add a message that can move from `now` on; return when it ends."""
        end = now
        is_remote = self._nodes[source] != self._nodes[to]
        for free, moved, rank in zip(self._free, self._bytes, (source, to), strict=True):
            link = self._nic_of[rank] if is_remote else rank
            free[link] = max(free[link], now) + num_bytes * self._seconds_per_byte[link]
            moved[link] += num_bytes
            end = max(end, free[link])
        return end


def time_schedule(schedule: Schedule, topology: Topology, rates: LinkRates) -> SyncTiming:
    """Simulate the sync.

    Raises:
        AssertionError: ranks wait for each other forever; `nccl_progress` finds out which.
    """
    exchanges, group_of = schedule.exchanges, dict[tuple[int, GroupKey], int]()
    keys_of: list[list[GroupKey]] = [[] for _ in topology.nodes]
    for rank, key in sorted({(rank, each.key) for each in exchanges for rank in each.ranks}):
        group_of[rank, key] = len(group_of)
        keys_of[rank].append(key)
    waits_for: list[list[int]] = []
    for keys in keys_of:
        first = len(waits_for)
        waits_for += [[first + before for before in waits] for waits in schedule.waits_for(keys)]
    calls = [0] * len(topology.nodes)
    for each in exchanges:
        for rank in each.ranks:
            calls[rank] += each.calls
    members = [tuple([group_of[rank, each.key] for rank in each.ranks]) for each in exchanges]
    links = _Links(topology, rates)

    def end_of(exchange: int, now: float) -> float:
        return max([links.move(*edge, now) for edge in exchanges[exchange].edges], default=now) + rates.group_seconds

    groups = run_groups(waits_for, members, [len(each.ranks) for each in exchanges], end_of)
    assert not any(group.open for group in groups), f"{sum(group.open > 0 for group in groups)} groups never end"
    seconds = max((group.end for group in groups), default=0.0)
    of_machine = np.max([np.bincount(links.machine_of_nic, of_nics) for of_nics in links.nic_bytes], axis=0)
    pairs = zip(of_machine.tolist(), links.machine_rates, strict=True)
    return SyncTiming(
        seconds_planned=seconds,
        busiest_nic_bytes=max(map(max, links.nic_bytes)),
        nic_share=max((total / (rate * seconds) for total, rate in pairs if total), default=None),
        groups=max(map(len, keys_of)),
        p2p_calls=max(calls),
    )


def run_groups(
    waits_for: Sequence[Sequence[int]],
    members: Sequence[Sequence[int]],
    missing: list[int],
    end_of: Callable[[int, float], float],
) -> list[RankGroup]:
    """Start groups in the order of time until no more can start; return them. Those with `open` exchanges never end.

    Args:
        waits_for: by group, the groups that end before it starts.
        members: by exchange, the groups that it is in.
        missing: by exchange, the number of groups that have to start it, which is counted down to those that have not.
        end_of: from an exchange and the time at which all of its groups have started, when it ends.
    """
    groups = [RankGroup(waits=len(before)) for before in waits_for]
    for number, before in enumerate(waits_for):
        for each in before:
            groups[each].then.append(number)
    for exchange, numbers in enumerate(members):
        for number in numbers:
            groups[number].exchanges.append(exchange)
            groups[number].open += 1
    assert all(group.open for group in groups), "a group without exchanges is not posted"
    started = [(0.0, number) for number, group in enumerate(groups) if not group.waits]
    while started:
        now, number = heapq.heappop(started)
        for each in groups[number].exchanges:
            missing[each] -= 1
            if missing[each]:
                continue
            end = end_of(each, now)
            for member in members[each]:
                group = groups[member]
                group.open, group.end = group.open - 1, max(group.end, end)
                if group.open:
                    continue
                for after in group.then:
                    groups[after].waits -= 1
                    groups[after].start = max(groups[after].start, group.end)
                    if not groups[after].waits:
                        heapq.heappush(started, (groups[after].start, after))
    return groups
