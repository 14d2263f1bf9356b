"""The prompt sampler: epochs, resuming, and an order that never changes."""

from __future__ import annotations

import dataclasses
import json
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.data.sampler import PromptOrder, PromptSampler, SamplerState
from megarl.errors import DataError


@given(num_rows=st.integers(1, 40), seed=st.integers(0, 2**40), sizes=st.lists(st.integers(0, 50), max_size=8))
def test_every_epoch_has_every_row_once_whatever_the_batch_sizes(num_rows: int, seed: int, sizes: list[int]) -> None:
    sampler = PromptSampler(PromptOrder(num_rows, seed, shuffle=True))
    stream = [i for n in sizes for i in sampler.take(n)]
    assert len(stream) == sum(sizes)
    for start in range(0, len(stream) - num_rows + 1, num_rows):
        assert sorted(stream[start : start + num_rows]) == list(range(num_rows))
    assert stream == PromptSampler(PromptOrder(num_rows, seed, shuffle=True)).take(len(stream))


@given(num_rows=st.integers(1, 40), before=st.integers(0, 100), after=st.integers(0, 100), shuffle=st.booleans())
def test_a_restored_sampler_resumes_exactly(num_rows: int, before: int, after: int, shuffle: bool) -> None:
    one = PromptSampler(PromptOrder(num_rows, 3, shuffle))
    one.take(before)
    saved = json.dumps(dataclasses.asdict(one.state()))
    other = PromptSampler(PromptOrder(num_rows, 99, shuffle))
    other.take(5)
    other.restore(SamplerState(**json.loads(saved)))
    assert other.take(after) == one.take(after)
    assert other.state() == one.state()


@given(num_rows=st.integers(1, 40), seed=st.integers(0, 2**40), shuffle=st.booleans(), data=st.data())
def test_the_row_of_an_ordinal_is_that_of_the_sequence(
    num_rows: int, seed: int, shuffle: bool, data: st.DataObject
) -> None:
    """In any order of access, epochs back and forth."""
    sequence = PromptSampler(PromptOrder(num_rows, seed, shuffle)).take(201)
    order = PromptOrder(num_rows, seed, shuffle)
    for ordinal in data.draw(st.lists(st.integers(0, 200), max_size=20)):
        assert order.row_at(ordinal) == sequence[ordinal]


def test_state_counts_prompts() -> None:
    sampler = PromptSampler(PromptOrder(10, 0, shuffle=True))
    sampler.take(23)
    assert sampler.state() == SamplerState(epoch=2, position=3, seed=0)
    assert sampler.ordinal == 23
    assert PromptSampler(PromptOrder(10, 0, shuffle=True)).order.row_at(23) == sampler.take(1)[0]


FROZEN = [6, 3, 5, 0, 7, 2, 1, 4, 3, 1, 0, 4, 5, 6, 7, 2]


def test_the_order_never_changes() -> None:
    # Resumed runs rely on this order: the list must never change.
    assert PromptSampler(PromptOrder(8, 0, shuffle=True)).take(16) == FROZEN


def test_the_order_depends_on_seed_and_epoch_but_not_on_global_state() -> None:
    random.seed(1)
    np.random.seed(1)
    before = np.random.get_state()[1].copy()
    a = PromptSampler(PromptOrder(100, 0, shuffle=True)).take(200)
    assert (np.random.get_state()[1] == before).all()
    np.random.seed(2)
    assert PromptSampler(PromptOrder(100, 0, shuffle=True)).take(200) == a
    assert a[:100] != a[100:]
    assert PromptSampler(PromptOrder(100, 1, shuffle=True)).take(200) != a
    assert PromptSampler(PromptOrder(3, 1, shuffle=False)).take(7) == [0, 1, 2, 0, 1, 2, 0]


def test_the_state_of_other_data_is_refused() -> None:
    with pytest.raises(DataError, match=r"is at prompt 11 of epoch 0, but the data has 10 rows"):
        PromptSampler(PromptOrder(10, 0, shuffle=True)).restore(SamplerState(epoch=0, position=11, seed=0))
    with pytest.raises(DataError, match=r"at least one row, got 0"):
        PromptSampler(PromptOrder(0, 0, shuffle=True))
