"""Entries of boxes into rings of machines: peers on other machines, counted over all boxes."""

from dataclasses import replace

import numpy as np
import pytest

from megarl.reshard.layout.relay_tree import RemoteSources
from megarl.reshard.layout.remote_traffic import MAX_REMOTE_PEERS, RemoteTraffic
from megarl.reshard.layout.ring_entries import RingEntries
from megarl.reshard.layout.topology import SourceSelector, Topology

TRAINER_RANKS, STAGE = 512, 64
MACHINES, RANKS_OF_A_MACHINE, TP = 16, 8, 8
ENGINE_RANKS = MACHINES * RANKS_OF_A_MACHINE


def case(is_colocated):
    """Return the traffic of 512 trainer ranks in 8 stages and 16 engines.

    Each expert is held by two ranks of a stage, each part of the attention by 8, and the norms by all.
    """
    stages = range(0, TRAINER_RANKS, STAGE)
    pairs = [(first + i, first + i + STAGE // 2) for first in stages for i in range(STAGE // 2)]
    parts = [tuple(range(first + i, first + STAGE, 8)) for first in stages for i in range(8)]
    norms = [tuple(range(first, first + STAGE)) for first in stages]
    first = 0 if is_colocated else TRAINER_RANKS
    receivers = [tuple(range(first + tp, first + ENGINE_RANKS, TP)) for tp in range(TP)]
    receivers.append(tuple(range(first, first + ENGINE_RANKS)))
    holders = pairs + parts + norms
    needs = np.zeros((len(holders), len(receivers)), bool)
    needs[: len(pairs) + len(parts), :TP] = True
    needs[len(pairs) + len(parts) :, TP] = True
    nodes = tuple(rank // RANKS_OF_A_MACHINE for rank in range(max(first + ENGINE_RANKS, TRAINER_RANKS)))
    return RemoteTraffic(Topology(nodes), holders, receivers, needs)


@pytest.mark.parametrize("is_colocated", [True, False])
def test_no_rank_has_more_peers_than_the_limit(is_colocated):
    """Peers on other machines, from what every rank receives. Without entries, 30 ranks would send to some."""
    traffic = case(is_colocated)
    topology, limits = traffic.topology, replace(traffic.limit(), num_turns=1)
    assert limits.single_root
    entries = RingEntries.choose(traffic, limits)
    peers, from_roots = [set() for _ in topology.nodes], np.zeros(len(topology.nodes), int)
    for h, r in zip(*(axis.tolist() for axis in np.nonzero(traffic.pairs)), strict=True):
        holders, receivers, entry = traffic.holders[h], traffic.receivers[r], entries.of(h, r)
        selector = SourceSelector(holders, receivers, topology, {}, relay=True, remote=limits, entry=entry)
        for rank in receivers:
            sources, hops = selector.sources(rank, np.arange(limits.num_turns))
            for source, hop in zip(sources.tolist(), hops.tolist(), strict=True):
                if not topology.same_node(source, rank):
                    from_roots[rank] += hop == 0 and source not in peers[rank]
                    peers[rank].add(source)
                    peers[source].add(rank)
    assert max(map(len, peers)) <= MAX_REMOTE_PEERS
    first = traffic.receivers[-1][0]
    engines = from_roots[first : first + ENGINE_RANKS]
    assert engines.max() <= 18  # 256 pairs of ranks hold experts, each for 16 receivers


def moves(columns):
    """Return tuples of numbers from arrays of them."""
    return list(zip(*(column.tolist() for column in columns), strict=True))


def test_senders_and_receivers_agree_about_entries():
    traffic = case(is_colocated=True)
    limits = RemoteSources(2, frozenset(traffic.receivers[:TP]))
    entries, turns = RingEntries.choose(traffic, limits), np.arange(4)
    for h, r in ((0, 3), (37, 0), (300, 5), (325, TP)):
        holders, receivers, entry = traffic.holders[h], traffic.receivers[r], entries.of(h, r)
        selector = SourceSelector(holders, receivers, traffic.topology, {}, relay=True, remote=limits, entry=entry)
        sent, received = set(), set()
        for rank in {*holders, *receivers}:
            sent |= {(rank, *move) for move in moves(selector.sends(rank, turns, receivers))}
        for rank in receivers:
            of_rank = enumerate(moves(selector.sources(rank, turns)))
            received |= {(source, box, rank, hop) for box, (source, hop) in of_rank if source != rank}
        assert sent == received
