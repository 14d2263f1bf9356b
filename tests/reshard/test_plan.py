"""Plans against closed forms, and random layouts against a brute-force copy through whole tensors."""

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.errors import ConfigError, WeightSyncError
from megarl.placement.grid import RankGrid
from megarl.reshard.bounds import node_bounds, rank_bounds, subtract
from megarl.reshard.groups import consecutive_places, micro_dp_groups, strided_places
from megarl.reshard.layout import Piece, TensorSpec, WeightLayout, slices, volume
from megarl.reshard.plan import Topology, plan_moves
from megarl.reshard.rounds import cut_rounds
from tests.reshard import synthetic

DTYPES = ["float32", "bfloat16"]
LAYOUTS = {  # p-t-d -> p_g-t_g: fraction of the model that a rank receives, HybridFlow's table 2
    (1, 4, 2, 1, 2): 0.250,
    (1, 8, 2, 1, 4): 0.125,
    (2, 8, 2, 2, 4): 0.0625,
    (8, 8, 2, 1, 8): 0.109375,
}


def received(moves):
    counts = Counter()
    for move in moves:
        counts[move.destination] += 0 if move.is_local else move.num_bytes
    return counts


@pytest.mark.parametrize("layout", LAYOUTS)
def test_micro_dp_receives_the_closed_form_and_the_bound(layout):
    p, t, d, pg, tg = layout
    grid = RankGrid(tp=t, dp=d, pp=p)
    sources = synthetic.trainers(grid)
    needs = synthetic.needs(strided_places(grid, gen_tp=tg, gen_pp=pg), pg, tg)
    moves = plan_moves(sources, needs, Topology.single(grid.size), groups=micro_dp_groups(grid, gen_tp=tg, gen_pp=pg))
    got = received(moves)
    closed_form = (t * p - tg * pg) / (tg * pg * t * p)
    assert closed_form == pytest.approx(LAYOUTS[layout])
    assert {got[rank] / synthetic.MODEL_BYTES for rank in range(grid.size)} == {closed_form}
    assert rank_bounds(sources, needs) == {rank: got[rank] for rank in needs}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_micro_dp_moves_stay_in_their_group_and_everyone_sends_alike(layout):
    p, t, d, pg, tg = layout
    grid = RankGrid(tp=t, dp=d, pp=p)
    groups = micro_dp_groups(grid, gen_tp=tg, gen_pp=pg)
    group_of = {rank: i for i, group in enumerate(groups) for rank in group}
    assert sorted(rank for group in groups for rank in group) == list(range(grid.size))
    moves = plan_moves(
        synthetic.trainers(grid),
        synthetic.needs(strided_places(grid, gen_tp=tg, gen_pp=pg), pg, tg),
        Topology.single(grid.size),
        groups=groups,
    )
    assert all(group_of[m.source] == group_of[m.destination] for m in moves)
    sent = Counter()
    for m in moves:
        sent[m.source] += 0 if m.is_local else m.num_bytes
    assert len(set(sent.values())) == 1


def test_the_example_of_the_paper():
    grid = RankGrid(tp=4, dp=2, pp=1)
    places = strided_places(grid, gen_tp=2)
    replicas = {}
    for rank, place in enumerate(places):
        replicas.setdefault(place.replica, []).append((place.tp, rank))
    assert sorted([r for _, r in sorted(x)] for x in replicas.values()) == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert sorted(micro_dp_groups(grid, gen_tp=2)) == [(0, 1), (2, 3), (4, 5), (6, 7)]


def test_exact_on_vanilla_placement_is_the_papers_table():
    """1-4-2 -> 1-2 with consecutive ranks: mean .375, at most .5."""
    grid = RankGrid(tp=4, dp=2, pp=1)
    sources = synthetic.trainers(grid)
    needs = synthetic.needs(consecutive_places(8, gen_tp=2), 1, 2)
    got = received(plan_moves(sources, needs, Topology.single(8)))
    fractions = [got[rank] / synthetic.MODEL_BYTES for rank in range(8)]
    assert sum(fractions) / 8 == pytest.approx(0.375)
    assert max(fractions) == pytest.approx(0.5)
    assert {rank: got[rank] for rank in needs} == rank_bounds(sources, needs)


def test_sizes_that_do_not_divide_name_the_arithmetic():
    with pytest.raises(ConfigError, match=r"tp 3 % 2 = 1.*exact"):
        strided_places(RankGrid(tp=3), gen_tp=2)


def test_a_hole_names_tensor_and_box():
    grid = RankGrid(tp=2)
    sources = synthetic.trainers(grid)[:1]
    with pytest.raises(WeightSyncError, match=r"layers\.0: rank 0 needs .*384 elements"):
        plan_moves(sources, synthetic.needs(consecutive_places(1, gen_tp=1), 1, 1), Topology.single(1))


@st.composite
def random_split(draw, length):
    """Half-open intervals that cover range(length)."""
    cuts = sorted(set(draw(st.lists(st.integers(1, max(1, length - 1)), max_size=3))))
    edges = [0, *[c for c in cuts if c < length], length]
    return list(pairwise(edges))


