"""Layouts of weights that are quantized before they are sent: every scale has one holder, against brute force."""

import random
from collections import Counter

import pytest

from megarl.errors import WeightSyncError
from megarl.reshard.layout.layout import ShardPiece, TensorSpec, WeightLayout
from megarl.reshard.layout.quantized_layout import (
    find_quantized_pieces,
    quantize_layout,
    quantize_sources,
    quantized_tensors,
)

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
    assert quantize_sources(sources, [WeightLayout(SPECS, [])]) == sources
    sent = quantize_sources([*sources, sources[0]], [engine])
    assert sent[0] is sent[-1]
    assert sent[3] == quantize_layout(sources[3], {"w"})


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
