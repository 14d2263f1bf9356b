"""Moments of groups against NumPy's of all values, however the groups are split into parts."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megarl.functional import GroupMoments

SIZES = [5, 0, 1, 40, 3, 0]


def make_values() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.normal(loc=1e4, size=sum(SIZES)), np.repeat(np.arange(len(SIZES)), SIZES)


def moments_of(values: np.ndarray, groups: np.ndarray, num_groups: int) -> GroupMoments:
    return GroupMoments.of(torch.from_numpy(values), torch.from_numpy(groups), num_groups)


def test_moments_are_those_of_all_values() -> None:
    values, groups = make_values()
    moments = moments_of(values, groups, len(SIZES))
    assert moments.count_G.tolist() == SIZES
    assert moments.count == len(values)
    assert moments.mean == pytest.approx(values.mean(), rel=1e-14)
    assert moments.variance() == pytest.approx(values.var(), rel=1e-10)
    assert moments.variance(unbiased=True) == pytest.approx(values.var(ddof=1), rel=1e-10)


def test_parts_give_the_same_bits() -> None:
    values, groups = make_values()
    whole = moments_of(values, groups, len(SIZES))
    split = [[4, 1], [0], [5, 3, 2]]
    parts = []
    for own in map(sorted, split):
        chosen = np.isin(groups, own)
        parts.append(moments_of(values[chosen], np.searchsorted(own, groups[chosen]), len(own)))
    joined = GroupMoments.concatenate(parts, np.argsort([group for own in split for group in sorted(own)]))
    assert joined.count_G.tolist() == SIZES
    assert (joined.mean, joined.variance()) == (whole.mean, whole.variance())


@pytest.mark.parametrize("value", [0.1, 1 / 3, 1e30])
def test_equal_values_have_exactly_their_mean_and_no_variance(value: float) -> None:
    moments = moments_of(np.full(1000, value), np.repeat([0, 2], [333, 667]), 3)
    assert (moments.mean, moments.variance()) == (value, 0.0)


def test_no_values_give_zeros() -> None:
    moments = moments_of(np.zeros(0), np.zeros(0, np.int64), 2)
    assert (moments.count, moments.mean, moments.variance(), moments.variance(unbiased=True)) == (0, 0.0, 0.0, 0.0)
