"""What a delta sync selects from the plans of all ranks: data, messages, and progress under NCCL's rules."""

from functools import lru_cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.cluster.placement.rank_grid import RankGrid
from megarl.reshard.analysis.nccl_progress import PostedGroup, find_stalls, posted_groups
from megarl.reshard.layout.layout import slices
from megarl.reshard.layout.micro_dp import consecutive_places, micro_dp_groups, strided_places
from megarl.reshard.layout.topology import Topology
from megarl.reshard.planning import delta as delta_planning
from megarl.reshard.planning import rounds as round_planning
from megarl.reshard.planning.delta import CutBox, DeltaPlan
from megarl.reshard.planning.rounds import Gather, Hop, LocalCopy, MessagePart, Round, Send
from megarl.reshard.transfer.bucket import BoxSlot
from tests.reshard import simulate, synthetic

BUCKET_BYTES = 16_384
PIECE_BYTES = 700
LARGE_BYTES = 1024
OLD, NEW = 1.0, 2.0


@pytest.fixture(scope="module", autouse=True)
def small_pieces():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(delta_planning, "PIECE_BYTES", PIECE_BYTES)
        patch.setattr(round_planning, "LARGE_MESSAGE_BYTES", LARGE_BYTES)
        yield


@pytest.mark.parametrize(
    ("box", "num_bytes", "pieces"),
    [
        (((3, 8), (0, 40)), 5 * 160, [(0, 4), (4, 5)]),
        (((3, 8), (0, 400)), 5 * 1600, [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5)]),  # a row is larger than a piece
        (((0, 100),), 400, [(0, 100)]),
        ((), 4, [(0, 1)]),
    ],
)
def test_pieces_are_rows_of_bounded_size(box, num_bytes, pieces):
    cut = CutBox.cut(7, box, num_bytes)
    assert cut.pieces == pieces
    assert (cut.num_pieces, cut.marks) == (len(pieces), slice(7, 7 + len(pieces)))


def test_changed_pieces_that_follow_each_other_are_one_run():
    cut = CutBox.cut(1, ((0, 12), (0, 50)), 12 * 200)
    assert cut.pieces == [(0, 3), (3, 6), (6, 9), (9, 12)]
    assert cut.runs([True, True, False, True, True]) == [(0, 3), (6, 12)]
    assert cut.runs([True, False, False, False, False]) == []


ARRANGEMENTS = {
    "micro-DP": (RankGrid(tp=4), 2, (0, 0, 0, 0), True),
    "micro-DP, two stages": (RankGrid(tp=2, pp=2), 1, (0, 0, 0, 0), True),
    "two nodes": (RankGrid(tp=4), 1, (0, 0, 1, 1), False),
    "four nodes": (RankGrid(tp=2, dp=2), 1, (0, 1, 2, 3), False),
}


@lru_cache
def arrange(name):
    grid, gen_tp, nodes, is_strided = ARRANGEMENTS[name]
    placed = strided_places(grid, gen_tp=gen_tp) if is_strided else consecutive_places(grid.size, gen_tp=gen_tp)
    groups = micro_dp_groups(grid, gen_tp=gen_tp) if is_strided else []
    sources, needs = synthetic.trainers(grid), synthetic.needs(placed, 1, gen_tp)
    rounds = simulate.plans(sources, needs, Topology(nodes), BUCKET_BYTES, groups)
    return sources, needs, groups, rounds


def exchange(plans, members, marks):
    """Pass marks along the messages of the plan, as ranks do; return by rank which all-gathers run."""
    gathers = [plan.own_gather_marks(marks[rank]) for rank, plan in enumerate(plans)]
    gathers = [np.any([gathers[member] for member in group], axis=0) for group in members]
    for plan, of_rank, runs in zip(plans, marks, gathers, strict=True):
        plan.mark_gathered(of_rank, runs)
    for hop in range(len(plans[0].outgoing)):
        outgoing = [(rank, *item) for rank, plan in enumerate(plans) for item in plan.outgoing[hop].items()]
        sent = {(rank, to): marks[rank][rows] for rank, to, rows in outgoing}
        for rank, plan in enumerate(plans):
            for source, where in plan.incoming[hop].items():
                marks[rank][where] = sent.pop((source, rank))
        assert not sent
    return gathers


def mark_groups(plan, members):
    """Return the groups that a rank posts to exchange marks."""
    groups = [PostedGroup(all_gathers=min(plan.num_gathers, 1), communicator=tuple(members))]
    pairs = zip(plan.outgoing, plan.incoming, strict=True)
    groups += [PostedGroup(sends=tuple(sent), receives=tuple(received)) for sent, received in pairs]
    return [group for group in groups if group.sends or group.receives or group.all_gathers]


