"""Placement of engine ranks: against HybridFlow's grouping, against brute force, and within nodes."""

import itertools
from functools import partial

import numpy as np
import pytest

from megarl.cluster.placement.rank_grid import RankGrid
from megarl.errors import ConfigError
from megarl.reshard.analysis.scenario import arrange, even_nodes
from megarl.reshard.analysis.sync_report import explain
from megarl.reshard.layout.engine_ranks import (
    can_place_strided,
    find_cross_node_group,
    place_engines_by_overlap,
    place_engines_consecutively,
    place_engines_strided,
    resolve_strategy,
)
from megarl.reshard.layout.layout import Columns, PieceTable, ShardPiece, TensorSpec, WeightLayout, slices
from megarl.reshard.layout.lower_bounds import NeedIndex, rank_bounds
from megarl.reshard.layout.model_tensors import ModelTensors
from megarl.reshard.layout.topology import Topology
from tests.errors import expect_error
from tests.reshard.calls import count_calls
from tests.reshard.synthetic import MODEL_BYTES, scenario


def divisible():
    for p, t, d, tg in itertools.product((1, 2, 4), (1, 2, 4, 8), (1, 2, 4), (1, 2, 4)):
        if t % tg == 0 and 1 < p * t * d <= 32:
            yield p, t, d, tg


def max_missing_bytes(strategy, case):
    """Return the lower bound of the bytes into the busiest rank."""
    return max(rank_bounds(case.sources, arrange(strategy, case).needs).values())


@pytest.mark.parametrize("nodes", [1, 2, 4])
def test_exact_placement_matches_micro_dp_if_sizes_divide(nodes):
    tried = 0
    for p, t, d, tg in divisible():
        grid = RankGrid(pp=p, tp=t, dp=d)
        if grid.size % nodes or not can_place_strided(grid, even_nodes(grid.size, nodes), gen_tp=tg):
            continue
        case = scenario(p, t, d, tg, nodes=nodes)
        closed_form = (t * p - tg) / (tg * t * p) * MODEL_BYTES
        assert max_missing_bytes("exact", case) == max_missing_bytes("micro_dp", case) == closed_form, (p, t, d, tg)
        tried += 1
    assert tried >= 40


GROW_OR_DO_NOT_DIVIDE = [
    ((1, 3, 2, 2), 1),
    ((1, 3, 4, 2), 2),
    ((3, 2, 1, 3), 1),
    ((3, 2, 2, 3), 2),
    ((1, 2, 4, 4), 2),
    ((1, 8, 1, 3), 1),
    ((2, 2, 2, 8), 1),
    ((1, 1, 8, 4), 2),
]
DIVIDE = [(2, 8, 2, 4), (2, 4, 2, 2), (4, 2, 2, 2), (4, 2, 1, 1)]


@pytest.mark.parametrize(("layout", "nodes"), [*GROW_OR_DO_NOT_DIVIDE, *itertools.product(DIVIDE, [1, 2])], ids=str)
def test_exact_reaches_lower_bound(layout, nodes):
    case = scenario(*layout, nodes=nodes)
    report = explain("exact", case).report
    assert report.bytes_in_max == report.bytes_in_bound_max
    if layout in DIVIDE:
        assert report.bytes_in_max == explain("micro_dp", case).report.bytes_in_max
    if layout == (2, 8, 2, 4):
        assert report.bytes_in_max == MODEL_BYTES * 3 / 16


@pytest.mark.parametrize("layout", [(1, 3, 1, 2), (1, 4, 1, 3), (3, 2, 1, 1), (3, 2, 1, 3), (1, 2, 2, 4)])
def test_placement_on_one_node_is_optimal_for_the_busiest_rank(layout):
    case = scenario(*layout)
    need_index = NeedIndex(case.engine)
    missing = [[need_index.missing([held], [need]).boxes for need in case.engine] for held in case.sources]
    places = list(range(len(case.engine))) * case.replicas
    ranks = range(len(case.sources))
    orders = itertools.permutations(ranks, len(places))
    best = min(max(missing[rank][need] for rank, need in zip(chosen, places, strict=True)) for chosen in orders)
    assert max_missing_bytes("exact", case) == best


def test_tensor_groups_share_a_node_and_every_rank_serves_once():
    for layout, nodes in (((2, 8, 2, 4), 4), ((1, 3, 4, 2), 2), ((3, 4, 1, 3), 2)):
        case = scenario(*layout, nodes=nodes)
        placements = place_engines_by_overlap(case.sources, case.engine, replicas=2, topology=case.topology)
        assert [len(group) for group in placements] == [case.gen_tp] * 2
        assert find_cross_node_group(placements, case.topology) is None
        ranks = [rank for group in placements for rank in group]
        assert len(set(ranks)) == len(ranks)


