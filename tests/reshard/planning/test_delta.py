"""What a delta sync makes of the plans of all ranks: data, messages, and progress under NCCL's rules."""

from functools import lru_cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.cluster.placement.rank_grid import RankGrid
from megarl.reshard.analysis.nccl_progress import PostedGroup, find_stalls, posted_groups
from megarl.reshard.layout.engine_ranks import micro_dp_groups, place_engines_consecutively, place_engines_strided
from megarl.reshard.layout.layout import slices
from megarl.reshard.layout.topology import Topology
from megarl.reshard.planning import rounds as round_planning
from megarl.reshard.planning.delta import DeltaPlan, code_name
from megarl.reshard.planning.rounds import Gather, Hop, LocalCopy, MessagePart, Round, Send
from megarl.reshard.transfer.bucket import BoxSlot
from megarl.reshard.transfer.element_code import code_form, encode
from tests.reshard import simulate, synthetic

BUCKET_BYTES = 16_384
LARGE_BYTES = 1024
OLD, NEW = 1.0, 2.0


@pytest.fixture(scope="module", autouse=True)
def large_messages():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(round_planning, "LARGE_MESSAGE_BYTES", LARGE_BYTES)
        yield


ARRANGEMENTS = {
    "micro-DP": (RankGrid(tp=4), 2, (0, 0, 0, 0), True),
    "micro-DP, two stages": (RankGrid(tp=2, pp=2), 1, (0, 0, 0, 0), True),
    "two nodes": (RankGrid(tp=4), 1, (0, 0, 1, 1), False),
    "four nodes": (RankGrid(tp=2, dp=2), 1, (0, 1, 2, 3), False),
}