@pytest.mark.parametrize("name", ARRANGEMENTS)
@settings(max_examples=12)
@given(data=st.data())
def test_any_selection_delivers_what_has_changed_and_makes_progress(name, data):
    """Whatever pieces each holder marks, replicas alike or not, both ends of every message select the same."""
    sources, needs, groups, rounds = arrange(name)
    members = [next((sorted(g) for g in groups if rank in g), [rank]) for rank in range(len(sources))]
    plans = [DeltaPlan(of_rank, members[rank].index(rank) if groups else -1) for rank, of_rank in enumerate(rounds)]
    assert any(plan.num_gathers for plan in plans) == (name == "micro-DP")
    share = data.draw(st.sampled_from([0.0, 0.05, 0.5, 1.0]))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    marks, held = [], []
    for rank, plan in enumerate(plans):
        held.append(held_tensors(sources[rank], plan, rng.random(plan.num_held) < share))
        marks.append(marks_of(plan, held[-1]))
    gathers = exchange(plans, members, marks)
    selected = [plan.select(*pair) for plan, pair in zip(plans, zip(marks, gathers, strict=True), strict=True)]
    chosen = [[each.round for each in of_rank] for of_rank in selected]

    triples = zip(plans, chosen, members, strict=True)
    assert find_stalls([mark_groups(plan, group) + posted_groups(of, group) for plan, of, group in triples]) == []

    targets, wanted = ([filled(needs[rank], OLD) for rank in range(len(sources))] for _ in range(2))
    simulate.run(rounds, held, wanted, groups)  # a full sync of the changed weights
    simulate.run(chosen, held, targets, groups)
    for got, want in zip(targets, wanted, strict=True):
        for local in want:
            np.testing.assert_array_equal(got[local], want[local])
    for of_rank, whole in zip(selected, rounds, strict=True):
        for each, all_slots in zip(of_rank, whole, strict=True):
            check_slots(each, all_slots)
    if share == 1.0:
        assert share_of(chosen, rounds) == 1.0
    assert (share_of(chosen, rounds) == 0) == (share == 0.0 or not any(m.any() for m in marks))


def marks_of(plan, tensors):
    """Return the marks of a rank, as far as it holds the boxes: which pieces have a `NEW` element."""
    marks = np.zeros(plan.num_marks, bool)
    for each in plan.held:
        rows = tensors[each.local][slices(each.box)]
        marks[each.cut.marks] = [(rows[start:stop] == NEW).any() for start, stop in each.cut.pieces]
    return marks


def held_tensors(layout, plan, marks):
    """Return the tensors of a rank: the first element of pieces with a mark is `NEW`, all others are `OLD`."""
    tensors = filled(layout, OLD)
    for each in plan.held:
        for (start, _), is_marked in zip(each.cut.pieces, marks[each.cut.marks], strict=True):
            if is_marked:
                tensors[each.local][slices(each.box)][start, 0] = NEW
    return tensors


def filled(layout, content):
    sizes = {piece.local: tuple(stop for _, stop in piece.local_box) for piece in layout.pieces}
    return {name: np.full(size, content, np.float32) for name, size in sizes.items()}


def check_slots(selected, whole):
    """The lines of a selection describe its slots, as parts of slots of the whole round."""
    assert len(selected.slots) == len(selected.round.slots)
    for line, slot in zip(selected.slots.tolist(), selected.round.slots, strict=True):
        number, start, stop, offset = line
        of_whole = whole.slots[number]
        (first, _), *columns = of_whole.local_box
        assert (slot.local, slot.dtype, slot.offset) == (of_whole.local, of_whole.dtype, offset)
        assert slot.local_box == ((first + start, first + stop), *columns)
        assert offset + slot.num_bytes <= selected.round.bucket_bytes <= whole.bucket_bytes


def share_of(chosen, rounds):
    """Return the share of the bytes of the whole rounds that are delivered."""
    parts = [sum(this.bytes_delivered for of_rank in some for this in of_rank) for some in (chosen, rounds)]
    return parts[0] / parts[1]


@pytest.mark.parametrize("is_run", [False, True])
def test_what_comes_through_an_all_gather_is_passed_on_with_it(is_run):
    """Another member's share has changed, or none has; rank 2 gets that share from this rank."""
    own, other = (BoxSlot("gen.a", ((first, first + 2), (0, 4)), "float32", first * 16) for first in (0, 2))
    copy = LocalCopy(MessagePart("train.a", ((0, 2), (0, 4)), 32), own)
    relay = Send(2, (MessagePart(None, (), 32, other.offset),), None)
    this = Round(
        copies=(),
        gathers=(Gather(0, 64, (copy,), ((own,), (other,))),),
        hops=(Hop((), (), 0), Hop((relay,), (), 0)),
        bucket_bytes=64,
        regions=(),
    )
    plan = DeltaPlan([this], member=0)
    marks = np.zeros(plan.num_marks, bool)
    assert not plan.own_gather_marks(marks).any()
    plan.mark_gathered(marks, np.array([is_run]))
    assert marks[plan.outgoing[1][2]].tolist() == [is_run]
    (selected,) = plan.select(marks, np.array([is_run]))
    assert selected.round == (this if is_run else Round((), (), (Hop((), (), 0),) * 2, 0, ()))
    assert selected.slots.tolist() == ([[0, 0, 2, 0], [1, 0, 2, 32]] if is_run else [])
