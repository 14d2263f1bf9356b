"""Rows of JSONL and Parquet files; token files: validation, chunks, scores, and output renamed once complete."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megarl.data import data_files
from megarl.data.rows import Row, read_rows
from megarl.data.token_file import MAX_REPORTED_LINES, TokenFile, TokenSequence, partial_file
from megarl.errors import ConfigError, DataError
from tests.data.conftest import Jsonl
from tests.errors import expect_error


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
    monkeypatch.setattr(data_files, "BATCH_ROWS", 7)
    rows = [{"prompt": [{"role": "user", "content": f"q{i}"}], "answer": i} for i in range(20)]
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path)
    got = list(read_rows(path))
    assert [dict(r.fields) for r in got] == rows
    assert [r.line for r in got] == list(range(1, 21))


@pytest.mark.parametrize("value", ["a\ud800b", ["x", {"y": "\udfff\ud800"}], {"\udcff": 1}])
def test_rows_with_surrogates_are_refused_by_line(jsonl: Jsonl, value: Any) -> None:
    path = jsonl({"prompt": "\U0001f600 \\ud800"}, {"prompt": "a", "more": value})
    assert r"\ud" in path.read_text()
    rows = read_rows(path)
    assert next(rows).fields["prompt"] == "\U0001f600 \\ud800"
    with expect_error(DataError, "rows.jsonl:2", "'more'", "\\ud800"):
        next(rows)


def test_parquet_rows_with_bytes_that_are_no_text_are_refused_by_line(tmp_path: Path) -> None:
    texts = pa.StringArray.from_buffers(2, pa.py_buffer(np.array([0, 1, 4], np.int32)), pa.py_buffer(b"a\xed\xa0\x80"))
    pq.write_table(pa.table({"prompt": texts}), tmp_path / "rows.parquet")
    with expect_error(DataError, "rows.parquet:2", "Parquet", "utf-8"):
        list(read_rows(tmp_path / "rows.parquet"))


@pytest.mark.parametrize(
    "column",
    [
        pa.array([0, 1], pa.timestamp("ns")),
        pa.array([0, 2**62], pa.timestamp("us")),
        pa.array([0, 10**7], pa.date32()),
        pa.array([0, 1], pa.time64("ns")),
    ],
    ids=lambda column: str(column.type),
)
def test_parquet_values_beyond_pythons_types_are_refused_by_line(tmp_path: Path, column: pa.Array) -> None:
    pq.write_table(pa.table({"prompt": ["a", "b"], "when": column}), tmp_path / "rows.parquet")
    rows = read_rows(tmp_path / "rows.parquet")
    assert next(rows).fields["prompt"] == "a"
    with expect_error(DataError, "rows.parquet:2", "Parquet"):
        next(rows)


def test_columns_of_less_precision_keep_their_decimals(tmp_path: Path) -> None:
    values = [0.1, None, 1e10, -0.0, 3.4028235e38, 1e-45, float("inf")]
    single = pa.array(values, pa.float32())
    table = pa.table({"prompt": ["a"] * len(values), "x": single, "y": pa.array(values, pa.float64())})
    pq.write_table(table, tmp_path / "rows.parquet")
    got = [row.fields for row in read_rows(tmp_path / "rows.parquet")]
    assert [row["x"] for row in got] == values
    assert [row["y"] for row in got] == values
    assert pa.array([row["x"] for row in got], pa.float32()) == single, "the same numbers in float32"


def test_file_names_that_are_not_utf_8_have_plain_ids() -> None:
    assert Row(Path("a\udcff.jsonl"), 3, {}).prompt_id == "a\ufffd.jsonl:3"


def test_a_missing_field_is_reported_with_the_fields_of_the_row(jsonl: Jsonl) -> None:
    row = next(read_rows(jsonl({"question": "a", "answer": "b"})))
    message = r"rows.jsonl:1: field 'prompt' \(data.fields.prompt\) is missing; .* 'question'"
    with pytest.raises(DataError, match=message):
        row.text("prompt", "data.fields.prompt")
    with expect_error(DataError, "rows.jsonl:1", "'n' (data.fields.prompt)"):
        next(read_rows(jsonl({"n": 3}))).text("n", "data.fields.prompt")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("none.jsonl", None, "none.jsonl: no such data file"),
        ("rows.tsv", None, r"rows.tsv: .* \.csv, \.parquet or \.arrow, got \.tsv"),
        ("empty.jsonl", b"\n\n", "empty.jsonl: the data file has no rows"),
        ("rows.jsonl", b'{"a": 1}\n{"prompt": ', "rows.jsonl:2: not valid JSON"),
        ("rows.jsonl", b'{"a": 1}\n["a"]\n{"b": 2}\n', "rows.jsonl:2: needs a JSON object, got list"),
        ("rows.jsonl", b'{"a": 1}\n' + b"[" * 100_000, "rows.jsonl:2: not valid JSON"),
        ("rows.jsonl", b'{"a": 1}\n{"prompt": "\xff"}\n', "rows.jsonl:2: not valid JSON"),
        ("bad.parquet", b"not parquet at all", "bad.parquet:1: not readable as Parquet"),
    ],
)
def test_unusable_files_and_lines_are_reported(tmp_path: Path, name: str, content: bytes | None, message: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        list(read_rows(tmp_path / name))


def test_folders_and_empty_tables_are_reported(tmp_path: Path) -> None:
    (tmp_path / "folder.jsonl").mkdir()
    with expect_error(DataError, "folder.jsonl"):
        read_rows(tmp_path / "folder.jsonl")
    pq.write_table(pa.Table.from_pylist([{"prompt": "a"}]).slice(0, 0), tmp_path / "empty.parquet")
    with expect_error(DataError, "empty.parquet"):
        list(read_rows(tmp_path / "empty.parquet"))


def token_file(path: Path) -> TokenFile:
    return TokenFile(path=path, vocab_size=331, max_positions=8)


def read_chunks(path: Path, *, max_tokens: int = 100, max_lines: int = 100) -> list[list[TokenSequence]]:
    return list(token_file(path).chunks(max_tokens=max_tokens, max_lines=max_lines))


def make_line(n: int, **other_keys: Any) -> TokenSequence:
    return TokenSequence(where="tokens.jsonl:3", token_ids=np.arange(n, dtype=np.int32), other_keys=other_keys)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ('{"token_ids": [1, 2', "not valid JSON at column 20: Expecting ',' delimiter"),
        ("[" * 100_000, "not valid JSON: maximum recursion depth exceeded"),
        ("1" * 5000, "not valid JSON: Exceeds the limit (4300 digits)"),
        ("[1, 2]", "needs a JSON object, got list"),
        ({"id": 7, "ids": [1]}, "needs a list of integers under token_ids, the line has 'id', 'ids'"),
        ({}, "needs a list of integers under token_ids, the line has no keys"),
        ({"token_ids": "1 2"}, "token_ids needs a list of integers, got '1 2'"),
        ({"token_ids": None}, "token_ids needs a list of integers, got None"),
        ({"token_ids": [1, 2.0]}, "token_ids[1] needs to be an integer, got 2.0"),
        ({"token_ids": [True]}, "token_ids[0] needs to be an integer, got True"),
        ({"token_ids": [1, [2]]}, "token_ids[1] needs to be an integer, got [2]"),
        ({"token_ids": []}, "token_ids needs at least one token, got an empty list"),
        ({"token_ids": [1, -1]}, "token_ids[1] needs to be at least 0, got -1"),
        ({"token_ids": [1, 2, 330, 5000]}, "token_ids[3] needs to be below the model's vocab_size = 331, got 5000"),
        ({"token_ids": [331]}, "token_ids[0] needs to be below the model's vocab_size = 331, got 331"),
        ({"token_ids": [1] * 11}, "token_ids has 11 tokens, 3 more than the model's max_position_embeddings = 8"),
    ],
)
def test_bad_lines_are_reported(jsonl: Jsonl, row: Any, message: str) -> None:
    path = jsonl({"token_ids": [1]}, row, name="tokens.jsonl")
    for read in (lambda: token_file(path).check(), lambda: read_chunks(path)):  # the file may change after the check
        with pytest.raises(DataError, match="^" + re.escape(f"{path}:2: {message}")):
            read()


def test_invalid_utf8_is_reported_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "tokens.jsonl"
    path.write_bytes(b'{"token_ids": [1]}\n{"token_ids": [1], "text": "\xff"}\n')
    with expect_error(DataError, "tokens.jsonl:2", "UTF-8", "28"):
        token_file(path).check()


def test_all_bad_lines_are_reported_at_once(jsonl: Jsonl) -> None:
    path = jsonl(*[{"token_ids": [1]}, {"token_ids": []}] * (MAX_REPORTED_LINES + 5))
    with pytest.raises(DataError) as error:
        token_file(path).check()
    shown = str(error.value).splitlines()
    assert shown[0].startswith(f"{path}:2: ")
    assert shown[MAX_REPORTED_LINES - 1].startswith(f"{path}:{2 * MAX_REPORTED_LINES}: ")
    assert shown[MAX_REPORTED_LINES:] == [f"{path}: 5 more bad lines, {MAX_REPORTED_LINES + 5} in total"]


def test_files_without_sequences_are_refused(tmp_path: Path, jsonl: Jsonl) -> None:
    for path, message in (
        (tmp_path / "none.jsonl", "none.jsonl: no such file of token sequences"),
        (tmp_path, "needs a file, which is read twice, got a folder"),
        (Path("/dev/null"), "needs a file, which is read twice, got a stream"),
        (jsonl("", "  "), "the file has no token sequences"),
    ):
        with pytest.raises(DataError, match=message):
            token_file(path).check()


def test_check_counts_lines_and_tokens(jsonl: Jsonl) -> None:
    count = token_file(jsonl("\ufeff" + '{"token_ids": [0, 330]}', "", {"token_ids": [1] * 8})).check()
    assert (count.num_lines, count.num_tokens) == (2, 10)


def test_chunks_keep_the_order_and_respect_their_limits(jsonl: Jsonl) -> None:
    lengths = [3, 2, 4, 8, 1, 1, 1, 1]
    path = jsonl(*({"token_ids": list(range(n)), "id": i} for i, n in enumerate(lengths)))
    by_tokens = read_chunks(path, max_tokens=5)
    assert [[len(each.token_ids) for each in chunk] for chunk in by_tokens] == [[3, 2], [4], [8], [1, 1, 1, 1]]
    by_lines = read_chunks(path, max_lines=3)
    assert [[each.other_keys["id"] for each in chunk] for chunk in by_lines] == [[0, 1, 2], [3, 4, 5], [6, 7]]
    assert by_lines[0][2].token_ids.tolist() == [0, 1, 2, 3]
    assert by_lines[2][1].where == f"{path}:8"


def test_scores_replace_their_keys_and_keep_all_others(jsonl: Jsonl) -> None:
    other_keys = {"id": [1, {"a": None}], "logprobs": "old", "entropy": 3, "text": "\u00e9\ud800"}
    ((read_line,),) = read_chunks(jsonl({"token_ids": [4, 5]} | other_keys))
    one = np.array([-0.5], np.float32)
    written = read_line.to_json_line(one, -one)
    assert "\n" not in written
    assert written.isascii()
    assert json.loads(written) == other_keys | {"logprobs": [-0.5], "entropy": [0.5]}


def test_a_single_token_has_no_scores() -> None:
    nothing = np.zeros(0, np.float32)
    assert make_line(1).to_json_line(nothing, nothing) == '{"logprobs":[],"entropy":[]}'


def test_numbers_survive_the_round_trip() -> None:
    bits = np.random.default_rng(0).integers(0, 2**32, 100_000, dtype=np.uint32)
    values = bits.view(np.float32)
    values = values[np.isfinite(values)]
    written = json.loads(make_line(len(values) + 1).to_json_line(values, values[::-1]))
    assert (np.array([written["logprobs"], written["entropy"]], np.float32) == [values, values[::-1]]).all()
    assert all(type(value) is float for value in written["logprobs"])


@pytest.mark.parametrize("bad", [np.nan, -np.inf])
def test_scores_that_are_not_finite_are_refused(bad: float) -> None:
    good, wrong = np.zeros(3, np.float32), np.array([0, bad, bad], np.float32)
    with pytest.raises(DataError, match=rf"tokens.jsonl:3: the model needs to give a finite entropy\[1\], got {bad}"):
        make_line(4).to_json_line(good, wrong)


def test_output_appears_once_it_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "scores.jsonl"
    path.write_text("old")
    with partial_file(path, source=tmp_path / "tokens.jsonl") as file:
        file.write("new")
        assert path.read_text() == "old"
        assert file.name == f"{path}.partial"
    assert path.read_text() == "new"
    with pytest.raises(UnicodeEncodeError), partial_file(path, source=tmp_path / "tokens.jsonl") as file:
        file.write("\ud800")
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


def test_a_killed_process_leaves_no_output(tmp_path: Path) -> None:
    code = (
        "import os, pathlib; from megarl.data.token_file import partial_file\n"
        "with partial_file(pathlib.Path('scores.jsonl'), source=pathlib.Path('tokens.jsonl')) as file:\n"
        "    file.write('1'); file.flush(); os.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=False).returncode == -9
    assert [path.name for path in tmp_path.iterdir()] == ["scores.jsonl.partial"]


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ("tokens.jsonl", r"tokens.jsonl: cannot be the output, .*tokens.jsonl is the input"),
        ("link.jsonl", r"link.jsonl is the input"),
        ("shard", r"shard: cannot be the output, .*shard.partial is the input"),
        ("folder", r"folder: cannot be the output, .*folder is a folder"),
        ("/dev/null", r"/dev/null: cannot be the output, /dev/null is a device"),
        ("nowhere/scores.jsonl", r"nowhere/scores.jsonl.partial cannot be written: No such file or directory"),
    ],
)
def test_outputs_that_cannot_be_written(tmp_path: Path, output: str, message: str) -> None:
    source = tmp_path / ("shard.partial" if output == "shard" else "tokens.jsonl")
    source.write_text("tokens")
    (tmp_path / "link.jsonl").symlink_to(source)
    (tmp_path / "folder").mkdir()
    with pytest.raises(ConfigError, match=message), partial_file(tmp_path / output, source=source):
        pass
    assert source.read_text() == "tokens"
