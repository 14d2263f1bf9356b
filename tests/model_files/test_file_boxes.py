"""Contiguous runs and chunks of boxes, compared with NumPy slicing."""

from itertools import chain, pairwise
from math import prod

import numpy as np
import pytest

from megarl.model_files.file_boxes import contiguous_runs, extent, split_box

CASES = [
    ((), ()),
    ((5,), ((0, 5),)),
    ((5,), ((2, 4),)),
    ((5,), ((3, 3),)),
    ((3, 8), ((1, 3), (2, 6))),
    ((3, 8), ((1, 3), (0, 8))),
    ((3, 8), ((1, 2), (7, 8))),
    ((4, 3, 5), ((1, 3), (0, 3), (0, 5))),
    ((4, 3, 5), ((0, 4), (1, 3), (0, 5))),
    ((4, 3, 5), ((1, 4), (0, 3), (2, 4))),
    ((4, 1, 5), ((1, 4), (0, 1), (2, 4))),
]


@pytest.mark.parametrize(("shape", "box"), CASES)
def test_runs_cover_the_box_with_the_fewest_runs(shape, box):
    elements = np.arange(prod(shape)).reshape(shape)[tuple(slice(*pair) for pair in box)].ravel().tolist()
    got = list(contiguous_runs(shape, box))
    assert [first + i for first, count in got for i in range(count)] == elements
    gaps = sum(after != before + 1 for before, after in pairwise(elements))
    assert len(got) == (gaps + 1 if elements else 0)


@pytest.mark.parametrize(("shape", "box"), CASES)
@pytest.mark.parametrize("limit", [1, 2, 3, 7, 100])
def test_split_boxes_are_in_order_and_within_the_limit(shape, box, limit):
    tensor = np.arange(prod(shape)).reshape(shape)

    def elements(part):
        return tensor[tuple(slice(*pair) for pair in part)].ravel().tolist()

    parts = list(split_box(box, limit))
    assert list(chain.from_iterable(elements(part) for part in parts)) == elements(box)
    assert all(prod(extent(part)) <= limit for part in parts)
