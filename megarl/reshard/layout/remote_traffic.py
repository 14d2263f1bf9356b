"""Estimates the traffic between machines: how many peers a rank has there, and how many hops boxes take."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain

import numpy as np

from megarl.reshard.layout.layout import Ints
from megarl.reshard.layout.relay_tree import Ranks, RemoteSources, distances, num_passed
from megarl.reshard.layout.topology import Topology

MAX_REMOTE_PEERS = 128
"""The most ranks of other machines that a rank should exchange messages with: each takes buffers and a connection."""


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
        """Return the limits that keep most ranks at `MAX_REMOTE_PEERS` peers, with as many turns as these allow.

        Receivers that would have a large part of that number as sources get boxes from one holder each.
        """
        limits = RemoteSources(even_origins=len(self.topology.nodes) <= MAX_REMOTE_PEERS)
        if self._may_send_to_all():
            direct = replace(limits, direct=True)
            peers, _, _ = self._peers(direct)
            if peers <= MAX_REMOTE_PEERS:
                return self._with_turns(direct, MAX_REMOTE_PEERS / max(peers, 1))
        peers, by_receivers, relays = self._peers(limits)
        if peers + relays > MAX_REMOTE_PEERS:
            many = np.flatnonzero(by_receivers > MAX_REMOTE_PEERS / 4).tolist()
            limits = RemoteSources(single_root=frozenset(self.receivers[number] for number in many))
            peers, _, relays = self._peers(limits)
        return self._with_turns(limits, (MAX_REMOTE_PEERS - relays) / peers if peers else MAX_REMOTE_PEERS)

    def _with_turns(self, limits: RemoteSources, most: float) -> RemoteSources:
        """Return the limits with at most so many turns, after which all have had equally many if that is possible."""
        even, turns = self.num_turns(limits), max(int(most), 1)
        if turns >= even:
            return replace(limits, num_turns=turns - turns % even)
        divisor = max(number for number in range(1, turns + 1) if even % number == 0)
        return replace(limits, num_turns=divisor if 2 * divisor > turns else turns)

    def num_hops(self, limits: RemoteSources) -> int:
        """Return the number of hops that boxes take at most."""
        _, receivers = self.remote_pairs
        arc, _ = self._trees(limits)
        depth = np.maximum.accumulate(num_passed(np.arange(arc.max(initial=1))))
        are_shared = np.asarray((self.needed > 1).any(axis=1))
        return 1 + int((depth[arc - 1] + are_shared[receivers]).max(initial=0))

    def _may_send_to_all(self) -> bool:
        """Return whether no machine would send more bytes than the most that one receives, without any relays."""
        needs, lacks, num_bytes = (
            (self.needed > 0).astype(float),
            (self.held == 0).astype(float),
            self.pairs.astype(float),
        )
        received = ((num_bytes @ needs) * lacks).sum(axis=0)
        share = self.held / np.maximum(self.held.sum(axis=1), 1)[:, None]
        sent = (num_bytes * (lacks @ needs.T)).sum(axis=1) @ share
        return bool(sent.max(initial=0) <= 1.02 * received.max(initial=0))

    def num_turns(self, limits: RemoteSources) -> int:
        """Return a number of turns after which holders, and the ranks of a machine, have had equally many."""
        holders, receivers = self.remote_pairs
        found = 1
        machines = np.ones(len(receivers), np.int64) if limits.direct else (self.needed > 0).sum(axis=1)[receivers]
        counts = _lengths(self.holders)[holders], self.needed.max(axis=1)[receivers], machines
        for numbers in set(zip(*(column.tolist() for column in counts), strict=True)):
            found = math.lcm(found, *numbers)
        return min(found, MAX_TURNS)

    def _peers(self, limits: RemoteSources) -> tuple[float, Ints, int]:
        """Return how many ranks of other machines a rank exchanges boxes with, if each set has one turn.

        Returns:
            the most that one rank sends to as a holder or receives from as holders; by set of receivers, the holders
            that each of them receives from; the most in relays.
        """
        holders, receivers = self.remote_pairs
        arc, num_roots = self._trees(limits)
        by_holders = np.bincount(holders, num_roots, len(self.holders)) / _lengths(self.holders)
        by_receivers = np.bincount(receivers, num_roots, len(self.receivers)) / _lengths(self.receivers)
        peers = np.zeros(len(self.topology.nodes))
        for sets, number in ((self.holders, by_holders), (self.receivers, by_receivers)):
            np.add.at(peers, _flat(sets), np.repeat(number, _lengths(sets)))
        return float(peers.max()), by_receivers, 2 * len(distances(int(arc.max(initial=1))))

    def _trees(self, limits: RemoteSources) -> tuple[Ints, Ints]:
        """Return, by pair of `remote_pairs`, the machines that one root serves, and the number of roots."""
        holders, receivers = self.remote_pairs
        is_single = np.array([ranks in limits.single_root for ranks in self.receivers], bool)[receivers]
        machines = (self.needed > 0).sum(axis=1)[receivers]
        roots = machines if limits.direct else np.where(is_single, 1, _lengths(self.holders)[holders])
        arc = np.maximum(-(-machines // roots), 1)
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
        return self._by_machine(self.holders)

    @cached_property
    def needed(self) -> Ints:
        """[receivers, machines], the number of receivers on each machine."""
        return self._by_machine(self.receivers)

    def columns_of(self, nodes: Sequence[int]) -> Ints:
        """Return the indices of the nodes among the machines of `held` and `needed`."""
        return np.searchsorted(self._nodes[0], nodes)

    @cached_property
    def _nodes(self) -> tuple[Ints, Ints]:
        """The nodes, ascending; and by rank, the index of its node."""
        nodes, number = np.unique(np.array(self.topology.nodes), return_inverse=True)
        return nodes, number

    def _by_machine(self, sets: Sequence[Ranks]) -> Ints:
        num_machines, machine = len(self._nodes[0]), self._nodes[1]
        number = np.repeat(np.arange(len(sets)), _lengths(sets))
        counts = np.bincount(number * num_machines + machine[_flat(sets)], minlength=len(sets) * num_machines)
        return counts.reshape(len(sets), num_machines)


def _lengths(sets: Sequence[Ranks]) -> Ints:
    return np.array([len(ranks) for ranks in sets], np.int64)


def _flat(sets: Sequence[Ranks]) -> Ints:
    return np.fromiter(chain.from_iterable(sets), np.int64)
