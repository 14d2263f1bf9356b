"""Sources of boxes: relay trees and entries into rings of machines, against brute force."""

import math
from collections import Counter
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.reshard.layout.relay_tree import RelayTree, RemoteSources, first_sources, num_passed, ring_stride
from megarl.reshard.layout.remote_traffic import MAX_REMOTE_PEERS, RemoteTraffic, RingEntries
from megarl.reshard.layout.topology import SourceSelector, Topology


@pytest.mark.parametrize(("machines", "roots"), [(1, 1), (5, 1), (7, 3), (8, 8), (8, 2), (64, 2), (100, 7)])
@pytest.mark.parametrize("origins", [(), (0,), (1, 2, 5)])
def test_every_machine_receives_once_over_short_paths(machines, roots, origins):
    origins = [number for number in origins if number < machines]
    tree = RelayTree(machines, -(-machines // roots), frozenset(origins))
    assert tree.num_roots <= roots
    for rotation in range(machines):
        turn = np.array([rotation])
        paths = {machine: path_of(tree, machine, turn) for machine in range(machines)}
        entered = [root for machine, (root, parent, origin, _) in paths.items() if parent == origin == -1]
        assert len(set(entered)) == len(entered) <= tree.num_roots  # each root sends at most once
        assert origins or len(entered) == tree.num_roots
        for root in range(tree.num_roots):
            entry = int(tree.entries(np.array([root]), turn)[0])
            assert (entry == -1) == (root not in entered)
            assert entry == -1 or paths[entry] == (root, -1, -1, 0)
        for machine, (root, parent, origin, passed) in paths.items():
            if machine in origins:
                assert (parent, origin, passed) == (-1, machine, 0)
            elif parent != -1:
                assert paths[parent] == (root, paths[parent][1], origin, passed - 1)
            assert passed <= num_passed(np.arange(tree.arc)).max() <= (tree.arc - 1).bit_length()
            children = {to for _, to in tree.children(machine, turn, range(machines))}
            assert children == {other for other, (_, source, _, _) in paths.items() if source == machine}


def path_of(tree, machine, rotation):
    path = tree.path(machine, rotation)
    return tuple(int(x[0]) for x in (path.root, path.parent, path.origin, path.passed))


def test_machines_send_equally_much_and_have_few_peers():
    """Over all rotations of a ring of 64, every machine passes a box on as often as the others."""
    tree, turns = RelayTree(64, 64), np.arange(64)
    sends = [sum(len(boxes) for boxes, _ in tree.children(machine, turns, range(64))) for machine in range(64)]
    assert sends == [63] * 64
    peers = {(to - 5) % 64 for _, to in tree.children(5, turns, range(64))}
    assert peers == {1, 2, 3, 4, 8, 12, 16, 32, 48}
    assert num_passed(np.arange(tree.arc)).max() == 3


@pytest.mark.parametrize("num_turns", [None, 1, 3, 4, 6, 10])
@pytest.mark.parametrize("num_sources", [1, 2, 6, 7, 16])
def test_sources_send_equally_much_in_one_turn_and_in_all(num_turns, num_sources):
    order, turns = first_sources(num_turns, num_sources).tolist(), range(num_turns or 12)
    assert sorted(order) == list(range(num_sources))
    assert order[0] == 0
    sent = Counter((first + turn) % num_sources for first in order for turn in turns)
    assert set(sent.values()) == {len(turns)}
    few = order[: max(num_sources // len(turns), 1)]  # receivers whose turns cover no source twice
    sent = Counter((first + turn) % num_sources for first in few for turn in turns)
    assert num_turns is None or len(turns) > num_sources or set(sent.values()) == {1}


def test_first_sources_are_spread_over_few_turns():
    """Eight receivers that take 1, 2 or 4 of 8 turns: in all, each source sends as often as the others."""
    assert first_sources(8, 8).tolist() == [0, 4, 2, 6, 1, 5, 3, 7]
    assert first_sources(12, 12)[:6].tolist() == [0, 6, 3, 9, 1, 7]
    for few, turns in ((2, 4), (4, 2), (4, 4), (8, 1)):
        sent = Counter((first + turn) % 8 for first in first_sources(8, 8)[:few].tolist() for turn in range(turns))
        assert set(sent.values()) == {few * turns // 8}


@pytest.mark.parametrize(("machines", "arc", "origins"), [(16, 2, 4), (12, 6, 0), (24, 4, 3), (6, 3, 0), (7, 1, 0)])
@pytest.mark.parametrize("num_turns", [1, 2, 3, 4, 8])
def test_no_stride_gives_machines_more_places_on_a_ring(machines, arc, origins, num_turns):
    spacing = machines // max(origins, 1)

    def num_places(stride):
        places = [(machines - 1 + turn * stride) % machines for turn in range(num_turns)]  # of any machine
        return [len({place % length for place in places}) for length in (machines, arc, spacing)]

    found = num_places(ring_stride(machines, arc, origins, num_turns))
    assert found == max(num_places(stride) for stride in range(1, machines + 1))


TRAINER_RANKS, STAGE = 1024, 128
MACHINES, RANKS_OF_A_MACHINE, TP = 16, 8, 8
ENGINE_RANKS = MACHINES * RANKS_OF_A_MACHINE


def case(is_colocated):
    """Return the traffic of 1,024 trainer ranks in 8 stages and 16 engines.

    Each expert is held by two ranks of a stage, each part of the attention by 16, and the norms by all.
    """
    stages = range(0, TRAINER_RANKS, STAGE)
    pairs = [(first + i, first + i + STAGE // 2) for first in stages for i in range(STAGE // 2)]
    parts = [tuple(range(first + i, first + STAGE, 8)) for first in stages for i in range(8)]
    norms = [tuple(range(first, first + STAGE)) for first in stages]
    first = 0 if is_colocated else TRAINER_RANKS
    receivers = [tuple(range(first + tp, first + ENGINE_RANKS, TP)) for tp in range(TP)]
    receivers.append(tuple(range(first, first + ENGINE_RANKS)))
    holders = pairs + parts + norms
    needs = np.zeros((len(holders), len(receivers)), np.int64)
    needs[: len(pairs) + len(parts), :TP] = 1
    needs[len(pairs) + len(parts) :, TP] = 1
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
        selector = SourceSelector(holders, receivers, topology, {}, remote=limits, entry=entry)
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
    assert engines.max() <= 36  # 512 pairs of ranks hold experts, each for 16 receivers


def moves(columns):
    """Return tuples of numbers from arrays of them."""
    return list(zip(*(column.tolist() for column in columns), strict=True))


def sent_and_received(selector, ranks, receivers, turns):
    """Return (box, source, destination, hop) of all messages, as sources see them and as receivers do."""
    sent = {(box, rank, to, hop) for rank in ranks for box, to, hop in moves(selector.sends(rank, turns, receivers))}
    received = {
        (box, source, rank, hop)
        for rank in receivers
        for box, (source, hop) in enumerate(moves(selector.sources(rank, turns)))
        if source != rank
    }
    return sent, received


def test_senders_and_receivers_agree_about_entries():
    traffic = case(is_colocated=True)
    limits = RemoteSources(2, single_root=frozenset(traffic.receivers[:TP]))
    entries, turns = RingEntries.choose(traffic, limits), np.arange(4)
    for h, r in ((0, 3), (37, 0), (300, 5), (325, TP)):
        holders, receivers, entry = traffic.holders[h], traffic.receivers[r], entries.of(h, r)
        selector = SourceSelector(holders, receivers, traffic.topology, {}, remote=limits, entry=entry)
        sent, received = sent_and_received(selector, {*holders, *receivers}, receivers, turns)
        assert sent == received


def draw_ranks(data, max_ranks, num_nodes):
    world = data.draw(st.integers(2, max_ranks))
    ranks = st.sets(st.integers(0, world - 1), min_size=1).map(lambda found: tuple(sorted(found)))
    nodes = st.tuples(*[st.integers(0, num_nodes - 1)] * world)
    return world, data.draw(ranks), data.draw(ranks), Topology(data.draw(nodes))


@pytest.mark.parametrize("num_turns", [1, 2, 3, 6, 8, 16])
@pytest.mark.parametrize("num_engines", [1, 2, 3])
def test_few_turns_use_all_holders_and_fetchers_equally(num_turns, num_engines):
    """Eight ranks on one machine hold what 4 ranks on each machine of some engines need, each another part."""
    world = 8 + 8 * num_engines
    topology = Topology(tuple(rank // 8 for rank in range(world)))
    receivers = [tuple(range(8 + part, world, 4)) for part in range(4)]
    holders = [tuple(range(part, 8, 2)) for part in range(2)] + [(rank,) for rank in range(8)]
    traffic = RemoteTraffic(topology, holders, receivers, np.full((len(holders), 4), 1000))
    limits = RemoteSources(num_turns, (1, 1))
    entries, turns = RingEntries.choose(traffic, limits), np.arange(num_turns)
    sent, fetched = np.zeros((len(holders), world)), np.zeros((len(holders), world))
    for h, of in enumerate(holders):
        for r, to in enumerate(receivers):
            entry = entries.of(h, r)
            selector = SourceSelector(of, to, topology, {}, remote=limits, entry=entry)
            for rank in to:
                sources, hops = selector.sources(rank, turns)
                np.add.at(sent[h], sources[hops == 0], 1)
                fetched[h, rank] += (hops == 0).sum()
    for h, of in enumerate(holders):
        assert sent[h, list(of)].max() - sent[h, list(of)].min() <= 1
    by_rank = fetched.sum(axis=0)[8:]
    assert by_rank.max() - by_rank.min() <= 1


@pytest.mark.parametrize(("num_holders", "num_receivers"), [(1, 7), (4, 4), (4, 2), (2, 5), (5, 2), (6, 4), (3, 6)])
def test_holders_send_equally_much_on_their_machine_within_the_slices_of_a_round(num_holders, num_receivers):
    holders = tuple(range(num_holders))
    receivers = tuple(range(num_holders - 1, num_holders + num_receivers))  # the first one holds the boxes itself
    topology = Topology.single(num_holders + num_receivers)
    traffic = RemoteTraffic(topology, [holders], [receivers], np.full((1, 1), 1000))
    turns = np.arange(traffic.num_turns(traffic.limit()))
    selector = SourceSelector(holders, receivers, topology, {})
    sent = Counter(source for rank in receivers[1:] for source in selector.sources(rank, turns)[0].tolist())
    assert [sent[rank] for rank in holders] == [len(turns) * num_receivers / num_holders] * num_holders
    assert len(turns) == min(n for n in range(1, 8) if n * num_receivers % num_holders == 0)  # no more than it takes


@pytest.mark.parametrize("num_holders", [1, 2, 4, 8])
@pytest.mark.parametrize("machines", [2, 3, 4, 6, 8, 12])
def test_no_machine_sends_more_than_others_receive(num_holders, machines):
    """Ranks of one machine hold what a rank of each of several machines needs: altogether, they send it once."""
    topology = Topology(tuple(rank // 8 for rank in range(8 * (machines + 1))))
    holders = [tuple(range(part, 8, 8 // num_holders)) for part in range(8 // num_holders)]
    receivers = [tuple(range(8 + part, 8 * (machines + 1), 8)) for part in range(8)]
    traffic = RemoteTraffic(topology, holders, receivers, np.full((len(holders), 8), 1000))
    limits = traffic.limit()
    entries, turns = RingEntries.choose(traffic, limits), np.arange(limits.num_turns)
    sent, received = np.zeros(len(topology.nodes), int), np.zeros(len(topology.nodes), int)
    for (h, of), (r, to) in product(enumerate(holders), enumerate(receivers)):
        selector = SourceSelector(of, to, topology, {}, remote=limits, entry=entries.of(h, r))
        for rank in to:
            sources, _ = selector.sources(rank, turns)
            np.add.at(sent, sources, 1)
            received[rank] += len(turns)
    assert sent.reshape(-1, 8).sum(axis=1).max() == received.reshape(-1, 8).sum(axis=1).max()
    assert sent[:8].max() - sent[:8].min() <= len(receivers)


def test_machines_pass_on_equally_much_of_the_boxes_of_one_turn():
    """Eight ranks hold a box each that one rank on each of 8 machines needs: each machine passes on 7 of them."""
    topology = Topology((*(rank // 8 for rank in range(64)), *range(8, 16)))
    holders, receivers = [(rank,) for rank in range(0, 64, 8)], tuple(range(64, 72))
    traffic = RemoteTraffic(topology, holders, [receivers], np.full((8, 1), 1000))
    limits = RemoteSources(16)
    entries = RingEntries.choose(traffic, limits)
    passed_on = np.zeros((16, 72), int)
    for number, of in enumerate(holders):
        entry = entries.of(number, 0)
        selector = SourceSelector(of, receivers, topology, {}, remote=limits, entry=entry)
        for rank in receivers:
            sources, hops = selector.sources(rank, np.arange(16))
            np.add.at(passed_on, (np.flatnonzero(hops > 0), sources[hops > 0]), 1)
    assert (passed_on[:, 64:] == 7).all()


@given(
    st.data(),
    st.booleans(),
    st.sampled_from([None, 1, 3]),
    st.sampled_from([(1, None), (1, 1), (1, 2), (2, 2), (3, 3)]),
    st.booleans(),
)
@settings(max_examples=300)
def test_senders_and_receivers_agree(data, single_root, num_turns, arcs, even_origins):
    world, holders, receivers, topology = draw_ranks(data, 12, 6)
    remote = RemoteSources(num_turns, arcs, even_origins, single_root=frozenset([receivers] * single_root))
    selector = SourceSelector(holders, receivers, topology, {}, remote=remote)
    turns = np.arange(30)
    sent, received = sent_and_received(selector, range(world), receivers, turns)
    assert sent == received
    arrival = {(box, rank): hop for box, _, rank, hop in received}
    for box, source, _, hop in received:  # what is relayed has arrived one hop before
        assert hop == 0 if source in holders else arrival[box, source] == hop - 1
    for box in turns:  # it enters a node that lacks it once, and no holder sends it to more of them than it has to
        entering = [(source, topology.nodes[to]) for b, source, to, _ in received if b == box]
        entering = [(source, node) for source, node in entering if topology.nodes[source] != node]
        assert len({node for _, node in entering}) == len(entering)
        machines = {topology.nodes[rank] for rank in receivers}
        if {topology.nodes[rank] for rank in holders}.isdisjoint(machines):
            roots = 1 if single_root else len(holders)
            arc = int(remote.arc_lengths(np.array(len(machines)), np.array(roots)))
            most = max(math.ceil(math.ceil(len(machines) / arc) / len(holders)), 1)
            assert all(n <= most for source, n in Counter(s for s, _ in entering).items() if source in holders)


def test_all_holders_send():
    """64 ranks hold what one rank of each of 64 other nodes needs: each of them sends equally many boxes."""
    topology = Topology((*[0] * 64, *range(1, 65)))
    for machines, num_boxes in ((64, 256), (1, 192), (3, 192)):  # or fewer machines than holders
        receivers = range(64, 64 + machines)
        selector = SourceSelector(range(64), receivers, topology, {})
        sent = [len(selector.sends(rank, np.arange(num_boxes), receivers)[0]) for rank in range(64)]
        assert sum(sent) == num_boxes * machines
        assert min(sent) > 0
        assert machines < 64 or sent == [256] * 64


@pytest.mark.parametrize("holders_need", [True, False])
@pytest.mark.parametrize("machines", [1, 2, 3, 4])
@pytest.mark.parametrize("num_holders", [2, 3, 4, 8])
def test_holders_send_equally_much_to_other_machines(num_holders, machines, holders_need):
    """Holders on one machine; one rank of each of some other machines needs the boxes, and perhaps the holders do."""
    nodes = (0,) * num_holders + tuple(range(1, machines + 1))
    others = list(range(num_holders, len(nodes)))
    receivers = [*(range(num_holders) if holders_need else ()), *others]
    selector = SourceSelector(range(num_holders), receivers, Topology(nodes), {})
    turns = np.arange(num_holders * machines * (machines + 1) * 4)
    sent = np.zeros(num_holders, int)
    for rank in others:
        sources, hops = selector.sources(rank, turns)
        np.add.at(sent, sources[hops == 0], 1)
        assert not (sources[hops == 0] >= num_holders).any()
    assert sent.max() == sent.min() > 0


def test_holders_on_several_machines_send_equally_much():
    """16 machines need a box that ranks of the first 4 hold; unevenly placed, one would send half as much again."""
    topology = Topology(tuple(rank // 2 for rank in range(32)))
    sent = {}
    for even_origins in (False, True):
        limits = RemoteSources(16, even_origins=even_origins)
        selector = SourceSelector([0, 2, 4, 6], range(32), topology, {}, remote=limits)
        turns = np.arange(64)
        found = {rank: moves(selector.sends(rank, turns, range(32))) for rank in (0, 2, 4, 6)}
        sent[even_origins] = [sum(not topology.same_node(rank, to) for _, to, _ in found[rank]) for rank in found]
    assert max(sent[True]) == min(sent[True]) > 0
    assert max(sent[False]) > 1.4 * min(sent[False])
