"""Equal rows and prompts by digests, against brute force on random files."""

import random
from pathlib import Path

import pytest

from megarl.data.account import RowDigests, digest_fields, digest_text
from megarl.data.rows import Row


def _rows(rng: random.Random, num_rows: int, num_kinds: int, shards: int = 1) -> list[Row]:
    """Rows of few kinds, so that many are equal, in `shards` files, with gaps between their lines."""
    rows = []
    for i in range(num_rows):
        kind = rng.randrange(num_kinds)
        fields = {"prompt": f"question {kind // 2}", "answer": str(kind)}
        shard = i * shards // num_rows
        rows.append(Row(Path(f"part-{shard}.jsonl"), 2 * i + 1, fields))
    return rows


def _digests(rows: list[Row]) -> RowDigests:
    digests = RowDigests()
    for row in rows:
        digests.add(row, digest_fields(row.fields))
    return digests


@pytest.mark.parametrize(("num_rows", "num_kinds"), [(1, 1), (2, 1), (40, 7), (40, 10_000), (500, 60)])
@pytest.mark.parametrize("shards", [1, 3])
def test_repeats_are_those_of_brute_force(num_rows, num_kinds, shards):
    rows = _rows(random.Random(num_rows * num_kinds), num_rows, num_kinds, shards)
    found = _digests(rows).find_repeats()
    repeats = [(i, j) for i in range(num_rows) for j in range(i) if rows[i].fields == rows[j].fields]
    assert found.count == len({i for i, _ in repeats})
    assert found.example == ((rows[repeats[0][0]].where, rows[repeats[0][1]].where) if repeats else None)


@pytest.mark.parametrize(("num_rows", "num_kinds"), [(1, 1), (40, 7), (40, 10_000), (300, 400)])
def test_overlap_is_that_of_brute_force(num_rows, num_kinds):
    rng = random.Random(num_rows)
    held_out, training = _rows(rng, num_rows, num_kinds), _rows(rng, 2 * num_rows, num_kinds, shards=2)
    found = _digests(held_out).find_shared(_digests(training))
    equal = [(a.where, b.where) for a in held_out for b in training if a.fields == b.fields]
    assert found.count == len({a for a, _ in equal})
    assert found.example == (equal[0] if equal else None)


def test_empty_files_share_no_rows():
    assert RowDigests().find_repeats().count == RowDigests().find_shared(RowDigests()).count == 0


def test_texts_are_equal_up_to_whitespace():
    assert digest_text(" two\n lines\t") == digest_text("two lines")
    assert len({digest_text(text) for text in ("twolines", "two lines", "Two lines", "", "two lines.")}) == 5


def test_fields_are_equal_in_any_order():
    assert digest_fields({"a": 1, "b": [1, {"c": None}]}) == digest_fields({"b": [1, {"c": None}], "a": 1})
    rows = [{"a": 1}, {"a": 1.5}, {"a": "1"}, {"a": True}, {"a": None}, {}, {"a": [1]}, {"a": b"1"}, {"b": 1}]
    assert len({digest_fields(row) for row in rows}) == len(rows)
