"""Traffic between machines: estimates of its peers and hops, and where boxes enter the rings of machines.

`RemoteTraffic` estimates how many peers a rank has on other machines, how much machines send, and how many hops boxes
take. From these it chooses how many machines one holder serves (`limit`).

`RingEntries` chooses where boxes enter the rings, so that ranks send and receive equally much there. A pair of holders
and receivers has few turns. So each pair starts where the one before has ended: at the holders with those of the same
holders, at the ranks of a machine with those of the same receivers. The pairs of the same receivers enter the ring at
one machine after another, so that in every round all machines pass on equally much.

If some receivers get boxes from one holder each (`RemoteSources.single_root`), ranks are also to have equally few peers
on other machines. If 1,024 pairs of ranks hold what 32 ranks on 32 machines need, then each of these receives directly
from 32 holders, and the boxes of larger sets of holders, such as all ranks of a pipeline stage, come from the same 32:

    holders {0, 8}    root 0, enters at rank 100            holders {1, 9}     root 9, enters at rank 108
    holders {0, 1, 8, 9}                  root 0, at rank 100: no further pair of ranks

If the machine of a receiver holds the box, no root is needed at all. Receivers that get boxes from several holders
each keep these, but different ranks of a machine fetch the boxes of different holders.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain

import numpy as np

from megarl.reshard.layout.layout import Ints
from megarl.reshard.layout.relay_tree import (
    UNLIMITED,
    Entry,
    Ranks,
    RemoteSources,
    distances,
    first_sources,
    num_passed,
    turn_offset,
)
from megarl.reshard.layout.topology import Topology

MAX_REMOTE_PEERS = 128
"""The most ranks of other machines that a rank should exchange messages with: each takes buffers and a connection."""

EVEN_SHARE = 0.9
"""Part of `MAX_REMOTE_PEERS` that ranks may have on average if not all holders are roots: some have a few more."""

ARCS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Numbers of machines that roots may serve, in addition to 1 and all machines."""

MAX_SHORT_ARC, MAX_GOOD_ARC = 3, 8
"""Arcs of up to 3 machines need not be cut; cutting longer ones into arcs of up to 8 is worth more messages of holders,
since in long arcs machines pass on unequally many boxes."""

MAX_EGRESS_RATIO, MAX_COLOCATED_RATIO = 1.02, 1.15
"""The most that a machine should send of what one receives; with engines on trainer machines, if holders send once."""

MAX_TURNS = 16
"""The most slices of a stage in one round."""


