"""Data files of all suffixes hold the same rows, alone, compressed and in shards; what is refused, with its place."""

from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megarl.data.data_files import find_data_files
from megarl.data.rows import read_rows
from megarl.errors import DataError
from tests.errors import expect_error

ROWS: list[dict[str, Any]] = [
    {"prompt": 'a "quoted", text', "answer": "1"},
    {"prompt": "two\nlines\u2028", "answer": None},
    {"prompt": "é", "answer": "3"},
]


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_bytes("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode())


def write_csv(path: Path, rows: list[dict[str, Any]]) -> None:
    with path.open("w", newline="", encoding="utf-8-sig") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def write_arrow_file(path: Path, rows: list[dict[str, Any]]) -> None:
    table = pa.Table.from_pylist(rows)
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=2)


def write_arrow_stream(path: Path, rows: list[dict[str, Any]]) -> None:
    table = pa.Table.from_pylist(rows)
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=2)


def compress(write: Callable[[Path, list[dict[str, Any]]], None]) -> Callable[[Path, list[dict[str, Any]]], None]:
    def write_compressed(path: Path, rows: list[dict[str, Any]]) -> None:
        write(path, rows)
        path.write_bytes(gzip.compress(path.read_bytes()))

    return write_compressed


WRITERS: list[tuple[str, Callable[[Path, list[dict[str, Any]]], Any]]] = [
    ("rows.jsonl", write_jsonl),
    ("rows.json", write_jsonl),
    ("rows.json", lambda path, rows: path.write_text(json.dumps(rows, indent=1))),
    ("rows.json", lambda path, rows: path.write_text(json.dumps({"version": "1", "data": rows}))),
    ("rows.csv", write_csv),
    ("rows.parquet", lambda path, rows: pq.write_table(pa.Table.from_pylist(rows), path)),
    ("rows.arrow", write_arrow_file),
    ("rows.arrow", write_arrow_stream),
    ("rows.jsonl.gz", compress(write_jsonl)),
    ("rows.json.gz", compress(lambda path, rows: path.write_text(json.dumps(rows)))),
    ("rows.csv.gz", compress(write_csv)),
]


@pytest.mark.parametrize(("name", "write"), WRITERS)
def test_rows_equal_what_was_written(
    tmp_path: Path, name: str, write: Callable[[Path, list[dict[str, Any]]], Any]
) -> None:
    write(tmp_path / name, ROWS)
    assert [dict(row.fields) for row in read_rows(tmp_path / name)] == ROWS


def test_rows_of_csv_have_the_line_that_they_begin_in(tmp_path: Path) -> None:
    write_csv(tmp_path / "rows.csv", ROWS)
    assert [row.line for row in read_rows(tmp_path / "rows.csv")] == [2, 3, 5]


def test_shards_of_a_folder_and_of_a_pattern_are_read_by_their_numbers(tmp_path: Path) -> None:
    for number in (10, 2, 1):
        write_jsonl(tmp_path / f"part-{number}.jsonl", [{"prompt": f"{number}"}])
    for name in ("README.md", ".hidden.jsonl", "dataset_info.json", "_SUCCESS"):
        (tmp_path / name).write_text("{}")
    for path in (tmp_path, tmp_path / "part-*.jsonl"):
        rows = list(read_rows(path))
        assert [row.fields["prompt"] for row in rows] == ["1", "2", "10"]
        assert [row.prompt_id for row in rows] == ["part-1.jsonl:1", "part-2.jsonl:1", "part-10.jsonl:1"]
        assert rows[2].where == f"{tmp_path / 'part-10.jsonl'}:1"


def test_shards_of_one_name_have_different_ids(tmp_path: Path) -> None:
    for folder in ("b", "a"):
        (tmp_path / folder).mkdir()
        write_jsonl(tmp_path / folder / "train.jsonl", [{"prompt": folder}])
    rows = list(read_rows(tmp_path / "*" / "train.jsonl"))
    assert [row.prompt_id for row in rows] == ["a/train.jsonl:1", "b/train.jsonl:1"]


