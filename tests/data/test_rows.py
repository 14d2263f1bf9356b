"""Reading JSONL and Parquet rows, and their errors."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megarl.data import rows as rows_module
from megarl.data.rows import read_rows
from megarl.errors import DataError
from tests.data.conftest import Jsonl


def test_jsonl_rows_keep_their_line_numbers(jsonl: Jsonl) -> None:
    path = jsonl({"prompt": "a"}, "", {"prompt": "b\u2028c"})
    rows = list(read_rows(path))
    assert [(r.line, r.fields) for r in rows] == [(1, {"prompt": "a"}), (3, {"prompt": "b\u2028c"})]
    assert [r.prompt_id for r in rows] == ["rows.jsonl:1", "rows.jsonl:3"]


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ('{"prompt": "a\u2028b"}\n'.encode(), "a\u2028b"),  # no end of a line
        (b'\xef\xbb\xbf{"prompt": "a"}\n', "a"),  # a byte order mark
    ],
)
def test_unusual_characters(tmp_path: Path, content: bytes, text: str) -> None:
    (tmp_path / "rows.jsonl").write_bytes(content)
    assert [dict(row.fields) for row in read_rows(tmp_path / "rows.jsonl")] == [{"prompt": text}]


def test_parquet_rows_equal_what_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows_module, "PARQUET_BATCH_ROWS", 7)
    rows = [{"prompt": [{"role": "user", "content": f"q{i}"}], "answer": i} for i in range(20)]
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path)
    got = list(read_rows(path))
    assert [dict(r.fields) for r in got] == rows
    assert [r.line for r in got] == list(range(1, 21))


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ('{"prompt": ', "rows.jsonl:2: not valid JSON"),
        ('["a"]', "rows.jsonl:2: needs a JSON object, got list"),
        ("[" * 100_000, "rows.jsonl:2: not valid JSON"),
    ],
)
def test_a_bad_line_is_reported(jsonl: Jsonl, bad: str, message: str) -> None:
    path = jsonl({"prompt": "a"}, bad, {"prompt": "b"})
    with pytest.raises(DataError, match=message):
        list(read_rows(path))


def test_a_bad_encoding_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"prompt": "a"}\n{"prompt": "\xff"}\n')
    with pytest.raises(DataError, match=r"rows.jsonl:2: not valid JSON"):
        list(read_rows(path))


def test_a_missing_field_is_reported_with_the_fields_of_the_row(jsonl: Jsonl) -> None:
    row = next(read_rows(jsonl({"question": "a", "answer": "b"})))
    with pytest.raises(
        DataError, match=r"rows.jsonl:1: field 'prompt' \(data.fields.prompt\) is missing; .* 'question'"
    ):
        row.text("prompt", "data.fields.prompt")
    with pytest.raises(DataError, match=r"rows.jsonl:1: field 'n' \(data.fields.prompt\) needs a string, got int"):
        next(read_rows(jsonl({"n": 3}))).text("n", "data.fields.prompt")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("none.jsonl", None, "none.jsonl: no such data file"),
        ("rows.csv", None, r"rows.csv: .* \.jsonl or \.parquet, got \.csv"),
        ("empty.jsonl", b"\n\n", "empty.jsonl: the data file has no rows"),
        ("bad.parquet", b"not parquet at all", "bad.parquet:1: not readable as Parquet"),
    ],
)
def test_unusable_files_are_reported(tmp_path: Path, name: str, content: bytes | None, message: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        list(read_rows(tmp_path / name))


def test_folders_and_empty_tables_are_reported(tmp_path: Path) -> None:
    (tmp_path / "folder.jsonl").mkdir()
    with pytest.raises(DataError, match=r"folder.jsonl: needs a file, got a folder"):
        read_rows(tmp_path / "folder.jsonl")
    pq.write_table(pa.Table.from_pylist([{"prompt": "a"}]).slice(0, 0), tmp_path / "empty.parquet")
    with pytest.raises(DataError, match=r"empty.parquet: the data file has no rows"):
        list(read_rows(tmp_path / "empty.parquet"))
