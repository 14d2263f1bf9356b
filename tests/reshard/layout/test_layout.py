from __future__ import annotations

import itertools
import pickle
import subprocess
import sys

import pytest

from megarl.reshard.layout.layout import (
    Box,
    PieceTable,
    ShardPiece,
    TensorSpec,
    WeightLayout,
    contains,
    extent,
    intersect,
    slices,
    volume,
)

INTERVALS = [(0, 2), (1, 4), (3, 3), (2, 5), (4, 6)]
BOXES: list[Box] = list(itertools.product(INTERVALS, INTERVALS))


def elements(box: Box) -> set[tuple[int, ...]]:
    return set(itertools.product(*(range(start, stop) for start, stop in box)))


@pytest.mark.parametrize("a", BOXES)
def test_boxes_are_sets_of_elements(a: Box) -> None:
    assert volume(a) == len(elements(a))
    assert extent(a) == tuple(stop - start for start, stop in a)
    for b in BOXES:
        common = intersect(a, b)
        assert (elements(common) if common else set()) == elements(a) & elements(b)
        if volume(a) and volume(b):
            assert contains(a, b) == (elements(b) <= elements(a))


def test_slices_of_a_box() -> None:
    assert slices(((1, 3), (0, 2))) == (slice(1, 3), slice(0, 2))
    assert slices(()) == ()


def test_layout_rejects_pieces_that_do_not_fit() -> None:
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


def test_piece_table_round_trip() -> None:
    table = PieceTable.pack(PIECES)
    assert tuple(table) == PIECES
    assert (table[1], table[-1], list(table[1:])) == (PIECES[1], PIECES[2], list(PIECES[1:]))
    assert len(PieceTable.pack(())) == 0
    assert PieceTable.pack(table) is table
    concatenated = PieceTable.join(
        [PieceTable.pack(PIECES[:1]), PieceTable.pack(PIECES[1:2]), PieceTable.pack(PIECES[2:])]
    )
    assert tuple(concatenated) == PIECES
    assert concatenated == table
    assert table == PIECES
    assert table != PieceTable.pack(PIECES[:2])


def test_layout_equality_and_hash_survive_pickling() -> None:
    tensors = {"w": TensorSpec((4, 2), "float32"), "bias": TensorSpec((3,), "float32")}
    for pieces in (PIECES, PieceTable.pack(PIECES)):
        layout = WeightLayout(tensors, pieces)
        assert hash(layout) == hash(layout)
        script = "import pickle, sys; x = pickle.load(sys.stdin.buffer); y = pickle.loads(pickle.dumps(x))\n"
        script += "assert (x == y, hash(x) == hash(y), len(x.pieces)) == (True, True, 3)"
        subprocess.run([sys.executable, "-c", script], input=pickle.dumps(layout), check=True)
