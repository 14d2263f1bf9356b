"""Stored prompts equal those that were stored, take a few bytes of memory each, and leave no file."""

from __future__ import annotations

import datetime
import gc
import tracemalloc
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path

import pytest

from megarl.batch.trajectory import Prompt
from megarl.data.stored_prompts import StoredPrompts
from megarl.errors import DataError


def make_prompts(count: int, num_tokens: int = 5) -> Iterator[Prompt]:
    """Yield prompts whose rows have values of JSON and of Parquet."""
    for i in range(count):
        row = {
            "question": f"how many? {i} \ud800",
            "nested": [{"a": None, "b": 1e-300}, float("inf"), 2**70],
            "date": datetime.datetime(2024, 1, 1, tzinfo=datetime.UTC),
            "price": Decimal("1.10"),
            "image": b"\x00\xff",
        }
        tokens = tuple(range(i, i + num_tokens))
        name, answer = f"d.parquet:{i + 1}", str(i) if i else None
        yield Prompt(prompt_id=name, text=f"how many? {i}", token_ids=tokens, row=row, answer=answer)


def test_prompts_are_returned_as_stored_in_any_order(tmp_path: Path) -> None:
    prompts, stored = list(make_prompts(50)), StoredPrompts.store(make_prompts(50), tmp_path / "new")
    assert len(stored) == 50
    assert list(stored) == prompts
    assert [stored[i] for i in (49, 0, -1, 7, 7)] == [prompts[i] for i in (49, 0, -1, 7, 7)]
    part = stored[10:20][2:]
    assert (list(part), len(part)) == (prompts[12:20], 8)
    with pytest.raises(IndexError):
        stored[50]
    assert list((tmp_path / "new").iterdir()) == []
    assert list(StoredPrompts.store([])) == []


def test_memory_of_a_prompt_is_below_its_budget() -> None:
    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        stored = StoredPrompts.store(make_prompts(2000, num_tokens=50))
        gc.collect()
        growth = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert growth / len(stored) < 100  # a buffer of the file included; the tokens alone would take 400


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"file/run: tokenized prompts cannot be stored: Not a directory"):
        StoredPrompts.store(make_prompts(1), tmp_path / "file" / "run")
