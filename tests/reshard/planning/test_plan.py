"""Plans against closed forms, and random layouts against a brute-force copy through full tensors."""

from collections import Counter
from dataclasses import replace
from itertools import pairwise
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.cluster.placement.rank_grid import RankGrid
from megarl.errors import ConfigError, WeightSyncError
from megarl.reshard.analysis.nccl_progress import find_stalls, posted_groups
from megarl.reshard.layout.engine_ranks import micro_dp_groups, place_engines_consecutively, place_engines_strided
from megarl.reshard.layout.layout import ShardPiece, TensorSpec, WeightLayout, slices
from megarl.reshard.layout.lower_bounds import node_bounds, rank_bounds
from megarl.reshard.layout.remote_traffic import MAX_REMOTE_PEERS
from megarl.reshard.layout.topology import Topology
from megarl.reshard.planning.plan import plan_rank
from megarl.reshard.planning.plan_cache import cached_index, clear_plan_cache
from megarl.reshard.planning.rounds import ALIGNMENT, build_rounds
from tests.errors import expect_error
from tests.reshard import simulate, synthetic

BUCKET = 1 << 20
BYTES = {"bfloat16": 2, "float32": 4}
LAYOUTS = [(1, 4, 2, 2), (1, 8, 2, 4), (2, 8, 2, 4), (8, 8, 2, 8)]  # p-t-d -> 1-t_g


def sent(rounds):
    return [sum(hop.bytes_sent for this in of_rank for hop in this.hops) for of_rank in rounds]


def strided(p, t, d, tg):
    """Return sources, needs, topology and groups of strided placement on one node."""
    grid = RankGrid(tp=t, dp=d, pp=p)
    needs = synthetic.needs(place_engines_strided(grid, gen_tp=tg))
    groups = micro_dp_groups(grid, gen_tp=tg)
    return synthetic.trainers(grid), needs, Topology.single(grid.size), groups


