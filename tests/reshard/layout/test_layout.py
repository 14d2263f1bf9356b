import itertools
import pickle
from dataclasses import replace

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
    share_tensors,
    volume,
)
from megarl.reshard.layout.model_tensors import ModelTensors
from tests.reshard.rank_process import call_in_process

INTERVALS = [(0, 2), (1, 4), (3, 3), (2, 5), (4, 6)]
BOXES: list[Box] = list(itertools.product(INTERVALS, INTERVALS))


def elements(box: Box) -> set[tuple[int, ...]]:
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
    assert (table[1], table[-1], list(table[1:])) == (PIECES[1], PIECES[2], list(PIECES[1:]))
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


def pickle_again(layouts: list[WeightLayout]) -> list[tuple[bool, bool, int]]:
    copies = pickle.loads(pickle.dumps(layouts))
    return [(x == y, hash(x) == hash(y), len(x.pieces)) for x, y in zip(layouts, copies, strict=True)]


def test_layout_equality_and_hash_survive_pickling():
    """Processes hash strings differently."""
    tensors = {"w": TensorSpec((4, 2), "float32"), "bias": TensorSpec((3,), "float32")}
    layouts = [WeightLayout(tensors, pieces) for pieces in (PIECES, PieceTable.pack(PIECES))]
    assert [hash(layout) for layout in layouts] == [hash(layout) for layout in layouts]
    assert call_in_process(pickle_again, layouts) == [(True, True, 3)] * 2
