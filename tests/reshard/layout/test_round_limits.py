"""Rounds, contiguity and fan-out bounds against brute force."""

from collections import Counter

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.reshard.layout.relay_tree import RemoteSources
from megarl.reshard.layout.round_limits import FanOut, Loads, are_contiguous, cut_rounds
from megarl.reshard.layout.topology import SourceSelector, Topology


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9), st.integers(0, 30)), max_size=30),
    st.integers(1, 40),
)
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


@given(st.data(), st.booleans(), st.booleans(), st.booleans())
@settings(max_examples=200)
def test_fan_out_bounds_every_rotation(data, relay, grouped, single_root):
    world = data.draw(st.integers(2, 8))
    ranks = st.sets(st.integers(0, world - 1), min_size=1).map(lambda found: tuple(sorted(found)))
    holders, receivers = data.draw(ranks), data.draw(ranks)
    topology = Topology(tuple(data.draw(st.integers(0, 4)) for _ in range(world)))
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
    world = data.draw(st.integers(2, 12))
    ranks = st.sets(st.integers(0, world - 1), min_size=1).map(lambda found: tuple(sorted(found)))
    holders, receivers = data.draw(ranks), data.draw(ranks)
    topology = Topology(tuple(data.draw(st.integers(0, 5)) for _ in range(world)))
    remote = RemoteSources(num_turns, frozenset([receivers] * single_root))
    selector = SourceSelector(holders, receivers, topology, {}, relay=relay, remote=remote)
    turns = np.arange(30)
    sent = {
        (box, source, to, hop)
        for source in range(world)
        for box, to, hop in zip(*(x.tolist() for x in selector.sends(source, turns, receivers)), strict=True)
    }
    received = {
        (box, source, rank, hop)
        for rank in receivers
        for box, (source, hop) in enumerate(zip(*(x.tolist() for x in selector.sources(rank, turns)), strict=True))
        if source != rank
    }
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
    nodes = (*[0] * 64, *range(1, 65))
    selector = SourceSelector(range(64), range(64, 128), Topology(nodes), {}, relay=True)
    sent = [len(selector.sends(rank, np.arange(256), range(64, 128))[0]) for rank in range(64)]
    assert sent == [256] * 64
    for machines in (1, 3):  # fewer machines than holders
        receivers = range(64, 64 + machines)
        selector = SourceSelector(range(64), receivers, Topology(nodes), {}, relay=True)
        sent = [len(selector.sends(rank, np.arange(192), receivers)[0]) for rank in range(64)]
        assert sum(sent) == 192 * machines
        assert min(sent) > 0
