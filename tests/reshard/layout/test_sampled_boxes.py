"""Samples of random layouts: where they lie, and which parts of them another layout holds."""

import numpy as np
import pytest

from megarl.reshard.layout import sampled_boxes
from megarl.reshard.layout.layout import Box, PieceTable, ShardPiece, TensorSpec, WeightLayout, contains, slices, volume
from megarl.reshard.layout.sampled_boxes import find_copies, find_parts, sample_boxes

SHAPES = {"a": (40, 6), "b": (17,), "c": (9, 4, 5), "scalar": ()}
TENSORS = {name: TensorSpec(shape, "bfloat16" if name == "b" else "float32") for name, shape in SHAPES.items()}


def split(size: int, rank: int, *, at: int = 0) -> WeightLayout:
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


def test_samples_depend_on_the_version_only_and_lie_in_the_layout():
    layouts = [split(2, rank) for rank in range(2)]
    chosen = [sample_boxes(layouts, version, 5) for version in range(30)]
    assert chosen == [sample_boxes([split(2, rank) for rank in range(2)], version, 5) for version in range(30)]
    assert len({tuple(samples) for samples in chosen}) > 20
    for samples in chosen:
        assert len(set(samples)) == 5
        for sample in samples:
            pieces = [p for p in layouts[sample.tp_rank].pieces if p.tensor == sample.tensor]
            assert any(contains(piece.box, sample.box) for piece in pieces)
            assert sample.dtype == TENSORS[sample.tensor].dtype
    # every piece of both ranks is compared sooner or later
    assert {(s.tp_rank, s.tensor) for samples in chosen for s in samples} == {(r, t) for r in range(2) for t in SHAPES}
    assert len(sample_boxes(layouts, 0, 100)) == 8


def test_large_pieces_are_sampled_in_part(monkeypatch):
    monkeypatch.setattr(sampled_boxes, "MAX_ELEMENTS", 13)
    starts = set()
    for version in range(50):
        (sample,) = (s for s in sample_boxes([split(1, 0)], version, 4) if s.tensor == "a")
        assert volume(sample.box) == 12
        starts.add(sample.box[0][0])
        (of_c,) = (s for s in sample_boxes([split(1, 0)], version, 4) if s.tensor == "c")
        assert volume(of_c.box) == 20  # one row
    assert len(starts) > 20


def elements(name: str, box: Box) -> set[int]:
    """Return the numbers of the tensor's elements in a box."""
    numbers = np.arange(volume(TENSORS[name].box)).reshape(SHAPES[name])
    return set(np.ravel(numbers[slices(box)]).tolist())


@pytest.mark.parametrize("sizes", [(1, 3), (3, 2), (2, 5), (4, 4)], ids=str)
def test_parts_of_a_sample_make_up_all_of_it(sizes):
    engine, trainer = ([split(size, rank, at=3) for rank in range(size)] for size in sizes)
    for sample in sample_boxes(engine, 7, 100):
        found: list[int] = []
        for layout in trainer:
            for part, local, local_box in find_parts(layout.pieces, sample.box, sample.tensor):
                assert local == f"local.{sample.tensor}"
                (piece,) = (p for p in layout.pieces if p.tensor == sample.tensor)
                shift = [a - b for (a, _), (b, _) in zip(piece.local_box, piece.box, strict=True)]
                assert local_box == tuple((a + n, b + n) for (a, b), n in zip(part, shift, strict=True))
                found += sorted(elements(sample.tensor, part))
        wanted = elements(sample.tensor, sample.box)
        assert set(found) == wanted
        if sample.tensor != "scalar":  # which every rank holds
            assert len(found) == len(wanted)


def test_copies_are_found_in_all_local_tensors():
    pieces = [
        ShardPiece("tied", ((4, 8), (0, 2)), "embedding", ((0, 4), (0, 2))),
        ShardPiece("tied", ((4, 8), (0, 2)), "head", ((10, 14), (0, 2))),
        ShardPiece("tied", ((6, 7), (0, 2)), "part", ((0, 1), (0, 2))),
        ShardPiece("other", ((4, 8), (0, 2)), "other", ((0, 4), (0, 2))),
    ]
    found = list(find_copies(pieces, ((5, 7), (0, 1)), "tied"))
    assert found == [("embedding", ((1, 3), (0, 1))), ("head", ((11, 13), (0, 1)))]