@st.composite
def worlds(draw):
    """Sources that cover every tensor (some boxes held by several ranks), and arbitrary needs."""
    world = draw(st.integers(1, 5))
    tensors = {
        f"t{i}": TensorSpec(
            (draw(st.integers(1, 9)), draw(st.integers(1, 6))), draw(st.sampled_from(["float32", "bfloat16"]))
        )
        for i in range(draw(st.integers(1, 3)))
    }
    held = {rank: [] for rank in range(world)}
    wanted = {rank: [] for rank in range(world)}
    for name, spec in tensors.items():
        for r, rows in enumerate(draw(random_split(spec.shape[0]))):
            for c, columns in enumerate(draw(random_split(spec.shape[1]))):
                box = (rows, columns)
                local = tuple((0, stop - start) for start, stop in box)
                for rank in draw(st.sets(st.integers(0, world - 1), min_size=1, max_size=2)):
                    held[rank].append(Piece(name, box, f"{name}/{r}/{c}", local))
        for rank in range(world):
            for i in range(draw(st.integers(0, 2))):
                a, b = draw(st.integers(0, spec.shape[0] - 1)), draw(st.integers(0, spec.shape[1] - 1))
                box = ((a, draw(st.integers(a + 1, spec.shape[0]))), (b, draw(st.integers(b + 1, spec.shape[1]))))
                offset = draw(st.integers(0, 3))
                local = tuple((offset, offset + stop - start) for start, stop in box)
                wanted[rank].append(Piece(name, box, f"{name}/need{i}", local))
    nodes = tuple(draw(st.integers(0, 1)) for _ in range(world))
    sources = [WeightLayout(tensors, tuple(held[rank])) for rank in range(world)]
    needs = {rank: WeightLayout(tensors, tuple(wanted[rank])) for rank in range(world)}
    return sources, needs, Topology(nodes)


@given(worlds(), st.integers(4, 200))
@settings(max_examples=150, deadline=None)
def test_any_plan_brings_every_element_to_its_place(case, bucket_bytes):
    sources, needs, topology = case
    rng = np.random.default_rng(0)
    tensors = sources[0].tensors
    whole = {name: rng.integers(0, 1 << 30, spec.shape) for name, spec in tensors.items()}
    local = [{p.local: whole[p.tensor][slices(p.box)] for p in layout.pieces} for layout in sources]
    target = {rank: {} for rank in needs}
    for rank, need in needs.items():
        for piece in need.pieces:
            target[rank][piece.local] = np.full([stop for _, stop in piece.local_box], -1)
    moves = plan_moves(sources, needs, topology)
    for rank in range(len(sources)):
        for number in range(len(cut_rounds(moves, 0, bucket_bytes))):
            this = cut_rounds(moves, rank, bucket_bytes)[number]
            for source, received_moves in this.receives.items():
                if source != rank:
                    assert cut_rounds(moves, source, bucket_bytes)[number].sends[rank] == received_moves
                for m in received_moves:
                    target[rank][m.local][slices(m.local_box)] = local[source][m.source_local][slices(m.source_box)]
    for rank, need in needs.items():
        for piece in need.pieces:
            got = target[rank][piece.local][slices(piece.local_box)]
            assert (got == whole[piece.tensor][slices(piece.box)]).all()


@given(worlds())
@settings(max_examples=60, deadline=None)
def test_ranks_receive_what_they_need_and_lack(case):
    sources, needs, topology = case
    bounds = rank_bounds(sources, needs)
    for rank, need in needs.items():
        wanted, have = {}, {}
        for marks, layout in ((wanted, need), (have, sources[rank])):
            for piece in layout.pieces:
                marks.setdefault(piece.tensor, np.zeros(need.tensors[piece.tensor].shape, bool))[slices(piece.box)] = (
                    True
                )
        lacking = sum(
            (marks & ~have.get(name, np.zeros_like(marks))).sum() * (4 if need.tensors[name].dtype == "float32" else 2)
            for name, marks in wanted.items()
        )
        assert bounds[rank] == lacking
    assert all(value >= 0 for value in node_bounds(sources, needs, topology).values())


@given(worlds(), st.integers(4, 60))
@settings(max_examples=60, deadline=None)
def test_no_round_exceeds_a_bucket_but_for_single_rows(case, bucket_bytes):
    sources, needs, topology = case
    moves = plan_moves(sources, needs, topology)
    for rank in range(len(sources)):
        for this in cut_rounds(moves, rank, bucket_bytes):
            count = sum(len(moves) for moves in this.receives.values())
            total = sum(m.num_bytes for moves in this.receives.values() for m in moves)
            assert total <= bucket_bytes or count == 1


def test_subtract_is_exact():
    box, hole = ((0, 5), (2, 7), (1, 3)), ((1, 3), (0, 4), (2, 9))
    marks = np.zeros((6, 8, 4), int)
    for part in subtract(box, hole):
        marks[slices(part)] += 1
    want = np.zeros_like(marks)
    want[slices(box)] = 1
    want[slices(hole)] = 0
    assert (marks == want).all()
    assert sum(map(volume, subtract(box, hole))) == want.sum()
