"""The account of rows: counts, samples, quantiles and marks, against brute force."""

import random
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megarl.data.account import QUANTILES, FileAccount, RowContent, RowSample, Segment, measure_lengths, split_by_mask
from megarl.data.rows import Row
from megarl.errors import DataError

FILE = Path("rows.jsonl")


def _row(line: int, **fields: Any) -> Row:
    return Row(FILE, line, fields)


def _read(row: Row) -> RowContent | None:
    if "prompt" not in row.fields:
        raise DataError(f"{row.where}: no prompt")
    if row.fields.get("tie"):
        return None
    return RowContent(row.fields["prompt"], is_text=True)


def _has_answer(row: Row) -> bool:
    return row.fields.get("answer") is not None


def test_counts_are_those_of_brute_force():
    rng = random.Random(3)
    rows = [
        {name: rng.choice(values) for name, values in (
            ("prompt", ["a  b", "a b", " a b\n", "c", "d"]), ("answer", [None, 1, "1", 1.5]), ("tie", [False, True]),
            ("extra", [None, [1], {"x": 1}]),
        ) if rng.random() < 0.9}
        for _ in range(400)
    ]  # fmt: skip
    account = FileAccount("rows.jsonl", _read, _has_answer)
    usable = [account.add(_row(i + 1, **row)) for i, row in enumerate(rows)]
    kept = [row for row in rows if "prompt" in row and not row.get("tie")]
    assert usable == [row in kept for row in rows]
    assert (account.num_rows, account.num_usable, account.num_texts) == (400, len(kept), len(kept))
    assert account.num_answers == sum(row.get("answer") is not None for row in kept)
    without = [i + 1 for i, row in enumerate(rows) if "prompt" not in row]
    ties = [i + 1 for i, row in enumerate(rows) if "prompt" in row and row.get("tie")]
    assert {reason: (left.count, left.example) for reason, left in account.left_out.items()} == {
        "no prompt": (len(without), f"rows.jsonl:{without[0]}"),
        "both answers are rated as equal": (len(ties), f"rows.jsonl:{ties[0]}"),
    }
    names = {str: "text", int: "integer", float: "number", bool: "boolean", list: "list", dict: "object"}
    types = {
        name: Counter(names[type(row[name])] for row in rows if row.get(name) is not None)
        for name in ("prompt", "answer", "tie", "extra")
    }
    assert account.columns == types
    assert (account.used, account.answers) == ({"prompt", "tie"}, {"answer"})
    assert account.rows.find_repeats().count == len(rows) - len({repr(sorted(row.items())) for row in rows})
    prompts = ["".join(row["prompt"].split()) for row in kept]
    assert account.prompts.find_repeats().count == len(prompts) - len(set(prompts))


def test_many_reasons_are_counted_together():
    def refuse(row: Row) -> RowContent:
        raise DataError(f"{row.where}: reason {row.line}")

    account = FileAccount("rows.jsonl", refuse, _has_answer)
    for line in range(1, 101):
        account.add(_row(line))
    assert sum(left.count for left in account.left_out.values()) == 100
    assert len(account.left_out) == 21
    assert account.left_out["other reasons"].example == "rows.jsonl:21"


def test_memory_grows_by_few_bytes_a_row():
    """Nothing of a row is kept but two digests and lines of 12 bytes, whose arrays have room for some rows more."""

    def rows(start: int, end: int) -> Iterator[Row]:
        for i in range(start, end):
            yield _row(i + 1, prompt=f"prompt {i} " * 20, answer=str(i), more=[i])

    account = FileAccount("rows.jsonl", _read, _has_answer, num_first=3, sample_rows=100)
    for row in rows(0, 2000):
        account.add(row)
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for row in rows(2000, 12_000):
            account.add(row)
        after, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # the arrays of the first rows, allocated before, are allocated anew as they grow
    assert after - before < 12_000 * 24 * 1.3 + 200_000
    assert peak - before < 12_000 * 24 * 2 + 200_000


@pytest.mark.parametrize("size", [0, 1, 5, 40])
def test_a_sample_is_uniform_and_in_order(size):
    counts = Counter[int]()
    for seed in range(200):
        sample = RowSample(size, seed)
        for line in range(1, 21):
            sample.add(_row(line))
        lines = [row.line for row in sample]
        assert lines == sorted(set(lines))
        assert len(lines) == min(size, 20)
        counts.update(lines)
    share = min(size, 20) / 20
    # 200 draws of a share: five standard deviations
    assert all(abs(counts[line] - 200 * share) <= 5 * (200 * share * (1 - share)) ** 0.5 for line in range(1, 21))


@pytest.mark.parametrize("num", [1, 2, 3, 99, 100, 101, 1000])
def test_quantiles_are_those_of_numpy(num):
    lengths = np.random.default_rng(num).integers(1, 500, num).tolist()
    found = measure_lengths(lengths, limit=250)
    for name, share in QUANTILES.items():
        assert found.quantiles[name] == np.quantile(lengths, share, method="inverted_cdf")
    assert (found.num_rows, found.num_longer) == (num, sum(length > 250 for length in lengths))


def test_texts_are_cut_where_the_mask_changes(tokenizer):
    ids = tokenizer("12 + 30 = 42 and 7", add_special_tokens=False)["input_ids"]
    for mask in ([False] * len(ids), [i % 3 == 0 for i in range(len(ids))], [i >= 4 for i in range(len(ids))]):
        segments = split_by_mask(tokenizer, ids, mask)
        assert "".join(segment.text for segment in segments) == tokenizer.decode(ids)
        kinds = [segment.is_trained for segment in segments]
        assert kinds == [flag for i, flag in enumerate(mask) if i == 0 or flag != mask[i - 1]]
    split = split_by_mask(tokenizer, ids, [i >= len(ids) - 1 for i in range(len(ids))])
    assert split == [Segment(tokenizer.decode(ids[:-1]), False), Segment(tokenizer.decode(ids[-1:]), True)]
