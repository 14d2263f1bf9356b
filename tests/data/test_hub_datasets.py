"""Data files on the hub: what is downloaded, what is recorded, and errors; on a local hub."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megarl.config import SftConfig, dump_config
from megarl.controller.resume import recorded_inputs
from megarl.data.data_files import with_local_data
from megarl.data.rows import read_rows
from megarl.errors import ConfigError
from tests.model_files.fake_hub import FakeHub, hub_of_this_process
from tests.run.finished_groups import run_config

ROWS = [{"question": "1 + 1", "answer": "#### 2"}, {"question": "2 + 2", "answer": "#### 4"}]
SUMS = "hf://datasets/org/sums"
TRAIN = "main/train-00000-of-00001.parquet"


def parquet(rows: list[dict[str, str]]) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(rows), sink)
    return bytes(sink.getvalue())


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeHub]:
    """Serve a hub with the dataset org/sums."""
    with hub_of_this_process(monkeypatch, tmp_path / "cache") as served:
        files = {TRAIN: parquet(ROWS), "main/test-00000-of-00001.parquet": parquet(ROWS[:1]), "README.md": b"text"}
        served.commit("org/sums", files)
        monkeypatch.chdir(tmp_path)
        yield served


def sft(path: str, **data: object) -> SftConfig:
    return SftConfig.model_validate({"run_dir": "run", "model": {"path": "m"}, "data": {"path": path, **data}})


@pytest.mark.parametrize("file", [TRAIN, "main/train-*.parquet"])
def test_rows_of_the_file_are_read(hub: FakeHub, file: str) -> None:
    lines: list[str] = []
    path = f"{SUMS}/{file}"
    config = with_local_data(sft(path), notify=lines.append)
    assert [dict(row.fields) for row in read_rows(config.data.file)] == ROWS
    commit = hub.branches["org/sums", "main"]
    assert config.data.hub_revisions == {"org/sums": commit}
    assert lines == [f"data.path: {path} is commit {commit}, in {config.data.file}"]
    assert hub.downloaded == [TRAIN]
    assert with_local_data(sft(path)) == config
    assert hub.downloaded == [TRAIN]


@pytest.mark.parametrize("file", ["main/*.parquet", "main"])
def test_files_of_a_pattern_or_folder_are_read_in_order(hub: FakeHub, file: str) -> None:
    config = with_local_data(sft(f"{SUMS}/{file}"))
    assert [dict(row.fields) for row in read_rows(config.data.file)] == [ROWS[0], *ROWS]
    assert sorted(hub.downloaded) == ["main/test-00000-of-00001.parquet", TRAIN]


def test_each_source_names_its_files(hub: FakeHub) -> None:
    other = hub.commit("org/other", {"rows.jsonl": b'{"prompt": "a"}\n'}, branch="v2")
    sources = {
        "sums": {"path": f"{SUMS}/{TRAIN}", "eval_path": f"{SUMS}/main/test-*", "ratio": 0.5},
        "other": {"path": "hf://datasets/org/other@v2/rows.jsonl", "ratio": 0.25},
        "local": {"path": "rows.jsonl", "ratio": 0.25},
    }
    config = with_local_data(run_config({}, data={"sources": sources}))
    names = {key: Path(path).name for key, path in (config.data.training_files | config.data.held_out_files).items()}
    assert names == {
        "data.sources.sums.path": "train-00000-of-00001.parquet",
        "data.sources.other.path": "rows.jsonl",
        "data.sources.local.path": "rows.jsonl",
        "data.sources.sums.eval_path": "test-00000-of-00001.parquet",
    }
    assert config.data.sources["local"].path == "rows.jsonl"
    assert config.data.hub_revisions == {"org/sums": hub.branches["org/sums", "main"], "org/other@v2": other}


def test_resumed_run_keeps_its_commit(hub: FakeHub, tmp_path: Path) -> None:
    path = f"{SUMS}/{TRAIN}"
    first = with_local_data(sft(path))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "sft.yaml").write_text(dump_config(first))
    hub.commit("org/sums", {TRAIN: parquet(ROWS[1:])})
    assert with_local_data(sft(path), recorded_inputs(sft(path), "auto").data) == first
    assert with_local_data(sft(path, hub_revisions=first.data.hub_revisions)) == first
    assert [dict(row.fields) for row in read_rows(with_local_data(sft(path)).data.file)] == ROWS[1:]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("hf://org/sums", "a file on the hub is hf://datasets/ORGANIZATION/NAME/FILE or NAME@REVISION, got {path}"),
        ("hf://datasets/org/sums/none.parquet", "{path} needs to match files of the dataset, got none"),
        ("hf://datasets/org/no/a.jsonl", "{path} cannot be loaded from the hub: {hub} has no dataset org/no, or it"),
        ("hf://datasets/org/sums@v9/a.jsonl", "{path} cannot be loaded .*: {hub}/datasets/org/sums has no revision v9"),
    ],
)
def test_error_names_key_and_cause(hub: FakeHub, path: str, message: str) -> None:
    expected = message.format(path=re.escape(path), hub=re.escape(hub.endpoint))
    with pytest.raises(ConfigError, match="^data.path: " + expected):
        with_local_data(sft(path))