def test_a_name_with_brackets_is_no_pattern(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "rows[1].jsonl", ROWS)
    assert find_data_files(tmp_path / "rows[1].jsonl") == [tmp_path / "rows[1].jsonl"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("rows.csv", b"a,b\n1,2\n3\n", "rows.csv:3: needs 2 fields, as the header has, got 1"),
        ("rows.csv", b"a,a\n1,2\n", "rows.csv:1: the header names column 'a' more than once"),
        ("rows.csv", b"a,b\n1,\xff\n", "rows.csv:2: not valid CSV"),
        ("rows.csv", b'a,b\n1,"x\n', "rows.csv:2: not valid CSV"),
        ("rows.csv", b"a,b\n", "rows.csv: the data file has no rows"),
        ("rows.json", b'[{"a": 1}, 2]', "rows.json:2: needs JSON objects in its list, got int"),
        ("rows.json", b"3", "rows.json: needs a list of JSON objects, got int"),
        ("rows.json", b"[{", "rows.json:1: not valid JSON"),
        ("rows.json", b'[\n{"a": 1},\n{"a": oops}]', "rows.json:3: not valid JSON: Expecting value at column 7"),
        ("rows.json", b"\xef\xbb\xbf \n", "rows.json: the data file has no rows"),
        (
            "rows.json",
            b'{"train": [{"a": 1}], "test": [{"a": 2}]}',
            "rows.json:1: needs one list of rows, got 2: 'train', ",
        ),
        ("rows.jsonl", b'{"a": 1}\n{"a": {"b": 1, "b": 2}}', "rows.jsonl:2: .* the key 'b' more than once"),
        (
            "rows.jsonl",
            gzip.compress(b"{}", mtime=0),
            "rows.jsonl:1: .* compressed with gzip, and needs the suffix .gz",
        ),
        ("rows.json", b'[{"a": "\\ud800"}]', "rows.json:1: field 'a' has an unpaired surrogate"),
        ("rows.arrow", b"ARROW1\0\0", "rows.arrow:1: not readable as Arrow"),
        ("rows.arrow", b"no table", "rows.arrow:1: not readable as Arrow"),
        ("rows.arrow", b"", "rows.arrow:1: not readable as Arrow"),
        ("rows.jsonl.gz", b"no gzip", "rows.jsonl.gz:1: not readable as gzip"),
        (
            "rows.jsonl.gz",
            gzip.compress(b'{"a": 1}\n' * 9, mtime=0)[:-12],
            "rows.jsonl.gz:[0-9]+: not readable as gzip",
        ),
        ("rows.parquet.gz", b"", "rows.parquet.gz: a data file needs the suffix .*, got .gz"),
    ],
)
def test_unreadable_files_are_refused_by_line(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        list(read_rows(tmp_path / name))


MESSAGES = [{"role": "user", "content": "a"}]
TOOLS = [{"type": "function", "function": {"name": "f"}}]


def test_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    table = pa.table([pa.array(["a"]), pa.array(["b"])], names=["prompt", "prompt"])
    pq.write_table(table, tmp_path / "rows.parquet")
    with pa.OSFile(str(tmp_path / "rows.arrow"), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    for name in ("rows.parquet", "rows.arrow"):
        with pytest.raises(DataError, match=f"{name}:1: .* names column 'prompt' more than once"):
            next(read_rows(tmp_path / name))


@pytest.mark.parametrize(
    ("content", "rows"),
    [
        ({"prompt": MESSAGES, "answer": "1"}, None),
        ({"conversations": [{"from": "human", "value": "a"}]}, None),
        ({"prompt": "a", "tools": TOOLS}, None),
        ({"prompt": "a", "answer": ["1", "2"]}, None),
        ({"version": 1, "data": [{"type": "algebra", "prompt": "a"}]}, [{"type": "algebra", "prompt": "a"}]),
    ],
)
def test_an_object_of_json_is_a_row_or_has_one_list_of_rows(tmp_path: Path, content: Any, rows: Any) -> None:
    (tmp_path / "rows.json").write_text(json.dumps(content, indent=1))
    assert [dict(row.fields) for row in read_rows(tmp_path / "rows.json")] == (rows or [content])


def test_paths_without_data_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("text")
    with expect_error(DataError, str(tmp_path), "folder", ".jsonl"):
        read_rows(tmp_path)
    with expect_error(DataError, "x-*.jsonl: ", "pattern"):
        read_rows(tmp_path / "x-*.jsonl")
    write_jsonl(tmp_path / "a.jsonl", ROWS)
    write_csv(tmp_path / "b.csv", ROWS)
    with expect_error(DataError, "suffix", "b.csv (.csv)", "a.jsonl (.jsonl)"):
        read_rows(tmp_path)
