"""The order of prompts: epochs, resuming, and mixtures of sources, with what their configuration refuses."""

from __future__ import annotations

import dataclasses
import json
import random
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from megarl.config import RunConfig
from megarl.data.sampler import MAX_PERIOD, MixtureOrder, PromptOrder, PromptSampler, SamplerState, load_run_prompts
from megarl.errors import DataError
from tests.data.conftest import Tokenizer
from tests.errors import expect_error
from tests.run.finished_groups import run_config


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
def test_the_row_of_an_ordinal_is_that_of_the_sequence(num_rows: int, seed: int, shuffle: bool, data: Any) -> None:
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


def test_the_order_never_changes() -> None:
    # Resumed runs rely on this order: the list must never change.
    frozen = [6, 3, 5, 0, 7, 2, 1, 4, 3, 1, 0, 4, 5, 6, 7, 2]
    assert PromptSampler(PromptOrder(8, 0, shuffle=True)).take(16) == frozen


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
    with expect_error(DataError, "11", "0", "10", "prompt", "epoch"):
        PromptSampler(PromptOrder(10, 0, shuffle=True)).restore(SamplerState(epoch=0, position=11, seed=0))
    with expect_error(DataError, "0", "least"):
        PromptSampler(PromptOrder(0, 0, shuffle=True))


HF_CONFIG = {"max_position_embeddings": 2048}


@st.composite
def mixtures(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Return integer weights and numbers of rows of some sources."""
    weights = draw(st.lists(st.integers(1, 12), min_size=2, max_size=5))
    return weights, draw(st.lists(st.integers(1, 9), min_size=len(weights), max_size=len(weights)))


def source_of(row: int, sizes: Sequence[int]) -> int:
    """Return the source that has this row of a mixture."""
    return bisect_right(list(accumulate(sizes)), row)


@given(mixture=mixtures(), num=st.integers(1, 400), seed=st.integers(0, 2**40))
def test_after_any_prompt_each_source_is_within_one_of_its_ratio(mixture: Any, num: int, seed: int) -> None:
    weights, sizes = mixture
    padded = [*weights, MAX_PERIOD // 20 - sum(weights)]  # four decimals
    ratios = [20 * weight / MAX_PERIOD for weight in padded]
    sizes = [*sizes, 7]
    order = MixtureOrder(sizes, ratios, seed, shuffle=True)
    counts = Counter[int]()
    for ordinal in range(num):
        counts[source_of(order.row_at(ordinal), sizes)] += 1
        for source, ratio in enumerate(ratios):
            assert abs(counts[source] - ratio * (ordinal + 1)) <= 1 + 1e-9


@given(mixture=mixtures(), seed=st.integers(0, 2**40))
def test_each_epoch_of_a_source_has_every_row_once(mixture: tuple[list[int], list[int]], seed: int) -> None:
    _, sizes = mixture
    ratios = [1 / 4, 3 / 4] if len(sizes) == 2 else [0.2] * (len(sizes) - 1) + [1 - 0.2 * (len(sizes) - 1)]
    order = MixtureOrder(sizes, ratios, seed, shuffle=True)
    rows = [order.row_at(ordinal) for ordinal in range(100)]
    start = 0
    for source, size in enumerate(sizes):
        own = [row - start for row in rows if source_of(row, sizes) == source]
        for begin in range(0, len(own) - size + 1, size):
            assert sorted(own[begin : begin + size]) == list(range(size))
        start += size


def test_a_restored_sampler_of_a_mixture_resumes_exactly() -> None:
    one = PromptSampler(MixtureOrder([5, 11], [0.7, 0.3], 3, shuffle=True))
    one.take(123)
    other = PromptSampler(MixtureOrder([5, 11], [0.7, 0.3], 99, shuffle=True))
    other.restore(one.state())
    assert other.take(50) == one.take(50)


@pytest.fixture
def config(tmp_path: Path) -> Callable[..., RunConfig]:
    """Return a configuration with two sources of 4 and 3 rows, changed by keyword arguments of the second one."""

    def make(*, rollout: dict[str, Any] | None = None, **second: Any) -> RunConfig:
        sources: dict[str, dict[str, Any]] = {}
        for name, num, ratio in (("plus", 4, 0.75), ("minus", 3, 0.25)):
            path = tmp_path / name / "rows.jsonl"
            path.parent.mkdir(exist_ok=True)
            rows = [{"prompt": f"{name} {i}", "question": f"Q {i}", "answer": str(i)} for i in range(num)]
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
            sources[name] = {"path": str(path), "ratio": ratio}
        sources["minus"] |= {"eval_path": sources["minus"]["path"], **second}
        data = {"sources": sources, "shuffle": False, "prompt_template": "<{prompt}>"}
        terms = {"match": {"type": "numeric"}, "form": {"type": "format"}}
        return run_config({}, data=data, rollout=rollout or {}, reward={"terms": terms})

    return make


def test_prompts_have_the_settings_of_their_source(config: Callable[..., RunConfig], tokenizer: Tokenizer) -> None:
    fields = {"prompt": "question"}
    made = config(prompt_template="[{prompt}]", fields=fields, reward_terms=["form"], max_new_tokens=7, eval_size=2)
    prompts = load_run_prompts(made, tokenizer, HF_CONFIG, None)
    taken = [prompts.training[prompts.order.row_at(ordinal)] for ordinal in range(8)]
    assert Counter(prompt.source for prompt in taken) == {"plus": 6, "minus": 2}
    plus, minus = ([prompt for prompt in taken if prompt.source == name] for name in ("plus", "minus"))
    assert [prompt.text for prompt in plus] == [f"<plus {i}>" for i in (0, 1, 2, 3, 0, 1)]
    assert [prompt.text for prompt in minus] == ["[Q 0]", "[Q 1]"]
    assert (plus[0].reward_terms, plus[0].max_new_tokens) == (None, None)
    assert (minus[0].reward_terms, minus[0].max_new_tokens) == (("form",), 7)
    assert [prompt.prompt_id for prompt in prompts.held_out] == ["minus/rows.jsonl:1", "minus/rows.jsonl:2"]
    files = {key: Path(path).parent.name for key, path in made.data.training_files.items()}
    assert files == {"data.sources.plus.path": "plus", "data.sources.minus.path": "minus"}


@pytest.mark.parametrize(
    ("second", "message"),
    [
        ({"ratio": 0.2}, "sources: the ratios need to sum to 1, got 0.75 + 0.2 = 0.95"),
        ({"ratio": 0.25001}, "a ratio has at most four decimals, got 0.25001"),
        ({"reward_terms": ["match", "taste"]}, "data.sources.minus.reward_terms needs names of rules of reward.terms"),
        ({"max_new_tokens": 65}, "data.sources.minus.max_new_tokens needs to be at most rollout.max_new_tokens = 64"),
        ({"reward_terms": []}, "data.sources.minus.reward_terms: needs at least one term, got none"),
    ],
)
def test_bad_sources_are_refused(config: Callable[..., RunConfig], second: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=re.escape(message)):
        config(rollout={"max_new_tokens": 64}, **second)


SOURCE = {"path": "a.jsonl", "ratio": 1}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({}, "needs either path or sources, got neither"),
        ({"path": "a.jsonl", "sources": {"a": SOURCE}}, "either path or sources, got both"),
        ({"eval_path": "b.jsonl", "sources": {"a": SOURCE}}, "eval_path: .* its own, data.sources.NAME.eval_path"),
        ({"sources": {"a/b": SOURCE}}, "sources: a name needs letters, digits, - and _ only"),
    ],
)
def test_bad_data_sections_are_refused(data: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        run_config({}, data=data)
