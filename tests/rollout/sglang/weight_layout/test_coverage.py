"""Coverage by disjoint boxes, compared with boolean masks."""

import random

import torch

from megarl.reshard.layout.layout import slices
from megarl.rollout.sglang.weight_layout.coverage import Coverage, subtract


def random_box(rng, shape):
    return tuple(tuple(sorted(rng.sample(range(n + 1), 2))) for n in shape)


def test_coverage_matches_a_mask():
    rng = random.Random(0)
    for shape in [(9,), (6, 5), (4, 3, 5)] * 40:
        coverage, mask = Coverage(), torch.zeros(shape, dtype=torch.bool)
        for _ in range(12):
            box = random_box(rng, shape)
            meeting = coverage.overlapping(box)
            assert bool(meeting) == bool(mask[slices(box)].any())
            if meeting and rng.random() < 0.5:
                coverage.remove(meeting[0])
                mask[slices(meeting[0])] = False
            elif not meeting:
                coverage.add(box)
                mask[slices(box)] = True
            query = random_box(rng, shape)
            hole = coverage.first_gap(query)
            assert (hole is None) == bool(mask[slices(query)].all())
            if hole is not None:
                assert not mask[slices(hole)].any()
            assert coverage.num_elements == mask.sum()


def test_subtract_returns_disjoint_boxes():
    rng = random.Random(1)
    for _ in range(100):
        box, others = random_box(rng, (6, 5)), [random_box(rng, (6, 5)) for _ in range(3)]
        count = torch.zeros(6, 5)
        for part in subtract(box, others):
            count[slices(part)] += 1
        expected = torch.zeros(6, 5)
        expected[slices(box)] = 1
        for other in others:
            expected[slices(other)] = 0
        assert torch.equal(count, expected)


def test_scalar_has_one_box():
    coverage = Coverage()
    assert coverage.first_gap(()) == ()
    coverage.add(())
    assert coverage.first_gap(()) is None
