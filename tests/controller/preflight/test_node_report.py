"""What a node reports on itself, the addresses that it reaches, and the paths that it has to see."""

from __future__ import annotations

import os
import platform
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

from megarl.config import SftConfig
from megarl.config.run import with_absolute_paths
from megarl.controller.preflight import node_report
from megarl.controller.preflight.cluster_check import required_paths
from megarl.controller.preflight.node_report import (
    SOURCE,
    Address,
    EchoServer,
    Interface,
    ProbeRequest,
    check_readable,
    check_writable,
    collect_facts,
    gloo_interface,
    probe,
    source_hash,
    versions,
)
from tests.run.finished_groups import run_config
from tests.time_limits import HANG_SECONDS


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=HANG_SECONDS)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_versions_are_those_of_the_installed_packages() -> None:
    found = versions()
    assert found["Python"] == platform.python_version()
    assert torch.__version__.startswith(found["torch"])  # PyPI's metadata does not name the build
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
        "import sys; from megarl.controller.preflight.node_report import *; versions(); "
        "collect_facts(ProbeRequest(readable={}, writable={}, token='t')); "
        "print('torch' in sys.modules, 'ray' in sys.modules)"
    )
    assert run_python(code).split() == ["False", "False"]


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


def test_all_paths_of_a_run_are_checked(tmp_path: Path) -> None:
    sections = {
        "model": {"path": "/m"},
        "data": {"path": "/d.jsonl", "eval_path": "/e.jsonl"},
        "run_dir": str(tmp_path / "runs" / "one"),
        "export_dir": str(tmp_path / "export"),
        "reward": {"terms": {"judge": {"type": "model", "path": "/judge"}, "match": {"type": "numeric"}}},
    }
    config = run_config({"type": "ppo", "critic": {"path": "/critic"}, "reference": {"path": "/ref"}}, **sections)
    places = required_paths(with_absolute_paths(config))
    assert places.readable == {
        "data.path": "/d.jsonl",
        "data.eval_path": "/e.jsonl",
        "model.path": "/m",
        "algorithm.critic.path": "/critic",
        "algorithm.reference.path": "/ref",
        "reward.terms.judge.path": "/judge",
    }
    assert places.writable == {"run_dir": str(tmp_path), "export_dir": str(tmp_path)}
    # an export into the run folder is not checked separately
    config = SftConfig.model_validate({"run_dir": str(tmp_path), "model": {"path": "/m"}, "data": {"path": "/d"}})
    places = required_paths(with_absolute_paths(config))
    assert places.writable == {"run_dir": str(tmp_path)}
    assert places.readable == {"data.path": "/d", "model.path": "/m"}


PROGRAM = """
import sys, time
from megarl.controller.preflight.cluster_check import ProbeActor

actor = ProbeActor()
while "torch._C" not in sys.modules:
    time.sleep(0.0001)
print(actor.open_store("127.0.0.1", 300.0))
"""


def test_store_is_opened_while_torch_is_being_imported() -> None:
    assert int(run_python(PROGRAM)) > 0


@pytest.fixture
def server() -> Iterator[EchoServer]:
    server = EchoServer("node a", address="127.0.0.1")
    yield server
    server.close()


def at(port: int, name: str = "node a") -> Address:
    return Address(name=name, host="127.0.0.1", port=port)


def test_a_server_replies_to_all_clients(server: EchoServer) -> None:
    assert probe([at(server.port)] * 200, seconds=HANG_SECONDS) == [None] * 200  # 64 at a time
    assert probe([], seconds=HANG_SECONDS) == []
    assert str(at(7)) == "127.0.0.1:7"
    assert str(Address(name="a", host="fd00::1", port=7)) == "[fd00::1]:7"


def test_the_reason_is_reported_per_address(server: EchoServer) -> None:
    closed = EchoServer("node a", address="127.0.0.1")
    closed.close()
    answers = probe([at(closed.port), at(server.port, "node b"), at(server.port)], seconds=HANG_SECONDS)
    assert answers == ["connection refused", "another host answers at this address", None]
    with socket.create_server(("127.0.0.1", 0)) as silent:
        assert probe([at(silent.getsockname()[1])], seconds=0.2) == ["timed out"]


def test_the_interface_of_gloo_socket_ifname(monkeypatch: pytest.MonkeyPatch) -> None:
    loopback = next(name for name, all_ in psutil.net_if_addrs().items() if "127.0.0.1" in {a.address for a in all_})
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", f"{loopback},eth9")
    assert gloo_interface() == Interface(name=loopback, address="127.0.0.1", is_chosen=True)
    assert gloo_interface().is_loopback
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth9")
    assert gloo_interface() == Interface(name="eth9", address=None, is_chosen=True)
    assert not gloo_interface().is_loopback


@pytest.mark.parametrize(
    ("resolves_to", "want"),
    [(["192.0.2.1", "127.0.0.1"], "127.0.0.1"), (["127.0.0.2"], "127.0.0.2"), ([], "127.0.0.1")],
)
def test_the_interface_of_the_host_name(resolves_to: list[str], want: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """192.0.2.1 is reserved for documentation: no socket can bind to it."""

    def resolve(*_: object, **__: object) -> list[object]:
        if not resolves_to:
            raise socket.gaierror
        return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", (address, 0)) for address in resolves_to]

    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(node_report.socket, "getaddrinfo", resolve)
    found = gloo_interface()
    assert (found.address, found.is_chosen) == (want, False)
