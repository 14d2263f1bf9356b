"""The proof of progress against hand-made deadlocks, brute force, and the executor; plans of ranks agree."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.reshard.published import QWEN3_8B
from benchmarks.reshard.synthetic import engine_layouts
from megarl.cli.tools.reshard_explain import make_scenario
from megarl.megatron.families.load_architecture import load_architecture
from megarl.reshard.analysis import forecast
from megarl.reshard.analysis.forecast import compare_ends, find_unmatched_routes
from megarl.reshard.analysis.nccl_progress import PostedGroup, Stall, find_stalls, posted_groups
from megarl.reshard.analysis.scenario import arrange
from megarl.reshard.layout.layout import WeightLayout
from megarl.reshard.layout.topology import Topology
from megarl.reshard.planning.plan import Moves, plan_rank
from megarl.reshard.planning.plan_cache import cached_index, cached_plan
from megarl.reshard.planning.strategy import SyncStats
from megarl.reshard.transfer.bucket import Parameters
from megarl.reshard.transfer.executor import BoxExecutor
from tests.reshard.rank_process import empty_parameters
from tests.reshard.synthetic import scenario


def post(sends=(), receives=(), **fields):
    return PostedGroup(sends=tuple(sends), receives=tuple(receives), **fields)


def gather(*members):
    return PostedGroup(all_gathers=1, communicator=members)


def send(to, **fields):
    return post([to], **fields)


def receive(source, **fields):
    return post([], [source], **fields)


THREE = [[receive((rank - 1) % 3), send((rank + 1) % 3)] for rank in range(3)]
EVERYONE = [[gather(0, 1, 2)]] * 3
GATHER_FIRST, GATHER_LAST = [gather(0, 1), send(1)], [receive(0), gather(0, 1)]
PAIR = (0, 1)
TWO_ORDERS = [[send(1), send(1, communicator=PAIR)], [receive(0, communicator=PAIR), receive(0)]]
CASES = {  # groups by rank, and (rank, group, peers) of each stall
    "both receive before they send": ([[receive(1), send(1)], [receive(0), send(0)]], [(0, 0, (1,)), (1, 0, (0,))]),
    "both send and receive": ([[post([1], [1])], [post([0], [0])]], []),
    "a cycle": (THREE, [(0, 0, (2,)), (1, 0, (0,)), (2, 0, (1,))]),
    "no cycle": ([THREE[0], THREE[1], THREE[2][::-1]], []),
    "a rank that does not take part": ([[post([1], [1])], [post([0], [0])], []], []),
    "a rank that never posts": ([[post([1], [2]), send(1)], [receive(0)] * 2, []], [(0, 0, (2,)), (1, 1, (0,))]),
    "a message too few": ([[send(1), post([1, 1])], [receive(0)] * 2], [(0, 1, (1,))]),
    "an all-gather": (EVERYONE, []),
    "an all-gather without one member": ([*EVERYONE[:2], []], [(0, 0, (2,)), (1, 0, (2,))]),
    # with a stream per communicator this would not stall: the model is stricter
    "communicators in different order": ([GATHER_FIRST, GATHER_LAST], [(0, 0, (1,)), (1, 0, (0,))]),
    "communicators in the same order": ([GATHER_FIRST, GATHER_LAST[::-1]], []),
    "messages match within a communicator": (TWO_ORDERS, [(0, 0, (1,)), (1, 0, (0,))]),
    "communicators that match": ([TWO_ORDERS[0][::-1], TWO_ORDERS[1]], []),
}


@pytest.mark.parametrize(("ranks", "stalls"), CASES.values(), ids=CASES)
def test_stalls_of_hand_made_groups(ranks, stalls):
    assert [(stall.rank, stall.group, stall.peers) for stall in find_stalls(ranks)] == stalls


def test_a_stall_names_its_step():
    (stall, _) = find_stalls([[receive(1, step="hop 0 of round 0"), send(1)], [receive(0), send(0)]])
    assert stall == Stall(0, 0, "hop 0 of round 0", (1,))
    assert str(stall) == "rank 0 waits in hop 0 of round 0 for rank 1"


@st.composite
def posted(draw):
    """Draw groups of up to four ranks; most messages have both ends, and some are posted late."""
    world = draw(st.integers(1, 4))
    ranks = [[] for _ in range(world)]
    some = st.integers(0, world - 1)
    for _ in range(draw(st.integers(0, 6))):
        source, to = draw(some), draw(some)
        for rank, sends, receives in ((source, (to,), ()), (to, (), (source,))):
            if draw(st.integers(0, 9)):
                own = ranks[rank]
                if own and draw(st.booleans()) and not own[-1].all_gathers:
                    last = own.pop()
                    sends, receives = last.sends + sends, last.receives + receives
                own.insert(draw(st.integers(0, len(own))), post(sends, receives))
        if draw(st.booleans()):
            members = tuple(sorted(draw(st.sets(some, min_size=1))))
            for rank in members:
                ranks[rank].insert(draw(st.integers(0, len(ranks[rank]))), gather(*members))
    return ranks


@given(posted())
@settings(max_examples=400)
def test_stalls_equal_brute_force(ranks):
    current = brute_force(ranks)
    stalls = find_stalls(ranks)
    waiting = {rank: group for rank, group in enumerate(current) if group < len(ranks[rank])}
    assert {stall.rank: stall.group for stall in stalls} == waiting
    assert all(stall.peers for stall in stalls)


def brute_force(ranks):
    """Let any rank whose group can end go on, until none can; return the group that each rank is in."""
    current = [0] * len(ranks)

    def count(groups, kind, peer, communicator):
        """Return the number of operations of a kind with a peer in groups on a communicator."""
        found = [getattr(group, kind) for group in groups if group.communicator == communicator]
        return sum(found) if kind == "all_gathers" else sum(peers.count(peer) for peers in found)

    def is_met(rank, kind, of_peer, peer):
        """Return whether the peer has started as many operations as the rank has, in groups up to the current one."""
        communicator = ranks[rank][current[rank]].communicator
        mine = count(ranks[rank][: current[rank] + 1], kind, peer, communicator)
        return count(ranks[peer][: current[peer] + 1], of_peer, rank, communicator) >= mine

    def can_end(rank):
        group = ranks[rank][current[rank]]
        pairs = [("sends", "receives", peer) for peer in group.sends]
        pairs += [("receives", "sends", peer) for peer in group.receives]
        pairs += [("all_gathers", "all_gathers", peer) for peer in group.communicator if group.all_gathers]
        return all(is_met(rank, *pair) for pair in pairs)

    progress = True
    while progress:
        progress = False
        for rank, groups in enumerate(ranks):
            while current[rank] < len(groups) and can_end(rank):
                current[rank], progress = current[rank] + 1, True
    return current


def test_many_ranks():
    world, rounds, offsets = 1000, 20, (1, 7, 31, 99, 400)
    peers = [([(rank + o) % world for o in offsets], [(rank - o) % world for o in offsets]) for rank in range(world)]
    ranks = [[post(*of_rank)] * rounds for of_rank in peers]
    assert find_stalls(ranks) == []
    ranks[3] = ranks[3][:-1]
    assert [stall.group for stall in find_stalls(ranks)] == [rounds - 1] * 10


BUCKET_BYTES = 1 << 28
"""Default of `weight_sync.bucket_bytes`."""


def qwen3_8b_scenario(train, gen, nodes=1):
    """Return the scenario of Qwen3-8B in bfloat16."""
    model = load_architecture(QWEN3_8B, origin="test")
    options = {"train": train, "gen": gen, "nodes": nodes, "bucket_bytes": BUCKET_BYTES}
    return make_scenario("Qwen3-8B", model, "bfloat16", engine=partial(engine_layouts, model), **options)


def plan_all(strategy, case):
    """Return the plans and all-gather groups of all ranks."""
    arrangement = arrange(strategy, case)
    plans = [
        cached_plan(case.sources, arrangement.needs, case.topology, rank, case.bucket_bytes, groups=arrangement.groups)
        for rank in range(len(case.sources))
    ]
    members = {rank: tuple(sorted(group)) for group in arrangement.groups for rank in group}
    return plans, [members.get(rank, ()) for rank in range(len(plans))]


@pytest.mark.parametrize(
    ("strategy", "train", "gen", "nodes"),
    [
        ("exact", "tp=8", "tp=1", 1),
        ("exact", "tp=2,pp=4", "tp=4", 1),
        ("exact", "tp=8,pp=2", "tp=2", 2),
        ("micro_dp", "tp=4,pp=2", "tp=2", 1),
        ("exact", "tp=8,pp=4", "tp=4", 4),
    ],
)
def test_qwen3_8b_makes_progress(strategy, train, gen, nodes):
    plans, members = plan_all(strategy, qwen3_8b_scenario(train, gen, nodes))
    assert find_stalls([posted_groups(plan.rounds, ranks) for plan, ranks in zip(plans, members, strict=True)]) == []


def test_disaggregated_engines_make_progress():
    """4 engines of tp 2 on a node of their own relay to each other."""
    case = qwen3_8b_scenario("tp=4,pp=2", "tp=2")
    engines = [need for _ in range(4) for need in case.engine]
    sources = [*case.sources, *[WeightLayout(case.sources[0].tensors, ())] * len(engines)]
    needs = {len(case.sources) + number: need for number, need in enumerate(engines)}
    topology = Topology((0,) * len(case.sources) + (1,) * len(engines))
    plans = [cached_plan(sources, needs, topology, rank, BUCKET_BYTES) for rank in range(len(sources))]
    assert find_stalls([posted_groups(plan.rounds) for plan in plans]) == []


class RecordingTransport:
    """Records what an executor posts, and delivers nothing."""

    timeout_seconds = None

    def __init__(self):
        self.posted, self.stats = [], SyncStats()

    def start(self, sends, receives):
        if sends or receives:
            self.posted.append(post([rank for _, rank in sends], [rank for _, rank in receives]))
        return [], []

    def start_all_gathers(self, gathers, group):
        self.posted.append(PostedGroup(all_gathers=len(gathers), communicator=group.members))
        return []

    def close(self):
        raise AssertionError("the sync failed")


class FakeGroup:
    def __init__(self, members, rank):
        self.members, self._rank = members, rank

    def rank(self):
        return self.members.index(self._rank)


@pytest.mark.parametrize(
    ("strategy", "layout", "nodes", "steps"),
    [
        ("micro_dp", (1, 4, 1, 2), 1, {"the all-gathers"}),
        ("micro_dp", (2, 2, 1, 2), 1, {"hop 0"}),
        ("exact", (1, 4, 1, 1), 2, {"hop 0", "hop 1"}),
        ("exact", (2, 2, 2, 4), 2, {"hop 0"}),
        ("exact", (1, 3, 2, 2), 1, {"hop 0"}),
    ],
)
def test_posted_groups_are_those_of_the_executor(strategy, layout, nodes, steps):
    case = scenario(*layout, nodes=nodes, bucket_bytes=16_384)
    needs = arrange(strategy, case).needs
    plans, members = plan_all(strategy, case)
    posted = []
    for rank, plan in enumerate(plans):
        transport, group = RecordingTransport(), FakeGroup(members[rank], rank)
        held = {piece.local: torch.zeros([n for _, n in piece.local_box]) for piece in case.sources[rank].pieces}
        target = Parameters(empty_parameters(needs[rank])) if rank in needs else None
        BoxExecutor(rank, plan.rounds, plan.buffer_sizes, group, transport).run(held, target)
        expected = posted_groups(plan.rounds, members[rank])
        assert [key(each) for each in transport.posted] == [key(each) for each in expected]
        posted += expected
    hops = [hop for each in posted for hop in each.step.split(" and ")]
    assert {hop.rpartition(" of ")[0] for hop in hops} == steps


def key(group):
    return group.sends, group.receives, group.all_gathers, group.communicator


def index_of(strategy, case):
    arrangement = arrange(strategy, case)
    return cached_index(case.sources, arrangement.needs, case.topology, case.bucket_bytes, groups=arrangement.groups)


@pytest.mark.parametrize(
    ("strategy", "layout", "nodes", "compared"),
    [
        ("micro_dp", (1, 4, 4, 2), 1, [0, 1, 2, 3]),  # the groups of other replicas are of the same kinds
        ("micro_dp", (2, 2, 2, 1), 1, [0, 1, 4, 5]),
        ("exact", (1, 3, 2, 2), 1, [*range(6)]),
        ("exact", (2, 2, 2, 8), 1, [*range(8)]),
        ("exact", (1, 4, 4, 4), 4, [0, 1, 2, 3]),  # the other nodes hold and need the same
    ],
)
def test_both_ends_of_all_that_enters_a_node_of_each_class_agree(strategy, layout, nodes, compared, monkeypatch):
    index = index_of(strategy, scenario(*layout, nodes=nodes))
    found = []
    monkeypatch.setattr(forecast, "compare_ends", lambda plans, sends: found.append((plans, sends)) or [])
    assert find_unmatched_routes(index) == []
    assert sorted(plan.rank for plans, _ in found for plan in plans) == compared
    for plans, sends in found:
        assert sends.keys() >= {peer for plan in plans for peer in plan.receives.peer.tolist()}
        assert compare_ends(plans, sends) == []
        for rank, some in sends.items():  # sends to few ranks are those of the whole plan
            whole, to = plan_rank(index, rank).sends, [plan.rank for plan in plans]
            kept = np.flatnonzero(np.isin(whole.peer, np.unique(some.peer)))
            assert np.isin(some.peer, to).all() or rank in to
            for column in Moves.__slots__:
                assert np.array_equal(getattr(some, column), getattr(whole.take(kept), column))


def both_ends(strategy="exact", layout=(1, 4, 1, 1), nodes=2):
    """Return the plans and sends of all ranks."""
    index = index_of(strategy, scenario(*layout, nodes=nodes))
    plans = [plan_rank(index, rank) for rank in range(len(index.sources))]
    return plans, {plan.rank: plan.sends for plan in plans}


def in_later_round(sends, row):
    sends.round[row] += 1


def in_later_hop(sends, row):
    sends.hop[row] += 1


def of_other_size(sends, row):
    sends.num_bytes[row] -= 2


def of_other_rows(sends, row):
    sends.start[row, 0] += 1
    sends.stop[row, 0] += 1


@pytest.mark.parametrize("change", [in_later_round, in_later_hop, of_other_size, of_other_rows])
@pytest.mark.parametrize("sender", [0, 3])
def test_a_message_that_differs_at_one_end_is_found(change, sender):
    plans, sends = both_ends()
    assert compare_ends(plans, sends) == []
    row = len(sends[sender]) // 2
    to, step = int(sends[sender].peer[row]), (int(sends[sender].hop[row]), int(sends[sender].round[row]))
    changed = replace(sends[sender], **{name: getattr(sends[sender], name).copy() for name in Moves.__slots__})
    change(changed, row)
    assert compare_ends(plans, sends | {sender: changed}) == [
        f"ranks {sender} and {to} disagree about what the first sends the other in hop {step[0]} of round {step[1]}"
    ]


def test_messages_in_another_order_are_found():
    plans, sends = both_ends()
    rows = np.arange(len(sends[0]))
    of_one = np.flatnonzero(sends[0].peer == sends[0].peer[0])
    rows[of_one[:2]] = of_one[1::-1]
    (problem,) = compare_ends(plans, sends | {0: sends[0].take(rows)})
    assert problem.startswith(f"ranks 0 and {sends[0].peer[0]} disagree")


def test_a_message_to_another_rank_is_found_at_both():
    plans, sends = both_ends()
    peer = sends[0].peer.copy()
    before, after = int(peer[0]), next(rank for rank in (1, 2, 3) if rank != peer[0])
    peer[0] = after
    problems = compare_ends(plans, sends | {0: replace(sends[0], peer=peer)})
    assert sorted(problem.split(" disagree")[0] for problem in problems) == [
        f"ranks 0 and {rank}" for rank in sorted((before, after))
    ]


def test_a_rank_that_sends_nothing_is_found():
    plans, sends = both_ends(nodes=1)
    assert len(compare_ends(plans, sends | {0: sends[0].take(np.arange(0))})) == 3


def test_another_choice_of_all_gathers_is_found():
    plans, sends = both_ends("micro_dp", (1, 4, 1, 2), nodes=1)
    first, second, *others = plans
    fewer = replace(first, gathered=first.gathered & (first.receives.item > 0))
    assert "ranks 0 and 1 disagree about the all-gathers of round 0" in compare_ends([fewer, second, *others], sends)


def test_too_many_representatives_are_not_planned(monkeypatch):
    monkeypatch.setattr(forecast, "MAX_REPRESENTATIVES", 3)
    assert find_unmatched_routes(index_of("micro_dp", scenario(1, 4, 4, 2))) is None
