"""The proof of progress against hand-made deadlocks, brute force, and the calls of the real executor."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.reshard.analysis.nccl_progress import PostedGroup, Stall, find_stalls, posted_groups
from megarl.reshard.analysis.scenario import arrange
from megarl.reshard.layout.box_index import SyncIndex
from megarl.reshard.layout.layout import WeightLayout
from megarl.reshard.layout.round_limits import Loads
from megarl.reshard.layout.topology import Topology
from megarl.reshard.planning.plan_cache import cached_plan, clear_plan_cache
from megarl.reshard.transfer.executor import BoxExecutor
from megarl.reshard.transfer.sink import Parameters
from tests.reshard.planning.test_plan import worlds
from tests.reshard.published import BUCKET_BYTES, qwen3_8b_scenario
from tests.reshard.rank_process import empty_parameters
from tests.reshard.scenarios import scenario


def post(sends=(), receives=(), **fields):
    return PostedGroup(sends=tuple(sends), receives=tuple(receives), **fields)


def gather(*members):
    return PostedGroup(all_gathers=1, communicator=members)


def test_ranks_that_receive_before_they_send_stall():
    """Both ranks post their receive in the first group, and their send in the second."""
    first, second = ([post([], [other], step="hop 0 of round 0"), post([other])] for other in (1, 0))
    stalls = find_stalls([first, second])
    assert stalls == [Stall(0, 0, "hop 0 of round 0", (1,)), Stall(1, 0, "hop 0 of round 0", (0,))]
    assert str(stalls[0]) == "rank 0 waits in hop 0 of round 0 for rank 1"
    assert find_stalls([[post([1], [1])], [post([0], [0])]]) == []


def test_cycle_of_three_ranks_stalls():
    ranks = [[post([], [(rank - 1) % 3]), post([(rank + 1) % 3])] for rank in range(3)]
    assert [(stall.rank, stall.peers) for stall in find_stalls(ranks)] == [(0, (2,)), (1, (0,)), (2, (1,))]
    assert find_stalls([ranks[0], ranks[1], ranks[2][::-1]]) == []


def test_a_rank_that_never_posts_stalls_those_that_wait_for_it_and_their_peers():
    assert find_stalls([[post([1], [1])], [post([0], [0])], []]) == []
    ranks = [[post([1], [2]), post([1])], [post([], [0]), post([], [0])], []]
    assert [(stall.rank, stall.group, stall.peers) for stall in find_stalls(ranks)] == [(0, 0, (2,)), (1, 1, (0,))]


def test_a_message_too_few_stalls():
    ranks = [[post([1]), post([1, 1])], [post([], [0]), post([], [0])]]
    assert find_stalls(ranks) == [Stall(0, 1, "", (1,))]


def test_an_all_gather_waits_for_every_member():
    everyone = [[gather(0, 1, 2)] for _ in range(3)]
    assert find_stalls(everyone) == []
    assert [stall.peers for stall in find_stalls([*everyone[:2], []])] == [(2,), (2,)]


def test_communicators_in_different_order_stall_as_on_one_stream():
    """With a stream per communicator this would not stall: the model is stricter."""
    ranks = [[gather(0, 1), post([1])], [post([], [0]), gather(0, 1)]]
    assert len(find_stalls(ranks)) == 2
    assert find_stalls([ranks[0], ranks[1][::-1]]) == []


def test_messages_match_in_order_within_a_communicator():
    other = (0, 1)
    ranks = [[post([1]), post([1], communicator=other)], [post([], [0], communicator=other), post([], [0])]]
    assert len(find_stalls(ranks)) == 2
    assert find_stalls([ranks[0][::-1], ranks[1]]) == []


@st.composite
def posted(draw):
    """Draw groups of up to four ranks; most messages have both ends, and some are posted late."""
    world = draw(st.integers(1, 4))
    ranks = [[] for _ in range(world)]
    for _ in range(draw(st.integers(0, 6))):
        source, to = draw(st.integers(0, world - 1)), draw(st.integers(0, world - 1))
        for rank, fields in ((source, {"sends": (to,)}), (to, {"receives": (source,)})):
            if draw(st.integers(0, 9)):
                own = ranks[rank]
                if own and draw(st.booleans()) and not own[-1].all_gathers:
                    last = own.pop()
                    fields = {
                        "sends": last.sends + fields.get("sends", ()),
                        "receives": last.receives + fields.get("receives", ()),
                    }
                own.insert(draw(st.integers(0, len(own))), PostedGroup(**fields))
        if draw(st.booleans()):
            members = tuple(sorted(draw(st.sets(st.integers(0, world - 1), min_size=1))))
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

    def is_started(rank, kind, value, communicator, number):
        """Return whether the operation `number` of its kind and peer is in a group that the rank has started."""
        seen = -1
        for group in ranks[rank][: current[rank] + 1]:
            if group.communicator == communicator:
                operations = group.all_gathers if kind == "all_gathers" else getattr(group, kind).count(value)
                seen += operations
        return seen >= number

    def can_end(rank):
        group, before = ranks[rank][current[rank]], ranks[rank][: current[rank]]
        before = [each for each in before if each.communicator == group.communicator]
        for mine, theirs in (("sends", "receives"), ("receives", "sends")):
            for peer in set(getattr(group, mine)):
                count = sum(getattr(each, mine).count(peer) for each in (*before, group))
                if not is_started(peer, theirs, rank, group.communicator, count - 1):
                    return False
        gathers = sum(each.all_gathers for each in (*before, group))
        return not group.all_gathers or all(
            is_started(member, "all_gathers", None, group.communicator, gathers - 1) for member in group.communicator
        )

    progress = True
    while progress:
        progress = False
        for rank, groups in enumerate(ranks):
            while current[rank] < len(groups) and can_end(rank):
                current[rank], progress = current[rank] + 1, True
    return current


def test_many_ranks():
    world, rounds, offsets = 1000, 20, (1, 7, 31, 99, 400)
    ranks = [
        [post([(rank + o) % world for o in offsets], [(rank - o) % world for o in offsets])] * rounds
        for rank in range(world)
    ]
    assert find_stalls(ranks) == []
    ranks[3] = ranks[3][:-1]
    assert [stall.group for stall in find_stalls(ranks)] == [rounds - 1] * 10


# -- plans


def plan_all(strategy, case):
    """Return the plans and all-gather groups of all ranks."""
    arrangement = arrange(strategy, case)
    plans = [
        cached_plan(case.sources, arrangement.needs, case.topology, rank, case.bucket_bytes, groups=arrangement.groups)
        for rank in range(len(case.sources))
    ]
    members = {rank: tuple(sorted(group)) for group in arrangement.groups for rank in group}
    return plans, [members.get(rank, ()) for rank in range(len(plans))]


def posted_by_plans(plans, members):
    return [posted_groups(plan.rounds, ranks) for plan, ranks in zip(plans, members, strict=True)]


SPLIT_POSTING_STALLS = [
    ("exact", "tp=8", "tp=1", 1),
    ("exact", "tp=4,pp=2", "tp=1", 1),
    ("exact", "tp=2,pp=4", "tp=4", 1),
    ("exact", "tp=8,pp=2", "tp=2", 2),
    ("exact", "tp=4,pp=4", "tp=2", 1),
    ("micro_dp", "tp=4,pp=2", "tp=2", 1),
]
QWEN3_8B_LAYOUTS = [*SPLIT_POSTING_STALLS, ("exact", "tp=8", "tp=2", 1), ("exact", "tp=8,pp=4", "tp=4", 4)]


@pytest.fixture
def unbounded_sends(monkeypatch):
    """Cut rounds by what ranks receive alone, so that hops may send more than a staging buffer."""
    clear_plan_cache()
    monkeypatch.setattr(SyncIndex, "_loads", lambda self, tables, *_: Loads.join(self._receive_loads(tables)))
    yield
    clear_plan_cache()


@pytest.mark.usefixtures("unbounded_sends")
@pytest.mark.parametrize("layout", SPLIT_POSTING_STALLS, ids=str)
def test_hops_posted_in_several_groups_stall(layout):
    """If sends exceed the staging buffer, and all receives are in the first group, Qwen3-8B stalls in most layouts."""
    strategy, train, gen, nodes = layout
    plans, members = plan_all(strategy, qwen3_8b_scenario(train, gen, nodes))
    assert find_stalls([split_groups(plan) for plan in plans])
    assert find_stalls(posted_by_plans(plans, members)) == []


@pytest.mark.parametrize("layout", QWEN3_8B_LAYOUTS, ids=str)
def test_qwen3_8b_makes_progress(layout):
    strategy, train, gen, nodes = layout
    plans, members = plan_all(strategy, qwen3_8b_scenario(train, gen, nodes))
    assert find_stalls(posted_by_plans(plans, members)) == []


@pytest.mark.usefixtures("unbounded_sends")
def test_hops_posted_in_several_groups_do_not_stall_if_no_peer_splits():
    plans, members = plan_all("exact", qwen3_8b_scenario("tp=8", "tp=2"))
    assert find_stalls([split_groups(plan) for plan in plans]) == []
    assert find_stalls(posted_by_plans(plans, members)) == []


@pytest.mark.usefixtures("unbounded_sends")
def test_disaggregated_engines_stall_with_several_groups_only():
    """4 engines of tp 2 on a node of their own relay to each other."""
    case = qwen3_8b_scenario("tp=4,pp=2", "tp=2")
    engines = [need for _ in range(4) for need in case.engine[0]]
    sources = [*case.sources, *[WeightLayout(case.sources[0].tensors, ())] * len(engines)]
    needs = {len(case.sources) + number: need for number, need in enumerate(engines)}
    topology = Topology((0,) * len(case.sources) + (1,) * len(engines))
    plans = [cached_plan(sources, needs, topology, rank, BUCKET_BYTES) for rank in range(len(sources))]
    assert {stall.rank >= len(case.sources) for stall in find_stalls([split_groups(plan) for plan in plans])} >= {True}
    assert find_stalls([posted_groups(plan.rounds) for plan in plans]) == []


def split_groups(plan):
    """Return the groups of a rank that splits hops whose sends exceed its staging buffer; receives are in the first.

    The staging buffer is what the largest round leaves of `BUCKET_BYTES`.
    """
    hops = [hop for this in plan.rounds for hop in this.hops]
    room = BUCKET_BYTES - max(this.bucket_bytes for this in plan.rounds)
    limit = max(room, max((send.num_bytes for hop in hops for send in hop.sends), default=0))
    groups = []

    def post_hop(hop):
        batches = [[]]
        for send in hop.sends:
            if batches[-1] and sum(each.num_bytes for each in (*batches[-1], send)) > limit:
                batches.append([])
            batches[-1].append(send)
        receives = [message.source for message in hop.receives]
        for number, batch in enumerate(batches):
            groups.append(post([send.to for send in batch], [] if number else receives))

    for before, this in zip([None, *plan.rounds], [*plan.rounds, None], strict=True):
        if this:
            post_hop(this.hops[0])
        if before:
            for hop in before.hops[1:]:
                post_hop(hop)
    return [group for group in groups if group.sends or group.receives]


@given(worlds(), st.integers(16, 400), st.booleans(), st.booleans())
@settings(max_examples=100)
def test_random_plans_make_progress(case, bucket_bytes, relay, grouped):
    sources, needs, topology = case
    groups = [tuple(range(i, min(i + 2, len(sources)))) for i in range(0, len(sources), 2)] if grouped else []
    posted = []
    for rank in range(len(sources)):
        plan = cached_plan(sources, needs, topology, rank, bucket_bytes, groups=groups, relay=relay)
        posted.append(posted_groups(plan.rounds, next((g for g in groups if rank in g), ())))
    assert find_stalls(posted) == []


# -- the executor


class RecordingTransport:
    """Records what an executor posts, and delivers nothing."""

    timeout_seconds = None

    def __init__(self):
        self.posted = []

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
        ("micro_dp", (1, 4, 1, 1, 2), 1, {"the all-gathers"}),
        ("micro_dp", (2, 2, 1, 1, 2), 1, {"hop 0"}),
        ("exact", (1, 4, 1, 1, 1), 2, {"hop 0", "hop 1", "hop 2"}),
        ("exact", (2, 2, 2, 1, 4), 2, {"hop 0"}),
        ("exact", (1, 3, 2, 1, 2), 1, {"hop 0"}),
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
    assert {each.step.rpartition(" of ")[0] for each in posted} == steps


def key(group):
    return group.sends, group.receives, group.all_gathers, group.communicator
