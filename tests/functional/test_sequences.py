"""Sums, means, moments and recurrences over the sequences of a pack.

Shapes: S sequences of K elements; R chunks of C elements.
"""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.functional import GroupMoments
from megarl.functional.advantages import CHUNK, Columns, solve_backwards_
from megarl.functional.losses import Sequences


def test_sum_mean_and_spread_with_an_empty_sequence() -> None:
    sequences = Sequences.of(torch.tensor([0, 2, 2, 5], dtype=torch.int32))
    assert (sequences.count, sequences.ids_T.tolist()) == (3, [0, 0, 2, 2, 2])
    assert sequences.ids_T.dtype == torch.int64
    values = torch.tensor([1.0, 2.0, 3.0, torch.inf, 5.0])
    mask = torch.tensor([False, False, True, False, True])
    assert sequences.sum(torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])).tolist() == [3.0, 0.0, 12.0]
    assert sequences.mean(values, mask).tolist() == [0.0, 0.0, 4.0]
    assert sequences.spread(torch.tensor([7, 8, 9])).tolist() == [7, 7, 9, 9, 9]


def moments_of(values: np.ndarray, groups: np.ndarray, num_groups: int) -> GroupMoments:
    return GroupMoments.of(torch.from_numpy(values), torch.from_numpy(groups), num_groups)


@pytest.mark.parametrize("value", [0.1, 1 / 3, 1e30])
def test_equal_values_have_exactly_their_mean_and_no_variance(value: float) -> None:
    moments = moments_of(np.full(1000, value), np.repeat([0, 2], [333, 667]), 3)
    assert (moments.mean, moments.variance()) == (value, 0.0)


def test_no_values_give_zeros() -> None:
    moments = moments_of(np.zeros(0), np.zeros(0, np.int64), 2)
    assert (moments.count, moments.mean, moments.variance(), moments.variance(unbiased=True)) == (0, 0.0, 0.0, 0.0)


def by_loop(b: np.ndarray, a: np.ndarray, lengths: Sequence[int]) -> np.ndarray:
    out = np.zeros_like(b)
    for end, length in zip(np.cumsum(lengths), lengths, strict=True):
        behind = 0.0
        for t in reversed(range(end - length, end)):
            behind = out[t] = b[t] + a[t] * behind
    return out


def solve_in_columns(b: np.ndarray, a: np.ndarray, lengths: Sequence[int]) -> np.ndarray:
    columns = Columns.of(torch.tensor(lengths))
    b_CR = torch.from_numpy(b)[columns.index_CR]
    a_CR = torch.from_numpy(a)[columns.index_CR].masked_fill_(columns.is_end_CR, 0)
    x_CR = solve_backwards_(b_CR, a_CR)
    assert x_CR.data_ptr() == b_CR.data_ptr()
    x_K = np.full_like(b, np.nan)
    for k, x in zip(columns.index_CR.flatten().tolist(), x_CR.flatten().tolist(), strict=True):
        assert np.isnan(x_K[k]) or x_K[k] == x  # padding has the result of the last element
        x_K[k] = x
    return x_K


def test_a_sequence_begins_a_column_and_repeats_its_last_element() -> None:
    lengths = [1, CHUNK - 1, 0, CHUNK, CHUNK + 1, 0, 2 * CHUNK]
    columns = Columns.of(torch.tensor(lengths))
    want, ends, owners, first = [], [], [], 0
    for sequence, length in enumerate(lengths):
        for start in range(0, length, CHUNK):
            want.append([first + min(start + c, length - 1) for c in range(CHUNK)])
            ends.append([start + c >= length - 1 for c in range(CHUNK)])
            owners.append(sequence)
        first += length
    assert columns.index_CR.is_contiguous()
    assert columns.index_CR.t().tolist() == want
    assert columns.is_end_CR.t().tolist() == ends
    assert columns.sequence_R.tolist() == owners


@settings(max_examples=40)
@given(st.lists(st.integers(0, 200), min_size=1, max_size=9).filter(sum), st.floats(0, 1), st.integers(0, 2**32 - 1))
def test_sequences_are_solved_one_by_one(lengths: list[int], zeros: float, seed: int) -> None:
    """As by a loop, and with the same bits as each sequence alone."""
    rng, num = np.random.default_rng(seed), sum(lengths)
    b, a = rng.normal(size=num), np.where(rng.random(num) < zeros, 0.0, rng.random(num))
    got = solve_in_columns(b, a, lengths)
    np.testing.assert_allclose(got, by_loop(b, a, lengths), rtol=1e-12, atol=1e-12)
    parts = (slice(end - length, end) for end, length in zip(np.cumsum(lengths), lengths, strict=True) if length)
    alone = [solve_in_columns(b[part], a[part], [part.stop - part.start]) for part in parts]
    assert got.tobytes() == np.concatenate(alone).tobytes()