@lru_cache
def arrange(name):
    grid, gen_tp, nodes, is_strided = ARRANGEMENTS[name]
    if is_strided:
        placements, groups = place_engines_strided(grid, gen_tp=gen_tp), micro_dp_groups(grid, gen_tp=gen_tp)
    else:
        placements, groups = place_engines_consecutively(grid.size // gen_tp, gen_tp=gen_tp), []
    sources, needs = synthetic.trainers(grid), synthetic.needs(placements)
    rounds = simulate.plans(sources, needs, Topology(nodes), BUCKET_BYTES, groups)
    return sources, needs, groups, rounds


def exchange(plans, members, counts):
    """Pass counts along the messages of the plan, as ranks do."""
    for rank, plan in enumerate(plans):
        for member, indices in zip(members[rank], plan.gathered, strict=bool(plan.gathered)):
            counts[rank][indices] = counts[member][plans[member].gathered[members[rank].index(member)]]
    for hop in range(len(plans[0].outgoing)):
        outgoing = [(rank, *item) for rank, plan in enumerate(plans) for item in plan.outgoing[hop].items()]
        sent = {(rank, to): counts[rank][rows] for rank, to, rows in outgoing}
        for rank, plan in enumerate(plans):
            for source, where in plan.incoming[hop].items():
                counts[rank][where] = sent.pop((source, rank))
        assert not sent


def count_groups(plan, members):
    """Return the groups that a rank posts to exchange counts."""
    groups = [PostedGroup(all_gathers=min(len(plan.gathered), 1), communicator=tuple(members))]
    pairs = zip(plan.outgoing, plan.incoming, strict=True)
    groups += [PostedGroup(sends=tuple(sent), receives=tuple(received)) for sent, received in pairs]
    return [group for group in groups if group.sends or group.receives or group.all_gathers]


@pytest.mark.parametrize("name", ARRANGEMENTS)
@settings(max_examples=12)
@given(data=st.data())
def test_any_change_arrives_and_makes_progress(name, data):
    """Whatever elements change at each holder, replicas alike or not, both ends of a message expect the same codes."""
    sources, needs, groups, rounds = arrange(name)
    members = [next((sorted(g) for g in groups if rank in g), [rank]) for rank in range(len(sources))]
    plans = [DeltaPlan(of_rank, members[rank].index(rank) if groups else -1) for rank, of_rank in enumerate(rounds)]
    assert any(plan.gathered for plan in plans) == (name == "micro-DP")
    shares = data.draw(st.lists(st.sampled_from([0.0, 0.001, 0.05, 0.5, 1.0]), min_size=1, max_size=3))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    held, sent, counts = [], [], []
    for rank, plan in enumerate(plans):
        held.append(changed_tensors(sources[rank], plan, shares, rng))
        codes, of_rank = encoded(held[-1], plan)
        sent.append(held[-1] | codes)
        counts.append(of_rank)
    exchange(plans, members, counts)
    coded = [plan.select(of_rank) for plan, of_rank in zip(plans, counts, strict=True)]
    chosen = [[each.round for each in of_rank] for of_rank in coded]

    triples = zip(plans, chosen, members, strict=True)
    assert find_stalls([count_groups(plan, group) + posted_groups(of, group) for plan, of, group in triples]) == []

    targets, wanted = ([filled(needs[rank], OLD) for rank in range(len(sources))] for _ in range(2))
    simulate.run(rounds, held, wanted, groups)  # a full sync of the changed weights
    simulate.run(chosen, sent, targets, groups, [[each.lines for each in of_rank] for of_rank in coded])
    for got, want in zip(targets, wanted, strict=True):
        for local in want:
            np.testing.assert_array_equal(got[local], want[local])
    for of_rank, whole in zip(coded, rounds, strict=True):
        for each, full in zip(of_rank, whole, strict=True):
            check_lines(each, full)
    if shares == [1.0]:
        assert share_of(chosen, rounds) == 1.0
    assert (share_of(chosen, rounds) == 0) == (not any(of_rank.any() for of_rank in counts))


def encoded(tensors, plan):
    """Return the codes of a rank's changed boxes by name, and the counts that it knows itself, by brute force."""
    codes, counts = {}, np.zeros(plan.num_boxes, np.int64)
    for each in plan.held:
        box = np.ascontiguousarray(tensors[each.local][slices(each.box)])
        base = np.full(box.size, OLD, np.float32)
        counts[each.index] = (box.reshape(-1) != base).sum()
        changed, code = encode(torch.from_numpy(box), torch.from_numpy(base.view(np.int32)))
        assert changed == counts[each.index]
        codes[code_name(each.index)] = box.reshape(-1).view(np.uint8) if code is None else code.numpy()
    return codes, counts


def changed_tensors(layout, plan, shares, rng):
    """Return the tensors of a rank: in each box that it sends, one of the shares of its elements is `NEW`."""
    tensors = filled(layout, OLD)
    for each in plan.held:
        box = tensors[each.local][slices(each.box)]
        box[rng.random(box.shape) < rng.choice(shares)] = NEW
    return tensors


def filled(layout, content):
    sizes = {piece.local: tuple(stop for _, stop in piece.local_box) for piece in layout.pieces}
    return {name: np.full(size, content, np.float32) for name, size in sizes.items()}


def check_lines(coded, full):
    """The lines describe the slots of the coded round, which lie where those of the plan's round have room."""
    assert len(coded.lines) == len(coded.round.slots)
    assert coded.round.bucket_bytes <= full.bucket_bytes
    for (number, changed, offset), slot in zip(coded.lines.tolist(), coded.round.slots, strict=True):
        of_plan = full.slots[number]
        assert (slot.local, slot.local_box, slot.dtype) == (of_plan.local, of_plan.local_box, of_plan.dtype)
        form = code_form(slot.num_bytes // 4, 4, changed)
        assert slot.offset == offset
        assert 0 < form.num_bytes <= coded.round.bucket_bytes - offset


def share_of(chosen, rounds):
    """Return the share of the bytes of the plan's rounds that are delivered."""
    parts = [sum(this.bytes_delivered for of_rank in some for this in of_rank) for some in (chosen, rounds)]
    return parts[0] / parts[1]


@pytest.mark.parametrize("changed", [0, 1, 8])
def test_what_comes_through_an_all_gather_is_passed_on_with_it(changed):
    """Another member's share has changed, in none, one or all of its elements; rank 2 gets it from this rank."""
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
    counts = np.zeros(plan.num_boxes, np.int64)
    counts[plan.gathered[1]] = changed
    assert counts[plan.outgoing[1][2]].tolist() == [changed]
    (coded,) = plan.select(counts)
    if not changed:
        assert coded.round == Round((), (), (Hop((), (), 0),) * 2, 0, ())
        assert len(coded.lines) == 0
        return
    share, size = {1: (16, 5), 8: (32, 32)}[changed]  # one bit an element, and a value; padded to 16 bytes
    (gather,), (sent,) = coded.round.gathers, coded.round.hops[1].sends
    assert (gather.share, gather.own_copies, coded.lines.tolist()) == (share, (), [[1, changed, share]])
    assert sent == Send(2, (MessagePart(None, (), size, share),), None)


def test_steps_pack_codes_up_to_a_limit():
    """Six large boxes go from where they lie in two steps of a plan; the largest codes above the limit are dropped."""
    elements = 4096
    sends = [
        Send(1, (MessagePart("train.a", ((first, first + 1), (0, elements)), 2 * elements),), None)
        for first in range(6)
    ]
    rounds = [Round((), (), (Hop(tuple(sends[first : first + 3]), (), 0),), 0, ()) for first in (0, 3)]
    plan = DeltaPlan(rounds)
    counts = np.array([10, 600, 300, 0, 4000, 20])
    limited = counts.copy()
    plan.limit_packed(limited, 4096)
    assert limited.tolist() == counts.tolist()
    plan.limit_packed(limited, 2048)
    assert limited.tolist() == [10, elements, 300, 0, 4000, 20]
    first, second = (each.round.hops[0] for each in plan.select(limited))
    assert [send.num_bytes for send in first.sends] == [40, 2 * elements, 512 + 600]
    assert [send.staging_offset for send in first.sends] == [0, None, 48]
    assert [send.num_bytes for send in second.sends] == [2 * elements, 80]  # 4000 changes are sent as they are anyway
    assert max(first.staging_bytes, second.staging_bytes) <= 2048
