"""The vectorized recurrence against a loop. Shapes: K elements; R chunks of C elements."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.functional.recurrence import CHUNK, column_index, solve_backwards_, to_columns


def by_loop(b: np.ndarray, a: np.ndarray) -> np.ndarray:
    out, behind = np.zeros_like(b), 0.0
    for t in reversed(range(len(b))):
        behind = out[t] = b[t] + a[t] * behind
    return out


def solve_in_columns(b: np.ndarray, a: np.ndarray) -> np.ndarray:
    num = len(b)
    b_CR, a_CR = to_columns(torch.tensor(b)), to_columns(torch.tensor(a))
    place_K = column_index(torch.arange(b_CR.numel()), num)
    a_CR.view(-1)[place_K[num - 1 :]] = 0
    x_CR = solve_backwards_(b_CR, a_CR)
    assert x_CR.data_ptr() == b_CR.data_ptr()
    x_K = x_CR.view(-1)[place_K].numpy()
    # padding: copies of the last element, each with factor 0
    assert (x_K[num:] == b[-1]).all()
    return x_K[:num]


@pytest.mark.parametrize("num", [1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK, 3 * CHUNK + 5])
def test_columns_are_chunks_padded_with_the_last_element(num: int) -> None:
    values_CR = to_columns(torch.arange(num))
    assert values_CR.is_contiguous()
    assert len(values_CR) == CHUNK
    assert values_CR.t().flatten().tolist() == [min(k, num - 1) for k in range(values_CR.numel())]
    assert values_CR.numel() - num < CHUNK
    places = column_index(torch.arange(num), num)
    assert values_CR.flatten()[places].tolist() == list(range(num))


@pytest.mark.parametrize("factor", [0.0, 1e-9, 0.5, 0.95, 1.0])
@pytest.mark.parametrize("num", [1, CHUNK - 1, CHUNK, CHUNK + 1, CHUNK**2, CHUNK**2 + 1, 40_000])
def test_solution_matches_a_loop(num: int, factor: float) -> None:
    b, a = np.random.default_rng(num).normal(size=num), np.full(num, factor)
    np.testing.assert_allclose(solve_in_columns(b, a), by_loop(b, a), rtol=1e-10, atol=1e-10)


@settings(max_examples=40)
@given(st.integers(1, 200), st.floats(0, 1), st.integers(0, 2**32 - 1))
def test_solution_matches_a_loop_with_random_factors(num: int, zeros: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    b, a = rng.normal(size=num), np.where(rng.random(num) < zeros, 0.0, rng.random(num))
    np.testing.assert_allclose(solve_in_columns(b, a), by_loop(b, a), rtol=1e-12, atol=1e-12)
