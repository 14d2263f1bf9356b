"""Solved at once in columns, against a loop. Shapes: K elements; R chunks of C elements."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.functional.recurrence import CHUNK, in_columns, place_in_columns, solve_backwards_


def by_loop(b: np.ndarray, a: np.ndarray) -> np.ndarray:
    out, behind = np.zeros_like(b), 0.0
    for t in reversed(range(len(b))):
        behind = out[t] = b[t] + a[t] * behind
    return out


def in_columns_and_back(b: np.ndarray, a: np.ndarray) -> np.ndarray:
    num = len(b)
    b_CR, a_CR = in_columns(torch.tensor(b)), in_columns(torch.tensor(a))
    place_K = place_in_columns(torch.arange(b_CR.numel()), num)
    a_CR.view(-1)[place_K[num - 1 :]] = 0
    x_CR = solve_backwards_(b_CR, a_CR)
    assert x_CR.data_ptr() == b_CR.data_ptr()
    x_K = x_CR.view(-1)[place_K].numpy()
    # what fills up is alone, and the last again
    assert (x_K[num:] == b[-1]).all()
    return x_K[:num]


@pytest.mark.parametrize("num", [1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK, 3 * CHUNK + 5])
def test_columns_are_chunks_filled_up_with_the_last(num: int) -> None:
    values_CR = in_columns(torch.arange(num))
    assert values_CR.is_contiguous()
    assert len(values_CR) == CHUNK
    assert values_CR.t().flatten().tolist() == [min(k, num - 1) for k in range(values_CR.numel())]
    assert values_CR.numel() - num < CHUNK
    places = place_in_columns(torch.arange(num), num)
    assert values_CR.flatten()[places].tolist() == list(range(num))


@pytest.mark.parametrize("factor", [0.0, 1e-9, 0.5, 0.95, 1.0])
@pytest.mark.parametrize("num", [1, CHUNK - 1, CHUNK, CHUNK + 1, CHUNK**2, CHUNK**2 + 1, 40_000])
def test_it_is_the_loop(num: int, factor: float) -> None:
    b, a = np.random.default_rng(num).normal(size=num), np.full(num, factor)
    np.testing.assert_allclose(in_columns_and_back(b, a), by_loop(b, a), rtol=1e-10, atol=1e-10)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 200), st.floats(0, 1), st.integers(0, 2**32 - 1))
def test_it_is_the_loop_with_factors_of_any_kind(num: int, zeros: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    b, a = rng.normal(size=num), np.where(rng.random(num) < zeros, 0.0, rng.random(num))
    np.testing.assert_allclose(in_columns_and_back(b, a), by_loop(b, a), rtol=1e-12, atol=1e-12)
