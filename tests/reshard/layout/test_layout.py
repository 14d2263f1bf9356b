"""Layouts: boxes, piece tables, quantized weights, and samples."""

import itertools
import pickle
import random
from collections import Counter
from dataclasses import replace

import pytest

from megarl.errors import WeightSyncError
from megarl.reshard.layout.layout import (
    PieceTable,
    ShardPiece,
    TensorSpec,
    WeightLayout,
    contains,
    extent,
    intersect,
    merge_specs,
    share_tensors,
    volume,
)
from megarl.reshard.layout.lower_bounds import rank_bounds
from megarl.reshard.layout.model_tensors import ModelTensors
from megarl.reshard.layout.quantized_layout import (
    cast_dtypes,
    convert_sources,
    find_quantized_pieces,
    quantize_layout,
    quantized_tensors,
)
from megarl.reshard.layout.topology import Topology
from megarl.reshard.planning.plan import plan_rank
from megarl.reshard.planning.plan_cache import cached_index
from megarl.reshard.planning.rounds import build_rounds
from tests.reshard.rank_process import call_in_process

INTERVALS = [(0, 2), (1, 4), (3, 3), (2, 5), (4, 6)]
BOXES = list(itertools.product(INTERVALS, INTERVALS))


def elements(box):
    return set(itertools.product(*(range(start, stop) for start, stop in box)))


def test_boxes_are_sets_of_elements():
    for a, b in itertools.product(BOXES, BOXES):
        assert volume(a) == len(elements(a))
        assert extent(a) == tuple(stop - start for start, stop in a)
        common = intersect(a, b)
        assert (common and elements(common)) == (elements(a) & elements(b) or None)
        if volume(a) and volume(b):
            assert contains(a, b) == (elements(b) <= elements(a))


def test_layout_rejects_pieces_that_do_not_fit():
    tensors = {"w": TensorSpec((4, 2), "float32")}
    assert tensors["w"].box == ((0, 4), (0, 2))
    WeightLayout(tensors, (ShardPiece("w", ((2, 4), (0, 2)), "local", ((0, 2), (0, 2))),))
    with pytest.raises(AssertionError):
        WeightLayout(tensors, (ShardPiece("w", ((2, 4), (0, 2)), "local", ((0, 1), (0, 2))),))
    with pytest.raises(AssertionError):
        WeightLayout(tensors, (ShardPiece("w", ((3, 5), (0, 2)), "local", ((0, 2), (0, 2))),))


PIECES = (
    ShardPiece("w", ((2, 4), (0, 2)), "a", ((0, 2), (0, 2))),
    ShardPiece("bias", ((1, 3),), "b", ((5, 7),)),
    ShardPiece("w", ((0, 2), (0, 2)), "a", ((2, 4), (0, 2))),
)


def test_piece_table_round_trip():
    table = PieceTable.pack(PIECES)
    assert tuple(table) == PIECES
    assert (table[1], table[-1]) == (PIECES[1], PIECES[2])
    assert len(PieceTable.pack(())) == 0
    assert PieceTable.pack(table) is table
    concatenated = PieceTable.join([PieceTable.pack(PIECES[i : i + 1]) for i in range(3)])
    assert tuple(concatenated) == PIECES
    assert concatenated == table
    assert table != PieceTable.pack(PIECES[:2])


def test_piece_table_equals_only_tables_with_its_hash():
    table = PieceTable.pack(PIECES)
    assert table != PIECES
    assert {table: 1, PieceTable.pack(list(PIECES)): 2} == {table: 2}
    renamed = PieceTable.pack([replace(piece, local="other") for piece in PIECES])
    assert table != renamed
    assert table.box_digest != renamed.box_digest  # two local tensors have become one
    prefixed = PieceTable.pack([replace(piece, local=f"x.{piece.local}") for piece in PIECES])
    assert (table == prefixed, table.box_digest == prefixed.box_digest) == (False, True)


@pytest.mark.parametrize("pieces", [PIECES, (), PIECES[1:2]])
def test_piece_table_survives_pickling_and_bytes(pieces):
    table = PieceTable.pack(pieces)
    copy = pickle.loads(pickle.dumps(table))
    assert len(copy) == len(pieces)
    assert tuple(copy) == pieces
    assert copy == table
    nameless = PieceTable.from_bytes(table.to_bytes(), table.tensors)
    assert (len(nameless), nameless.box_digest) == (len(pieces), table.box_digest)
    assert tuple(nameless) == tuple(replace(piece, local="") for piece in pieces)


