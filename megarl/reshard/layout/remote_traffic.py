"""Estimates the traffic between machines: how many peers a rank has there, and how many hops boxes take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain

import numpy as np

from megarl.reshard.layout.boxes import Ints
from megarl.reshard.layout.relay_tree import UNLIMITED, Ranks, RemoteSources
from megarl.reshard.layout.topology import Topology

MAX_REMOTE_PEERS = 64
"""The most ranks of other machines that a rank should exchange messages with: each takes buffers and a connection."""


@dataclass(frozen=True)
class RemoteTraffic:
    """Sets of ranks that hold and need boxes, and which of these exchange boxes."""

    topology: Topology
    holders: Sequence[Ranks]
    receivers: Sequence[Ranks]
    pairs: Ints
    """[holders, receivers], bool: whether the receivers need a box of the holders."""

    def limit(self) -> RemoteSources:
        """Return the limits that keep most ranks at `MAX_REMOTE_PEERS` peers, with as many turns as these allow.

        Receivers that would have a large part of that number as sources get boxes from one holder each.
        """
        limits = UNLIMITED
        peers, by_receivers, relays = self._peers(limits)
        if peers + relays > MAX_REMOTE_PEERS:
            many = np.flatnonzero(by_receivers > MAX_REMOTE_PEERS / 4).tolist()
            limits = RemoteSources(single_root=frozenset(self.receivers[number] for number in many))
            peers, _, relays = self._peers(limits)
        turns = int((MAX_REMOTE_PEERS - relays) // peers) if peers else MAX_REMOTE_PEERS
        return replace(limits, num_turns=max(turns, 1))

    def num_hops(self, limits: RemoteSources) -> int:
        """Return the number of hops that boxes take at most."""
        _, receivers = self.remote_pairs
        arc, _ = self._trees(limits)
        depth = np.maximum.accumulate(np.bitwise_count(np.arange(arc.max(initial=1))).astype(np.int64))
        are_shared = np.asarray((self.needed > 1).any(axis=1))
        return 1 + int((depth[arc - 1] + are_shared[receivers]).max(initial=0))

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
        return float(peers.max()), by_receivers, 2 * (int(arc.max(initial=1)) - 1).bit_length()

    def _trees(self, limits: RemoteSources) -> tuple[Ints, Ints]:
        """Return, by pair of `remote_pairs`, the machines that one root serves, and the number of roots."""
        holders, receivers = self.remote_pairs
        is_single = np.array([ranks in limits.single_root for ranks in self.receivers], bool)[receivers]
        roots = np.where(is_single, 1, _lengths(self.holders)[holders])
        machines = (self.needed > 0).sum(axis=1)[receivers]
        arc = np.maximum(-(-machines // roots), 1)
        return arc, -(-machines // arc)

    @cached_property
    def remote_pairs(self) -> tuple[Ints, Ints]:
        """The pairs (holders, receivers) of which some receivers have no holder on their machine: two arrays."""
        held, needs = (self.held > 0).astype(np.float32), (self.needed > 0).astype(np.float32)
        lacking = needs.sum(axis=1) - held @ needs.T  # machines that need boxes and hold none
        holders, receivers = np.nonzero(self.pairs & (lacking > 0))
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
