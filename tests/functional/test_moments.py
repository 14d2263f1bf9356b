"""Moments of equal values and of none; others are tested where values are whitened."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megarl.functional import GroupMoments


def moments_of(values: np.ndarray, groups: np.ndarray, num_groups: int) -> GroupMoments:
    return GroupMoments.of(torch.from_numpy(values), torch.from_numpy(groups), num_groups)


@pytest.mark.parametrize("value", [0.1, 1 / 3, 1e30])
def test_equal_values_have_exactly_their_mean_and_no_variance(value: float) -> None:
    moments = moments_of(np.full(1000, value), np.repeat([0, 2], [333, 667]), 3)
    assert (moments.mean, moments.variance()) == (value, 0.0)


def test_no_values_give_zeros() -> None:
    moments = moments_of(np.zeros(0), np.zeros(0, np.int64), 2)
    assert (moments.count, moments.mean, moments.variance(), moments.variance(unbiased=True)) == (0, 0.0, 0.0, 0.0)