def test_layouts_of_a_model_share_its_tensors_when_pickled_together():
    tensors = ModelTensors({f"layers.{i}.weight": TensorSpec((i + 1, 2), "float32") for i in range(1000)})
    piece = ShardPiece("layers.7.weight", ((0, 8), (0, 2)), "a", ((0, 8), (0, 2)))
    layouts = [WeightLayout(tensors, [replace(piece, local=f"rank {rank}")]) for rank in range(50)]
    copies = pickle.loads(pickle.dumps(layouts))
    assert len(pickle.dumps(layouts)) < 2 * len(pickle.dumps(layouts[0]))
    assert copies == layouts
    assert len({id(copy.tensors) for copy in copies}) == 1
    assert dict(copies[0].tensors) == dict(tensors)
    apart = [pickle.loads(pickle.dumps(layout)) for layout in layouts]
    assert len({id(copy.tensors) for copy in share_tensors(apart)}) == 1


def pickle_again(layouts):
    copies = pickle.loads(pickle.dumps(layouts))
    return [(x == y, hash(x) == hash(y), len(x.pieces)) for x, y in zip(layouts, copies, strict=True)]


def test_layout_equality_and_hash_survive_pickling():
    """Processes hash strings differently."""
    tensors = {"w": TensorSpec((4, 2), "float32"), "bias": TensorSpec((3,), "float32")}
    layouts = [WeightLayout(tensors, pieces) for pieces in (PIECES, PieceTable.pack(PIECES))]
    assert [hash(layout) for layout in layouts] == [hash(layout) for layout in layouts]
    assert call_in_process(pickle_again, layouts) == [(True, True, 3)] * 2


SHAPE = (700, 400)
SPECS = {"norm": TensorSpec((400,), "bfloat16"), "w": TensorSpec(SHAPE, "bfloat16")}
QUANTIZED = {
    "norm": TensorSpec((400,), "bfloat16"),
    "w": TensorSpec(SHAPE, "float8_e4m3fn"),
    "w_scale_inv": TensorSpec((6, 4), "float32"),
}


def random_shards(seed):
    """Cut `w` at random rows, and each part at random columns; return the layouts of as many ranks."""
    draw = random.Random(seed)

    def cuts(n):
        inner = sorted(draw.sample(range(1, n), 3))
        return list(zip([0, *inner], [*inner, n], strict=True))

    boxes = [(rows, columns) for rows in cuts(SHAPE[0]) for columns in cuts(SHAPE[1])]
    pieces = [ShardPiece("w", box, "p", tuple((7, 7 + b - a) for a, b in box)) for box in boxes]
    norm = ShardPiece("norm", ((0, 400),), "n", ((0, 400),))
    return [WeightLayout(SPECS, [norm, piece]) for piece in pieces]


@pytest.mark.parametrize("seed", range(8))
def test_each_scale_has_one_holder_and_values_stay_where_they_are(seed):
    holders = Counter()
    for layout in random_shards(seed):
        sent = quantize_layout(layout, {"w"})
        assert dict(sent.tensors) == QUANTIZED
        norm, values, *scales = sent.pieces
        assert norm == layout.pieces[0]
        held = layout.pieces[1]
        assert values == ShardPiece("w", held.box, "p:fp8", held.local_box)
        for piece in scales:
            assert (piece.tensor, piece.local) == ("w_scale_inv", "p:scales:0")
            (first, last), (left, right) = piece.box
            assert piece.local_box == ((0, last - first), (0, right - left))
            holders.update((row, column) for row in range(first, last) for column in range(left, right))
        (found,) = find_quantized_pieces(layout, {"w"})
        corners = {(128 * i, 128 * j) for i, j in holders}
        assert corners >= {
            (i, j)
            for i in range(0, SHAPE[0], 128)
            for j in range(0, SHAPE[1], 128)
            if held.box[0][0] <= i < held.box[0][1] and held.box[1][0] <= j < held.box[1][1]
        }
        edges = [(start % 128, stop % 128 and stop != n) for (start, stop), n in zip(held.box, SHAPE, strict=True)]
        assert found.cuts_blocks(SHAPE) == any(any(edge) for edge in edges)
    assert holders == Counter((i, j) for i in range(6) for j in range(4))


def test_sources_follow_what_engines_need():
    sources = random_shards(0)
    engine = WeightLayout(QUANTIZED, [])
    assert quantized_tensors([engine]) == {"w"}
    assert convert_sources(sources, [WeightLayout(SPECS, [])]) == sources
    sent = convert_sources([*sources, sources[0]], [engine])
    assert sent[0] is sent[-1]
    assert sent[3] == quantize_layout(sources[3], {"w"})


def test_tensors_are_sent_in_the_dtype_of_the_engines():
    held = {name: TensorSpec((4,), dtype) for name, dtype in (("a", "float32"), ("b", "bfloat16"), ("c", "bfloat16"))}
    needed = held | {"a": TensorSpec((4,), "bfloat16"), "c": TensorSpec((4,), "float32")}
    source = WeightLayout(held, [ShardPiece("a", ((0, 2),), "x", ((0, 2),))])
    (sent,) = convert_sources([source], [WeightLayout(needed, [])])
    assert dict(sent.tensors) == needed
    assert list(sent.pieces) == list(source.pieces)


