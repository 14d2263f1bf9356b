"""Sources of boxes: relay trees, entries into rings of machines, rounds and fan-out, against brute force."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.reshard.layout.relay_tree import RelayTree, RemoteSources
from megarl.reshard.layout.remote_traffic import MAX_REMOTE_PEERS, RemoteTraffic
from megarl.reshard.layout.ring_entries import RingEntries
from megarl.reshard.layout.round_limits import FanOut, Loads, are_contiguous, cut_rounds
from megarl.reshard.layout.topology import SourceSelector, Topology


@pytest.mark.parametrize(("machines", "roots"), [(1, 1), (5, 1), (7, 3), (8, 8), (8, 2), (64, 2), (100, 7)])
@pytest.mark.parametrize("origins", [(), (0,), (1, 2, 5)])
def test_every_machine_receives_once_over_short_paths(machines, roots, origins):
    origins = [number for number in origins if number < machines]
    tree = RelayTree.over(machines, roots, origins)
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
            assert passed <= tree.depth <= (tree.arc - 1).bit_length()
            children = {to for _, to in tree.children(machine, turn)}
            assert children == {other for other, (_, source, _, _) in paths.items() if source == machine}


def path_of(tree, machine, rotation):
    path = tree.path(machine, rotation)
    return tuple(int(x[0]) for x in (path.root, path.parent, path.origin, path.passed))


def test_machines_send_equally_much_and_have_few_peers():
    """Over all rotations of a ring of 64, every machine passes a box on as often as the others."""
    tree, turns = RelayTree.over(64, 1), np.arange(64)
    sends = [sum(len(boxes) for boxes, _ in tree.children(machine, turns)) for machine in range(64)]
    assert sends == [63] * 64
    peers = {(to - 5) % 64 for _, to in tree.children(5, turns)}
    assert peers == {1, 2, 4, 8, 16, 32}
    assert tree.depth == 6


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
    limits = RemoteSources(2, frozenset(traffic.receivers[:TP]))
    entries, turns = RingEntries.choose(traffic, limits), np.arange(4)
    for h, r in ((0, 3), (37, 0), (300, 5), (325, TP)):
        holders, receivers, entry = traffic.holders[h], traffic.receivers[r], entries.of(h, r)
        selector = SourceSelector(holders, receivers, traffic.topology, {}, relay=True, remote=limits, entry=entry)
        sent, received = sent_and_received(selector, {*holders, *receivers}, receivers, turns)
        assert sent == received


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9), st.integers(0, 30)), max_size=30), st.integers(1, 40))
@settings(max_examples=200)
def test_rounds_are_as_long_as_the_limit_allows(loads, limit):
    owner, item, num_bytes = np.array(loads, np.int64).reshape(-1, 3).T
    rounds = cut_rounds(Loads.of(owner, item, num_bytes, np.ones_like(item)), 10, limit).tolist()
    expected, start = [], 0
    for position in range(10):
        sums = {who: sum(n for o, i, n in loads if o == who and start <= i <= position) for who in range(4)}
        now = {who: sum(n for o, i, n in loads if o == who and i == position) for who in range(4)}
        if any(sums[who] > limit and sums[who] > now[who] and now[who] for who in range(4)):
            start = position
        expected.append(start)
    assert rounds == [sorted(set(expected)).index(start) for start in expected]


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(0, 2), st.integers(1, 3)), min_size=1, max_size=4))
@settings(max_examples=200)
def test_contiguity_agrees_with_torch(dims):
    extent = [before + length + after for before, after, length in dims]
    start = [before for before, _, _ in dims]
    stop = [before + length for before, _, length in dims]
    box = torch.zeros(extent)[tuple(map(slice, start, stop))]
    assert are_contiguous(*(np.array([x]) for x in (start, stop, extent))).tolist() == [box.is_contiguous()]


def draw_ranks(data, max_ranks, num_nodes):
    world = data.draw(st.integers(2, max_ranks))
    ranks = st.sets(st.integers(0, world - 1), min_size=1).map(lambda found: tuple(sorted(found)))
    nodes = st.tuples(*[st.integers(0, num_nodes - 1)] * world)
    return world, data.draw(ranks), data.draw(ranks), Topology(data.draw(nodes))


@given(st.data(), st.booleans(), st.booleans(), st.booleans())
@settings(max_examples=200)
def test_fan_out_bounds_every_rotation(data, relay, grouped, single_root):
    world, holders, receivers, topology = draw_ranks(data, 8, 5)
    groups = [tuple(range(i, min(i + 2, world))) for i in range(0, world, 2)] if grouped else []
    group_of = {rank: number for number, group in enumerate(groups) for rank in group}
    remote = RemoteSources(single_root=frozenset([receivers] * single_root))
    selector = SourceSelector(holders, receivers, topology, group_of, relay=relay, remote=remote)
    fan_out = FanOut(topology.nodes, groups, relay=relay, remote=remote)
    turns = np.arange(840)  # a multiple of all numbers of sources
    for source in range(world):
        boxes, _, hops = selector.sends(source, turns, receivers)
        most = np.bincount(boxes, minlength=1).max()
        assert most <= (fan_out.of_holder if source in holders else fan_out.of_fetcher)(holders, receivers)
        assert source not in holders or not hops.any()


@given(st.data(), st.booleans(), st.booleans(), st.sampled_from([None, 1, 3]))
@settings(max_examples=200)
def test_senders_and_receivers_agree(data, relay, single_root, num_turns):
    world, holders, receivers, topology = draw_ranks(data, 12, 6)
    remote = RemoteSources(num_turns, frozenset([receivers] * single_root))
    selector = SourceSelector(holders, receivers, topology, {}, relay=relay, remote=remote)
    turns = np.arange(30)
    sent, received = sent_and_received(selector, range(world), receivers, turns)
    assert sent == received
    arrival = {(box, rank): hop for box, _, rank, hop in received}
    for box, source, _, hop in received:  # what is relayed has arrived one hop before
        assert hop == 0 if source in holders else arrival[box, source] == hop - 1
    for box in turns:  # it enters a node that lacks it once, and no holder sends it to two such nodes if relayed
        entering = [(source, topology.nodes[to]) for b, source, to, _ in received if b == box]
        entering = [(source, node) for source, node in entering if topology.nodes[source] != node]
        if relay:
            assert len({node for _, node in entering}) == len(entering)
            if {topology.nodes[rank] for rank in holders}.isdisjoint({topology.nodes[rank] for rank in receivers}):
                assert all(count <= 1 for source, count in Counter(s for s, _ in entering).items() if source in holders)


def test_all_holders_send():
    """64 ranks hold what one rank of each of 64 other nodes needs: each of them sends equally many boxes."""
    topology = Topology((*[0] * 64, *range(1, 65)))
    for machines, num_boxes in ((64, 256), (1, 192), (3, 192)):  # or fewer machines than holders
        receivers = range(64, 64 + machines)
        selector = SourceSelector(range(64), receivers, topology, {}, relay=True)
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
    selector = SourceSelector(range(num_holders), receivers, Topology(nodes), {}, relay=True)
    turns = np.arange(num_holders * machines * (machines + 1) * 4)
    sent = np.zeros(num_holders, int)
    for rank in others:
        sources, hops = selector.sources(rank, turns)
        np.add.at(sent, sources[hops == 0], 1)
        assert not (sources[hops == 0] >= num_holders).any()
    assert sent.max() == sent.min() > 0