def plan_consecutive(grid, gen_tp, bucket_bytes=BUCKET):
    """Return sources, needs and the rounds of all ranks of consecutive placement on one node."""
    sources = synthetic.trainers(grid)
    needs = synthetic.needs(place_engines_consecutively(grid.size // gen_tp, gen_tp=gen_tp))
    return sources, needs, simulate.plans(sources, needs, Topology.single(grid.size), bucket_bytes)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_micro_dp_matches_closed_form_and_lower_bound_and_stays_in_its_group(layout):
    p, t, _, tg = layout
    sources, needs, topology, groups = strided(*layout)
    index = cached_index(sources, needs, topology, BUCKET, groups=groups)
    got = {rank: plan_rank(index, rank).bytes_received for rank in needs}
    closed_form = (t * p - tg) / (tg * t * p)  # HybridFlow's table 2
    assert {num_bytes / synthetic.MODEL_BYTES for num_bytes in got.values()} == {closed_form}
    assert rank_bounds(sources, needs) == got
    group_of = {rank: i for i, group in enumerate(groups) for rank in group}
    assert sorted(rank for group in groups for rank in group) == list(range(len(sources)))
    rounds = simulate.plans(sources, needs, topology, BUCKET, groups)
    for rank, of_rank in enumerate(rounds):
        assert all(group_of[send.to] == group_of[rank] for r in of_rank for hop in r.hops for send in hop.sends)
    assert len(set(sent(rounds))) == 1  # all ranks send equally much


@pytest.mark.parametrize(
    ("layout", "gathers"), [((1, 4, 2, 2), True), ((1, 8, 2, 4), True), ((2, 2, 1, 2), False)], ids=str
)
def test_micro_dp_uses_all_gather_within_a_pipeline_stage(layout, gathers):
    """Pipeline stages hold different tensors, so their boxes cannot be gathered as equal shares of one."""
    sources, needs, topology, groups = strided(*layout)
    for of_rank in simulate.plans(sources, needs, topology, BUCKET, groups):
        assert {bool(this.gathers) for this in of_rank} == {gathers}
        assert {any(hop.receives for hop in this.hops) for this in of_rank} == {not gathers}


def test_groups_match_the_paper_example():
    grid = RankGrid(tp=4, dp=2, pp=1)
    assert sorted(place_engines_strided(grid, gen_tp=2)) == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert sorted(micro_dp_groups(grid, gen_tp=2)) == [(0, 1), (2, 3), (4, 5), (6, 7)]


def test_exact_with_consecutive_placement_matches_the_paper():
    """1-4-2 -> 1-2 with consecutive ranks: the mean is 0.375 of the model, the maximum 0.5."""
    sources, needs, rounds = plan_consecutive(RankGrid(tp=4, dp=2), 2)
    got = [sum(m.num_bytes for this in of_rank for hop in this.hops for m in hop.receives) for of_rank in rounds]
    assert (sum(got) / 8, max(got)) == (0.375 * synthetic.MODEL_BYTES, 0.5 * synthetic.MODEL_BYTES)
    assert dict(enumerate(got)) == rank_bounds(sources, needs)


def test_impossible_plans_are_refused():
    """Boxes travel as raw bytes, and what a rank holds itself is copied: neither converts dtypes."""
    with expect_error(ConfigError, "3", "2 = 1", "exact"):
        place_engines_strided(RankGrid(tp=3), gen_tp=2)
    sources, needs, _ = plan_consecutive(RankGrid(tp=2), 1)
    with expect_error(WeightSyncError, "layers.0", "0", "384"):
        simulate.plans(sources[:1], {0: needs[0]}, Topology.single(1), BUCKET)
    half = {name: replace(spec, dtype="bfloat16") for name, spec in synthetic.TENSORS.items()}
    needs = {rank: WeightLayout(half, need.pieces) for rank, need in needs.items()}
    with expect_error(WeightSyncError, "layers.0", "bfloat16", "float32"):
        simulate.plans(sources, needs, Topology.single(2), BUCKET)


@st.composite
def random_split(draw, length):
    """Draw half-open intervals that cover range(length)."""
    cuts = sorted(set(draw(st.lists(st.integers(1, max(1, length - 1)), max_size=3))))
    edges = [0, *[c for c in cuts if c < length], length]
    return list(pairwise(edges))


@st.composite
def worlds(draw):
    """Draw sources that cover every tensor, with some boxes on several ranks, and arbitrary needs."""
    world = draw(st.integers(1, 5))
    shape, dtype = st.tuples(st.integers(1, 9), st.integers(1, 6)), st.sampled_from(["float32", "bfloat16"])
    tensors = {f"t{i}": TensorSpec(draw(shape), draw(dtype)) for i in range(draw(st.integers(1, 3)))}
    held, wanted = ([[] for _ in range(world)] for _ in range(2))
    for name, spec in tensors.items():
        for r, rows in enumerate(draw(random_split(spec.shape[0]))):
            for c, columns in enumerate(draw(random_split(spec.shape[1]))):
                box = (rows, columns)
                local = tuple((0, stop - start) for start, stop in box)
                for rank in draw(st.sets(st.integers(0, world - 1), min_size=1, max_size=2)):
                    held[rank].append(ShardPiece(name, box, f"{name}/{r}/{c}", local))
        for rank in range(world):
            for i in range(draw(st.integers(0, 2))):
                a, b = draw(st.integers(0, spec.shape[0] - 1)), draw(st.integers(0, spec.shape[1] - 1))
                box = ((a, draw(st.integers(a + 1, spec.shape[0]))), (b, draw(st.integers(b + 1, spec.shape[1]))))
                offset = draw(st.integers(0, 3))
                local = tuple((offset, offset + stop - start) for start, stop in box)
                wanted[rank].append(ShardPiece(name, box, f"{name}/need{i}", local))
    nodes = tuple(draw(st.integers(0, draw(st.sampled_from([1, 4])))) for _ in range(world))
    sources = [WeightLayout(tensors, tuple(held[rank])) for rank in range(world)]
    needs = {rank: WeightLayout(tensors, tuple(wanted[rank])) for rank in range(world)}
    return sources, needs, Topology(nodes)


@given(
    worlds(),
    st.integers(16, 400),
    st.booleans(),
    st.sampled_from([8, 1 << 20]),
    st.sampled_from([1, MAX_REMOTE_PEERS]),
)
@settings(max_examples=150)
def test_random_plans_deliver_every_element(case, bucket_bytes, grouped, large_bytes, max_peers):
    sources, needs, topology = case
    whole, held, targets = simulate.make_tensors(sources, needs)
    groups = [range(i, min(i + 2, len(sources))) for i in range(0, len(sources), 2)] if grouped else []
    with (
        mock.patch("megarl.reshard.planning.rounds.LARGE_MESSAGE_BYTES", large_bytes),
        mock.patch("megarl.reshard.layout.remote_traffic.MAX_REMOTE_PEERS", max_peers),
    ):
        clear_plan_cache()  # its keys do not contain the number of peers
        rounds = simulate.plans(sources, needs, topology, bucket_bytes, groups)
    assert not find_stalls([posted_groups(of_rank, groups_of(groups, rank)) for rank, of_rank in enumerate(rounds)])
    messages = simulate.run(rounds, held, targets, groups)
    for rank, need in needs.items():
        for piece in need.pieces:
            got = targets[rank][piece.local][slices(piece.local_box)]
            assert (got == whole[piece.tensor][slices(piece.box)]).all()
        assert sum(n for _, to, n in messages if to == rank) == missing_bytes_by_box(need, sources[rank])


def test_copies_after_an_all_gather_of_another_dtype_are_aligned():
    tensors = {"gathered": TensorSpec((3, 5), "bfloat16"), "held": TensorSpec((2, 2), "float32")}
    whole = ShardPiece("held", ((0, 2), (0, 2)), "held", ((0, 2), (0, 2)))
    rows = [ShardPiece("gathered", ((i, i + 1), (0, 5)), "row", ((0, 1), (0, 5))) for i in range(3)]
    sources = [WeightLayout(tensors, (row, whole)) for row in rows]
    rectangle = ((0, 3), (0, 5))
    need = WeightLayout(tensors, (ShardPiece("gathered", rectangle, "gathered", rectangle), whole))
    needs = dict.fromkeys(range(3), need)
    rounds = simulate.plans(sources, needs, Topology.single(3), BUCKET, [range(3)])
    assert rounds[0][0].gathers
    expected, held, targets = simulate.make_tensors(sources, needs)
    simulate.run(rounds, held, targets, [range(3)])
    assert all((targets[rank][name] == expected[name]).all() for rank in range(3) for name in tensors)


def groups_of(groups, rank):
    return next((tuple(group) for group in groups if rank in group), ())


def missing_bytes_by_box(need, held):
    """Sum over the needed boxes of the bytes that the rank does not hold, ignoring overlap between needed boxes."""
    total = 0
    for piece in need.pieces:
        marks = np.ones(need.tensors[piece.tensor].shape, bool)
        for mine in held.pieces:
            if mine.tensor == piece.tensor:
                marks[slices(mine.box)] = False
        total += marks[slices(piece.box)].sum() * BYTES[need.tensors[piece.tensor].dtype]
    return total


@given(worlds())
@settings(max_examples=60)
def test_each_missing_box_enters_a_node_once(case):
    """If ranks of a node need the same box, one of them fetches and relays it."""
    sources, needs, topology = case
    equal_needs = {rank: WeightLayout(need.tensors, needs[0].pieces) for rank, need in needs.items()}
    rounds = simulate.plans(sources, equal_needs, topology, 1 << 20)
    _, held, targets = simulate.make_tensors(sources, equal_needs)
    entered = simulate.bytes_into_nodes(simulate.run(rounds, held, targets), topology)
    for node in set(topology.nodes):
        on_node = [layout for layout, of_rank in zip(sources, topology.nodes, strict=True) if of_rank == node]
        together = tuple(piece for layout in on_node for piece in layout.pieces)
        assert entered[node] == missing_bytes_by_box(equal_needs[0], WeightLayout(sources[0].tensors, together))


def test_no_rotation_if_holders_are_evenly_loaded():
    """1-4-2 -> 1-2: two ranks need what two others hold; each always receives from the same one."""
    rounds = simulate.plans(*strided(1, 4, 2, 2)[:3], 1 << 16)
    for of_rank in rounds:
        assert {len(this.hops[0].receives) for this in of_rank} == {1}
        assert len({message.source for this in of_rank for message in this.hops[0].receives}) == 1
    assert len(set(sent(rounds))) == 1


def test_pipeline_stages_are_interleaved():
    """All pipeline stages send in every round instead of one stage after another."""
    _, _, rounds = plan_consecutive(RankGrid(pp=4, tp=2), 2, 1 << 14)
    assert len(rounds[0]) > 4
    assert all(this.hops[0].sends for of_rank in rounds for this in of_rank)


@given(worlds())
@settings(max_examples=60)
def test_lower_bounds_against_brute_force(case):
    sources, needs, topology = case
    bounds = rank_bounds(sources, needs)
    for rank, need in needs.items():
        missing = 0
        for name, spec in need.tensors.items():
            marks = np.zeros(spec.shape, bool)
            for layout, is_missing in ((need, True), (sources[rank], False)):
                for piece in (p for p in layout.pieces if p.tensor == name):
                    marks[slices(piece.box)] = is_missing
            missing += marks.sum() * BYTES[spec.dtype]
        assert bounds[rank] == missing
    assert all(value >= 0 for value in node_bounds(sources, needs, topology).values())


@given(worlds(), st.integers(16, 240))
@settings(max_examples=60)
def test_rounds_fit_the_bucket_except_single_rows(case, bucket_bytes):
    sources, needs, topology = case
    limit = cached_index(sources, needs, topology, bucket_bytes).round_bytes
    for of_rank in simulate.plans(sources, needs, topology, bucket_bytes):
        for this in of_rank:
            by_tensor = Counter()
            for slot in this.slots:
                by_tensor[slot.local.split("/")[0]] += 1
            rows = all(slot.local_box[0][1] - slot.local_box[0][0] == 1 for slot in this.slots)
            assert this.bytes_delivered <= limit or (rows and len(by_tensor) == 1)


@given(worlds(), st.integers(16, 240), st.sampled_from([8, 1 << 20]))
@settings(max_examples=100)
def test_packed_sends_fit_the_bucket_except_single_tensor_parts(case, bucket_bytes, large_bytes):
    sources, needs, topology = case
    with mock.patch("megarl.reshard.planning.rounds.LARGE_MESSAGE_BYTES", large_bytes):
        index = cached_index(sources, needs, topology, bucket_bytes)
        plans = [plan_rank(index, rank) for rank in range(len(sources))]
        of_ranks = [build_rounds(index, plan) for plan in plans]
    for plan, rounds in zip(plans, of_ranks, strict=True):
        for number, this in enumerate(rounds):
            items = set(plan.sends.item[plan.sends.round == number].tolist())
            for hop in this.hops:
                padding = ALIGNMENT * len(hop.sends)
                assert hop.staging_bytes <= index.staging_bytes + padding or len(items) == 1
            for hop in this.hops[1:]:  # what is relayed is sent as it was received
                assert {send.staging_offset for send in hop.sends} <= {None}


def test_a_box_for_several_ranks_is_packed_once():
    """One rank holds columns of a tensor that three others need: packed once, since they are not contiguous."""
    spec = {"t": TensorSpec((8, 8), "float32")}
    held = WeightLayout(spec, (ShardPiece("t", ((0, 8), (0, 8)), "t", ((0, 8), (0, 8))),))
    need = WeightLayout(spec, (ShardPiece("t", ((0, 8), (0, 4)), "t", ((0, 8), (0, 4))),))
    sources = [held, *[WeightLayout(spec, ())] * 3]
    rounds = simulate.plans(sources, {1: need, 2: need, 3: need}, Topology.single(4), BUCKET)
    hop = rounds[0][0].hops[0]
    assert [(send.to, send.num_bytes, send.staging_offset) for send in hop.sends] == [(i, 128, 0) for i in (1, 2, 3)]
    assert hop.staging_bytes == 128


def test_large_contiguous_boxes_are_not_packed():
    with mock.patch("megarl.reshard.planning.rounds.LARGE_MESSAGE_BYTES", 8):
        _, _, rounds = plan_consecutive(RankGrid(tp=4), 1)
    hops = [this.hops[0] for of_rank in rounds for this in of_rank]
    assert {send.staging_offset for hop in hops for send in hop.sends} == {None}
    assert {hop.staging_bytes for hop in hops} == {0}
