from __future__ import annotations

import itertools

import pytest

from megarl.reshard.layout import Box, Piece, TensorSpec, WeightLayout, contains, extent, intersect, slices, volume

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


def test_slices_index_the_box() -> None:
    assert slices(((1, 3), (0, 2))) == (slice(1, 3), slice(0, 2))
    assert slices(()) == ()


def test_a_layout_refuses_pieces_that_do_not_fit() -> None:
    tensors = {"w": TensorSpec((4, 2), "float32")}
    assert tensors["w"].box == ((0, 4), (0, 2))
    WeightLayout(tensors, (Piece("w", ((2, 4), (0, 2)), "local", ((0, 2), (0, 2))),))
    with pytest.raises(AssertionError):
        WeightLayout(tensors, (Piece("w", ((2, 4), (0, 2)), "local", ((0, 1), (0, 2))),))
    with pytest.raises(AssertionError):
        WeightLayout(tensors, (Piece("w", ((3, 5), (0, 2)), "local", ((0, 2), (0, 2))),))