@dataclass(frozen=True)
class RemoteTraffic:
    """Sets of ranks that hold and need boxes, and which of these exchange boxes."""

    topology: Topology
    holders: Sequence[Ranks]
    receivers: Sequence[Ranks]
    pairs: Ints
    """[holders, receivers], the bytes that each of the receivers needs of what the holders hold."""

    def limit(self) -> RemoteSources:
        """Return limits with which no machine sends much more than others receive, and with as many turns as possible.

        They keep most ranks at `MAX_REMOTE_PEERS` peers. If none do, receivers that would have a large part of that
        number as sources get boxes from one holder each.
        """
        limits = RemoteSources(even_origins=len(self.topology.nodes) <= MAX_REMOTE_PEERS)
        found: list[tuple[float, RemoteSources]] = []
        for arcs in self._arcs_to_try():
            tried, is_once = replace(limits, arcs=arcs), arcs == UNLIMITED.arcs
            peers, _, relays = self._peers(tried)
            if peers + relays <= (1.0 if is_once else EVEN_SHARE) * MAX_REMOTE_PEERS:
                ratio = self._egress_ratio(tried)
                found.append((ratio, self._with_turns(tried, (MAX_REMOTE_PEERS - relays) / max(peers, 1))))
                if ratio <= (MAX_COLOCATED_RATIO if is_once and self._is_colocated else MAX_EGRESS_RATIO):
                    return found[-1][1]
            elif is_once:
                break
        if found:
            return min(found, key=lambda each: each[0])[1]
        _, by_receivers, _ = self._peers(limits)
        many = np.flatnonzero(by_receivers > MAX_REMOTE_PEERS / 4).tolist()
        limits = RemoteSources(single_root=frozenset(self.receivers[number] for number in many))
        peers, _, relays = self._peers(limits)
        return self._with_turns(limits, (MAX_REMOTE_PEERS - relays) / max(peers, 1))

    def _with_turns(self, limits: RemoteSources, most: float) -> RemoteSources:
        """Return the limits with at most so many turns, after which all have had equally many if that is possible.

        Few ranks have few peers whatever the turns are.
        """
        even, turns = self._even_turns(limits), max(int(most), 1)
        if len(self.topology.nodes) <= MAX_REMOTE_PEERS:
            turns = max(turns, even)
        if turns >= even:
            return replace(limits, num_turns=turns - turns % even)
        divisor = max(number for number in range(1, turns + 1) if even % number == 0)
        return replace(limits, num_turns=divisor if 2 * divisor > turns else turns)

    def num_hops(self, limits: RemoteSources) -> int:
        """Return the number of hops that boxes take at most."""
        _, receivers = self.remote_pairs
        arc, _ = self.trees(limits)
        depth = np.maximum.accumulate(num_passed(np.arange(arc.max(initial=1))))
        are_shared = np.asarray((self.needed > 1).any(axis=1))
        return 1 + int((depth[arc - 1] + are_shared[receivers]).max(initial=0))

    def _arcs_to_try(self) -> list[tuple[int, int | None]]:
        """Return limits of arcs, the best first: cut to 1; as each holder sends once; cut to more; lengthened."""
        _, receivers = self.remote_pairs
        ring = int((self.needed > 0).sum(axis=1)[receivers].max(initial=1))
        longest = int(self.trees(UNLIMITED)[0].max(initial=1))
        cut: list[tuple[int, int | None]] = [(1, arc) for arc in ARCS if arc < min(longest, MAX_GOOD_ARC + 1)]
        once = [UNLIMITED.arcs]
        between = [*once, *cut] if longest <= MAX_SHORT_ARC else [*cut, *once]
        return [(1, 1), *between, *((arc, arc) for arc in ARCS if arc < ring), (ring, ring)]

    @cached_property
    def _is_colocated(self) -> bool:
        """Whether some machine both holds and needs boxes, so that its NICs do both."""
        return bool(((self.held > 0).any(axis=0) & (self.needed > 0).any(axis=0)).any())

    def _egress_ratio(self, limits: RemoteSources) -> float:
        """Return the most bytes that a machine sends over the most that one receives."""
        needs, lacks = (self.needed > 0).astype(float), (self.held == 0).astype(float)
        num_bytes = self.pairs.astype(float)
        received = ((num_bytes @ needs) * lacks).sum(axis=0)
        copies = lacks @ needs.T
        from_holders = np.zeros_like(copies)
        _, from_holders[self.remote_pairs] = self.trees(limits)
        from_holders = np.minimum(from_holders, copies)
        share = self.held / np.maximum(self.held.sum(axis=1), 1)[:, None]
        sent = (num_bytes * from_holders).sum(axis=1) @ share
        relayed = (num_bytes * (copies - from_holders)).sum(axis=0) / np.maximum(needs.sum(axis=1), 1)
        return float((sent + relayed @ needs).max(initial=0) / max(received.max(initial=0), 1))

    def num_turns(self, limits: RemoteSources) -> int:
        """Return the number of slices of a stage in one round: after as many, all have sent equally much, or fewer."""
        return min(math.lcm(self._even_turns(limits), self._turns_on_machines()), MAX_TURNS)

    def _turns_on_machines(self) -> int:
        """Return a number of turns after which holders have sent equally much to receivers on their own machine."""
        every_rank = np.arange(len(self.topology.nodes))
        held, needed = (_counts(sets, every_rank).astype(np.float32) for sets in (self.holders, self.receivers))
        turns = {1}
        for ranks in self.topology.ranks_of.values():
            of, to = held[:, ranks], needed[:, ranks]
            lacking = (to.sum(axis=1) - of @ to.T).astype(np.int64)
            sources = np.broadcast_to(of.sum(axis=1).astype(np.int64)[:, None], lacking.shape)
            some = (self.pairs > 0) & (sources > 0) & (lacking > 0)
            turns.update((sources[some] // np.gcd(sources[some], lacking[some])).tolist())
        return math.lcm(*turns)

    def _even_turns(self, limits: RemoteSources) -> int:
        """Return a number of turns after which holders, and the ranks of a machine, have had equally many."""
        holders, receivers = self.remote_pairs
        found = 1
        machines = (
            np.ones(len(receivers), np.int64) if limits.arcs == (1, 1) else (self.needed > 0).sum(axis=1)[receivers]
        )
        counts = _lengths(self.holders)[holders], self.needed.max(axis=1)[receivers], machines
        for numbers in set(zip(*(column.tolist() for column in counts), strict=True)):
            found = math.lcm(found, *numbers)
        return found

    def _peers(self, limits: RemoteSources) -> tuple[float, Ints, int]:
        """Return how many ranks of other machines a rank exchanges boxes with, if each set has one turn.

        Returns:
            the most that one rank sends to as a holder or receives from as holders; by set of receivers, the holders
            that each of them receives from; the most in relays.
        """
        holders, receivers = self.remote_pairs
        arc, num_roots = self.trees(limits)
        by_holders = np.bincount(holders, num_roots, len(self.holders)) / _lengths(self.holders)
        by_receivers = np.bincount(receivers, num_roots, len(self.receivers)) / _lengths(self.receivers)
        peers = np.zeros(len(self.topology.nodes))
        for sets, number in ((self.holders, by_holders), (self.receivers, by_receivers)):
            np.add.at(peers, _flat(sets), np.repeat(number, _lengths(sets)))
        return float(peers.max()), by_receivers, 2 * len(distances(int(arc.max(initial=1))))

    def trees(self, limits: RemoteSources) -> tuple[Ints, Ints]:
        """Return, by pair of `remote_pairs`, the machines that one root serves, and the number of roots."""
        holders, receivers = self.remote_pairs
        is_single = np.array([ranks in limits.single_root for ranks in self.receivers], bool)[receivers]
        machines = (self.needed > 0).sum(axis=1)[receivers]
        arc = limits.arc_lengths(machines, np.where(is_single, 1, _lengths(self.holders)[holders]))
        return arc, -(-machines // arc)

    @cached_property
    def remote_pairs(self) -> tuple[Ints, Ints]:
        """The pairs (holders, receivers) of which some receivers have no holder on their machine: two arrays."""
        held, needs = (self.held > 0).astype(np.float32), (self.needed > 0).astype(np.float32)
        lacking = needs.sum(axis=1) - held @ needs.T  # machines that need boxes and hold none
        holders, receivers = np.nonzero((self.pairs > 0) & (lacking > 0))
        return holders, receivers

    @cached_property
    def held(self) -> Ints:
        """[holders, machines], the number of holders on each machine."""
        return _counts(self.holders, self.machine_of)

    @cached_property
    def needed(self) -> Ints:
        """[receivers, machines], the number of receivers on each machine."""
        return _counts(self.receivers, self.machine_of)

    @cached_property
    def machine_of(self) -> Ints:
        """By rank, the index of its machine in `held` and `needed`, which have machines in the order of their nodes."""
        return np.unique(np.array(self.topology.nodes), return_inverse=True)[1]


def _counts(sets: Sequence[Ranks], column_of: Ints) -> Ints:
    """Return [sets, columns], how many ranks of each set are in each column; `column_of`: by rank, its column."""
    counts = np.zeros((len(sets), int(column_of.max()) + 1), np.int64)
    np.add.at(counts, (np.repeat(np.arange(len(sets)), _lengths(sets)), column_of[_flat(sets)]), 1)
    return counts


def _lengths(sets: Sequence[Ranks]) -> Ints:
    return np.array([len(ranks) for ranks in sets], np.int64)


def _flat(sets: Sequence[Ranks]) -> Ints:
    return np.fromiter(chain.from_iterable(sets), np.int64)


@dataclass(frozen=True, slots=True)
class RingEntries:
    """The chosen entries: arrays [holders, receivers], indexed as in `RemoteTraffic`; 0 for pairs on one machine."""

    root: Ints
    """Position of the root among the holders, modulo their number."""
    machine: Ints
    """Index of the machine on the ring, modulo the number of machines."""
    fetcher: Ints
    """Position of the rank that fetches the box among the receivers on a machine, modulo their number."""

    @classmethod
    def choose(cls, traffic: RemoteTraffic, limits: RemoteSources) -> RingEntries:
        """Return the same entries on every rank."""
        found = cls(*(np.zeros(traffic.pairs.shape, np.int64) for _ in range(3)))
        holders, receivers = traffic.remote_pairs
        machines = ((traffic.needed > 0)[receivers] & (traffic.held == 0)[holders]).sum(axis=1)
        num_holders = _lengths(traffic.holders)[holders]
        order = _by_bytes(traffic, holders, receivers)
        arc, num_roots = traffic.trees(limits)
        place = _starts(holders, np.where(arc == 1, machines, num_roots), order)
        root = np.where(
            arc == 1,
            _first_sources(limits.num_turns, num_holders, place),
            place * turn_offset(limits.num_turns, num_holders),
        )
        place = _starts(receivers, np.ones_like(receivers), order)
        found.root[holders, receivers], found.machine[holders, receivers] = root, place
        num_fetchers = traffic.needed.max(axis=1)[receivers]
        found.fetcher[holders, receivers] = _first_sources(limits.num_turns, num_fetchers, place)
        num_sources = np.zeros(len(traffic.topology.nodes), np.int64)  # by rank, the roots that it receives from
        single = [number for number, ranks in enumerate(traffic.receivers) if ranks in limits.single_root]
        single.sort(key=lambda number: len(traffic.receivers[number]))
        for turn, number in enumerate(single):
            found._choose_for(traffic, number, holders[receivers == number], turn, num_sources)
        return found

    def of(self, holders: int, receivers: int) -> Entry:
        """Return the entry of a pair."""
        pair = holders, receivers
        return Entry(int(self.root[pair]), -int(self.machine[pair]), int(self.fetcher[pair]))

    def _choose_for(self, traffic: RemoteTraffic, number: int, sets: Ints, turn: int, num_sources: Ints) -> None:
        """Choose the entries of one set of receivers.

        Args:
            number: index of the receivers.
            sets: indices of the sets of holders.
            turn: how many sets of receivers came before.
            num_sources: counts the new pairs of a root and a receiver.
        """
        members = np.array(traffic.receivers[number], np.int64)
        machines = traffic.machine_of[members].tolist()
        ring = {each: place for place, each in enumerate(dict.fromkeys(machines))}
        machine = np.array([ring[each] for each in machines], np.int64)  # by receiver, its place on the ring
        fetcher = _starts(machine, np.ones_like(machine), np.arange(len(machine)))  # and among those of its machine
        holds = traffic.held[sets][:, list(ring)] > 0
        some = np.flatnonzero(holds.any(axis=1))
        self.root[sets[some], number] = 0
        self.machine[sets[some], number] = _nth_true(holds[some], turn)
        self.fetcher[sets[some], number] = sets[some]
        remote = sets[~holds.any(axis=1)]
        size = _lengths(traffic.holders)[remote]
        entered_at = np.full(len(num_sources), -1, np.int64)  # by root, the position of its receiver
        for length in np.unique(size):  # larger sets contain roots of smaller ones
            of = remote[size == length]
            ranks = np.array([traffic.holders[i] for i in of.tolist()])
            known = entered_at[ranks] >= 0
            is_new = ~known.any(axis=1)
            root = np.where(is_new, (turn + of) % length, _nth_true(known, turn))
            chosen = ranks[np.arange(len(of)), root]
            new = _least_first(num_sources[members], int(is_new.sum()))
            entered_at[chosen[is_new]] = new
            np.add.at(num_sources, members[new], 1)
            at = entered_at[chosen]
            self.root[of, number], self.machine[of, number] = root, machine[at]
            self.fetcher[of, number] = fetcher[at]


def _by_bytes(traffic: RemoteTraffic, holders: Ints, receivers: Ints) -> Ints:
    """Return the order of pairs [N] by descending bytes, equal ones by the ranks of both sides.

    So pairs that are next to each other are those that a rank has most often in the same round.
    """
    places = []
    for sets, numbers in ((traffic.holders, holders), (traffic.receivers, receivers)):
        place = np.empty(len(sets), np.int64)
        place[sorted(range(len(sets)), key=sets.__getitem__)] = np.arange(len(sets))
        places.append(place[numbers])
    order: Ints = np.lexsort((*places[::-1], -traffic.pairs[holders, receivers]))
    return order


def _starts(group: Ints, lengths: Ints, order: Ints) -> Ints:
    """Return the sum [N] of the lengths of the same group that come before in an order."""
    order = order[np.argsort(group[order], kind="stable")]
    ends = np.cumsum(lengths[order])
    starts = ends - lengths[order]
    first = np.searchsorted(group[order], group[order])
    found = np.empty_like(starts)
    found[order] = starts - starts[first]
    return found


def _first_sources(num_turns: int | None, num_sources: Ints, place: Ints) -> Ints:
    """Return the first source of N receivers, each the one at its place [N] among those of as many sources [N]."""
    found = np.empty_like(place)
    for count in np.unique(num_sources).tolist():
        same = num_sources == count
        found[same] = first_sources(num_turns, count)[place[same] % count]
    return found


def _nth_true(mask: Ints, n: int) -> Ints:
    """Return, by row of the mask [N, M], the column of its n-th true value, counted in turns; 0 in rows without any."""
    order = np.cumsum(mask, axis=1)
    wanted = n % np.maximum(order[:, -1:], 1) + 1
    columns: Ints = (mask & (order == wanted)).argmax(axis=1)
    return columns


def _least_first(load: Ints, count: int) -> Ints:
    """Return `count` positions of `load`: each time that of the least value, which then grows by 1."""
    levels = count // len(load) + int(load.max() - load.min()) + 1
    order = np.argsort((load[:, None] + np.arange(levels)).reshape(-1), kind="stable")
    positions: Ints = order[:count] // levels
    return positions
