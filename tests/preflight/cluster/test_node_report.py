from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megarl.preflight.cluster import node_report
from megarl.preflight.cluster.node_report import SOURCE, Question, collect, look_at, source_hash, versions, write_beside


def test_versions_are_those_that_programs_see() -> None:
    found = versions()
    assert found["Python"] == platform.python_version()
    assert found["torch"] == torch.__version__
    assert found[SOURCE] == versions()[SOURCE]


def test_the_hash_is_of_names_and_contents(tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    one, other = tmp_path / "a.py", tmp_path / "below" / "b.py"
    seen = set()
    for first, second in (("x", "y"), ("xy", ""), ("", "xy"), ("x", "z")):
        one.write_text(first)
        other.write_text(second)
        seen.add(source_hash(tmp_path))
    before = source_hash(tmp_path)
    (tmp_path / "notes.txt").write_text("not code")
    assert source_hash(tmp_path) == before
    other.rename(tmp_path / "b.py")
    seen.add(source_hash(tmp_path))
    assert len(seen) == 5


def test_a_node_is_asked_without_torch() -> None:
    asks = (
        "import sys; from megarl.preflight.cluster.node_report import *; versions(); "
        "collect(Question(readable={}, writable={}, token='t')); print('torch' in sys.modules, 'ray' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", asks], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


def test_what_this_node_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "=eth7")
    (tmp_path / "token").touch()
    (tmp_path / "data.jsonl").write_text("four")
    readable = {"data.path": str(tmp_path / "data.jsonl"), "model.path": str(tmp_path / "model")}
    facts = collect(Question(readable=readable, writable={"run_dir": str(tmp_path)}, token="token"))
    assert facts.nccl == "=eth7"
    assert facts.cores == len(os.sched_getaffinity(0))
    assert facts.memory_bytes > 2**20
    data, model, run_dir = facts.paths
    assert (data.num_bytes, data.trouble) == (4, None)
    assert model.trouble == f"cannot see model.path {tmp_path / 'model'}; is the file system shared?"
    assert run_dir.trouble is None
    assert sorted(p.name for p in tmp_path.iterdir()) == ["data.jsonl", "token"]


def test_of_a_model_its_weights_and_descriptions_count(tmp_path: Path) -> None:
    for name, content in {"model.safetensors": "123", "config.json": "12", "README.md": "1234567"}.items():
        (tmp_path / name).write_text(content)
    assert look_at("model.path", tmp_path).num_bytes == 5


def test_a_folder_that_is_not_the_asking_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_report, "LOOK_SECONDS", 0.01)
    trouble = write_beside("run_dir", tmp_path, "token").trouble
    assert trouble == f"run_dir {tmp_path} is another folder than the asking node's; is the file system shared?"


def test_a_file_that_shows_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_report.time, "sleep", lambda _: (tmp_path / "token").touch())
    assert write_beside("run_dir", tmp_path, "token").trouble is None


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    assert write_beside("run_dir", tmp_path / "none", "token").trouble == (
        f"cannot see run_dir {tmp_path / 'none'}; is the file system shared?"
    )
    full = Path("/proc")  # nobody can make files there
    assert str(write_beside("run_dir", full, "token").trouble).startswith("cannot ")
