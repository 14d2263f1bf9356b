from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megarl.preflight.cluster import node_report
from megarl.preflight.cluster.node_report import (
    SOURCE,
    ProbeRequest,
    check_readable,
    check_writable,
    collect_facts,
    source_hash,
    versions,
)


def test_versions_are_those_of_the_installed_packages() -> None:
    found = versions()
    assert found["Python"] == platform.python_version()
    assert found["torch"] == torch.__version__
    assert found[SOURCE] == versions()[SOURCE]


def test_source_hash_covers_names_and_contents(tmp_path: Path) -> None:
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


def test_collecting_facts_imports_neither_torch_nor_ray() -> None:
    code = (
        "import sys; from megarl.preflight.cluster.node_report import *; versions(); "
        "collect_facts(ProbeRequest(readable={}, writable={}, token='t')); "
        "print('torch' in sys.modules, 'ray' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


def test_facts_of_this_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "=eth7")
    (tmp_path / "token").touch()
    (tmp_path / "data.jsonl").write_text("four")
    readable = {"data.path": str(tmp_path / "data.jsonl"), "model.path": str(tmp_path / "model")}
    facts = collect_facts(ProbeRequest(readable=readable, writable={"run_dir": str(tmp_path)}, token="token"))
    assert facts.nccl == "=eth7"
    assert facts.cores == len(os.sched_getaffinity(0))
    assert facts.memory_bytes > 2**20
    data, model, run_dir = facts.paths
    assert (data.num_bytes, data.trouble) == (4, None)
    assert model.trouble == f"cannot see model.path {tmp_path / 'model'}; is the file system shared?"
    assert run_dir.trouble is None
    assert sorted(p.name for p in tmp_path.iterdir()) == ["data.jsonl", "token"]


def test_model_folders(tmp_path: Path) -> None:
    for name, content in {"model.safetensors": "123", "config.json": "12", "README.md": "1234567"}.items():
        (tmp_path / name).write_text(content)
    assert check_readable("model.path", tmp_path).num_bytes == 5
    snapshot = tmp_path / "hub/models--org--model/snapshots/0123456789abcdef"
    assert check_readable("model.path", snapshot).trouble == (
        f"cannot see model.path {snapshot}; is HF_HOME set to a folder that all nodes share?"
    )


def test_a_folder_that_is_not_the_drivers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_report, "FILE_POLL_SECONDS", 0.01)
    trouble = check_writable("run_dir", tmp_path, "token").trouble
    assert trouble == f"run_dir {tmp_path} is not the driver's folder of that path; is the file system shared?"
    # the marker file may appear late
    monkeypatch.setattr(node_report.time, "sleep", lambda _: (tmp_path / "token").touch())
    assert check_writable("run_dir", tmp_path, "token").trouble is None


def test_a_folder_that_cannot_be_written_is_reported(tmp_path: Path) -> None:
    assert check_writable("run_dir", tmp_path / "none", "token").trouble == (
        f"cannot see run_dir {tmp_path / 'none'}; is the file system shared?"
    )
    full = Path("/proc")  # files cannot be created there
    assert str(check_writable("run_dir", full, "token").trouble).startswith("cannot ")