def test_engines_are_placed_on_nodes_that_hold_most():
    """Two of four nodes hold the model."""
    spec = {"w": TensorSpec((8,), "float32")}
    whole = WeightLayout(spec, (ShardPiece("w", ((0, 8),), "w", ((0, 8),)),))
    nothing = WeightLayout(spec, ())
    sources = [nothing, nothing, whole, whole, nothing, nothing, whole, whole]
    found = place_engines_by_overlap(sources, [whole, whole], replicas=2, topology=even_nodes(8, 4))
    assert found == [(2, 3), (6, 7)]


def test_error_if_nodes_have_too_few_ranks():
    case = scenario(1, 4, 1, 3, nodes=2)
    with expect_error(ConfigError, "1", "3", "0", "groups", "tensor"):
        arrange("exact", case)


def test_strided_and_consecutive_placement():
    grid = RankGrid(pp=2, tp=4)
    assert place_engines_strided(grid, gen_tp=2) == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert place_engines_consecutively(2, gen_tp=2) == [(0, 1), (2, 3)]


@pytest.mark.parametrize(
    ("sizes", "gen_tp", "nodes", "expected"),
    [
        ({"tp": 4}, 2, 1, "micro_dp"),
        ({"tp": 4}, 2, 2, "exact"),
        ({"tp": 4, "dp": 2}, 2, 2, "micro_dp"),
        ({"tp": 4}, 1, 4, "exact"),
        ({"tp": 2}, 4, 1, "exact"),
        ({"tp": 3}, 2, 1, "exact"),
        ({"tp": 2, "dp": 2, "ep": 2}, 2, 1, "exact"),
        ({"tp": 2, "etp": 1}, 2, 1, "exact"),
    ],
    ids=str,
)
def test_auto_depends_on_sizes_and_nodes(sizes, gen_tp, nodes, expected):
    grid = RankGrid(**sizes)
    topology = even_nodes(grid.size, nodes)
    assert resolve_strategy("auto", grid, topology, gen_tp=gen_tp) == expected
    for name in ("micro_dp", "exact", "gather_hf"):
        assert resolve_strategy(name, grid, topology, gen_tp=gen_tp) == name


def test_missing_bytes_against_brute_force():
    rng = np.random.default_rng(0)
    shapes = {"a": (7, 5), "b": (9,), "c": (4, 3, 6), "only needed": (3,), "only held": (3,)}
    spec = {name: TensorSpec(shape, "bfloat16" if name == "b" else "float32") for name, shape in shapes.items()}

    def layout(names, tables):
        pieces = []
        for name in (name for name in names for _ in range(rng.integers(1, 4))):
            box = []
            for n in shapes[name]:
                length = int(rng.integers(1, n + 1))
                start = int(rng.integers(0, n - length + 1))
                box.append((start, start + length))
            pieces.append(ShardPiece(name, tuple(box), name, tuple((0, stop - start) for start, stop in box)))
        made = WeightLayout(spec, tuple(pieces))
        return WeightLayout(spec, made.pieces) if tables else made

    def mask(piece):
        out = np.zeros(shapes[piece.tensor], bool)
        out[slices(piece.box)] = True
        return out

    sources = [layout(["only held", "c", "b", "a"], tables=i % 2) for i in range(4)]
    sources.append(sources[1])
    needs = [layout(["b", "a", "only needed", "c"], tables=i % 2) for i in range(3)]
    need_index = NeedIndex(needs)
    for source, need in itertools.product([None, *sources], needs):
        missing = 0
        for piece in need.pieces:
            wanted = mask(piece)
            for held in source.pieces if source is not None else ():
                if held.tensor == piece.tensor:
                    wanted &= ~mask(held)
            missing += wanted.sum() * (2 if piece.tensor == "b" else 4)
        assert need_index.missing([source] if source is not None else [], [need]).boxes == missing


def test_placing_a_thousand_layouts_takes_few_calls():
    """1,024 trainer layouts of 60 pieces, 32 engine ranks of 44,000."""
    experts, layers, tp = 256, 171, 32
    names = [f"layers.{i}.experts.{e}" for i in range(layers) for e in range(experts)]
    spec = ModelTensors(dict.fromkeys(names, TensorSpec((64, 8), "bfloat16")))
    engine = []
    of_each, two = np.arange(len(names)), np.full(len(names), 2)
    for rank in range(tp):
        box, local = (np.broadcast_to([[2 * r, 2 * r + 2], [0, 8]], (len(names), 2, 2)) for r in (rank, 0))
        engine.append(WeightLayout(spec, PieceTable(names, names, Columns(of_each, of_each, two, box, local))))
    whole = ((0, 64), (0, 8))
    sources = [
        WeightLayout(spec, tuple(ShardPiece(name, whole, name, whole) for name in names[start : start + 42]))
        for start in range(0, 1024 * 42, 42)
    ]
    topology = Topology(tuple(rank // 32 for rank in range(2048)))
    placements = []
    place = partial(place_engines_by_overlap, sources * 2, engine, replicas=64, topology=topology)
    assert count_calls(lambda: placements.extend(place())) < 2_000_000
    assert len(placements) == 64