def layout_of(dtypes, held, shapes=None):
    specs = {name: TensorSpec((shapes or {}).get(name, (4,)), dtype) for name, dtype in dtypes.items()}
    return WeightLayout(specs, [ShardPiece(name, specs[name].box, name, specs[name].box) for name in held])


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_tensor_has_the_dtype_of_the_ranks_that_hold_some_of_it(order):
    ranks = [
        layout_of({"e0": "bfloat16", "e1": "float32", "b": "bfloat16"}, ["e0", "b"]),
        layout_of({"e0": "float32", "e1": "bfloat16", "b": "bfloat16"}, ["e1", "b"]),
    ]
    needs = [ranks[number] for number in order]
    assert {name: spec.dtype for name, spec in merge_specs(needs).items()} == dict.fromkeys(
        ("e0", "e1", "b"), "bfloat16"
    )
    trainer = dict.fromkeys(("e0", "e1", "b"), TensorSpec((4,), "float32")) | {"b": TensorSpec((4,), "bfloat16")}
    assert cast_dtypes(trainer, needs) == {"e0": "bfloat16", "e1": "bfloat16"}
    nothing = layout_of(dict.fromkeys(("e0", "e1", "b"), "bfloat16"), [])
    assert rank_bounds([nothing, nothing], dict(enumerate(needs))) == {0: 16, 1: 16}
    full = layout_of(dict.fromkeys(("e0", "e1", "b"), "bfloat16"), ["e0", "e1", "b"])
    index = cached_index([full, nothing], {1: needs[0], 0: needs[1]}, Topology((0, 0)), 1 << 20)
    assert plan_rank(index, 1).bytes_received == 16


def test_tensors_that_no_engine_needs_may_have_more_dimensions():
    dtypes, shapes = {"w": "float32", "conv": "float32"}, {"conv": (2, 3, 2)}
    held, needed = layout_of(dtypes, ["w", "conv"], shapes), layout_of({"w": "float32"}, ["w"])
    index = cached_index([held, layout_of(dtypes, [], shapes)], {1: needed}, Topology((0, 0)), 1 << 20)
    assert [send.num_bytes for this in build_rounds(index, plan_rank(index, 0)) for send in this.hops[0].sends] == [16]


def test_a_piece_of_a_tensor_of_another_model_is_refused():
    with pytest.raises(KeyError, match="b"):
        WeightLayout({"a": TensorSpec((4,), "float32")}, [ShardPiece("b", ((0, 4),), "b", ((0, 4),))])


def test_a_mistaken_dtype_of_all_tensors_is_no_cast():
    held = {name: TensorSpec((4,), "float32") for name in "ab"}
    needed = {"a": TensorSpec((4,), "bfloat16"), "b": held["b"]}
    assert cast_dtypes(held, [WeightLayout(needed, [])]) == {}
    assert cast_dtypes(needed, [WeightLayout(held, [])]) == {}


@pytest.mark.parametrize(
    ("changes", "got"),
    [
        ({"w_scale_inv": TensorSpec((1,), "float32")}, "float32 \\[1\\]"),
        ({"w_scale_inv": TensorSpec((6, 4), "uint8")}, "uint8 \\[6, 4\\]"),
        ({"v": TensorSpec((6, 4), "float8_e4m3fn")}, "none"),
    ],
)
def test_other_scales_are_refused(changes, got):
    message = f"which a sync can send with a float32 scale for each block of 128 x 128 only, .* as scales: {got}$"
    with pytest.raises(WeightSyncError, match=message):
        quantized_tensors([WeightLayout(QUANTIZED | changes, [])])


SHAPES = {"a": (40, 6), "b": (17,), "c": (9, 4, 5), "scalar": ()}
TENSORS = {name: TensorSpec(shape, "bfloat16" if name == "b" else "float32") for name, shape in SHAPES.items()}


def split(size, rank, *, at=0):
    """Return the layout of a rank that holds a part of the rows of each tensor, `at` rows into its local tensor."""
    pieces = []
    for name, shape in SHAPES.items():
        if shape:
            rows = shape[0] * rank // size, shape[0] * (rank + 1) // size
            rest = tuple((0, n) for n in shape[1:])
            local = (at, at + rows[1] - rows[0])
            pieces.append(ShardPiece(name, (rows, *rest), f"local.{name}", (local, *rest)))
        else:
            pieces.append(ShardPiece(name, (), f"local.{name}", ()))
    return WeightLayout(TENSORS, PieceTable.pack(pieces))
