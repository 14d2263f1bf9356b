"""`megarl doctor`: report and exit code for simulated machines."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from megarl.cli import doctor
from megarl.cli.doctor import OPTIONAL, REQUIRED, diagnose
from megarl.cli.main import main


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Function that simulates GPUs, shared memory and packages (`None`: not installed) on a machine with a compiler."""

    def pretend(gpus: tuple[str, ...] = (), shared: int | None = 2**33, **packages: str | None) -> None:
        real = doctor.package_version
        named = {name.replace("_", "-"): version for name, version in packages.items()}
        monkeypatch.setattr(doctor, "find_local_tiers", lambda: {"bubblewrap": "not installed", "launcher": None})
        monkeypatch.setattr(doctor, "visible_gpu_names", lambda: list(gpus))
        monkeypatch.setattr(doctor, "_find_compiler", lambda: "/usr/bin/cc")
        monkeypatch.setattr(doctor, "free_shared_memory", lambda: shared)
        monkeypatch.setattr(doctor, "package_version", lambda name: named[name] if name in named else real(name))
        monkeypatch.setattr(doctor, "MIN_MEMORY", 1)

    return pretend


def uses() -> dict[str, str]:
    return {choice.what: choice.uses for choice in diagnose().choices}


def test_a_ready_machine(machine: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    machine()
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "ready: try `megarl demo`" in out
    for name in (*REQUIRED, *OPTIONAL):
        assert name in out


def test_json_output(machine: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    machine(torch="9.9.9")
    assert main(["doctor", "--json"]) == 0
    tree = json.loads(capsys.readouterr().out)
    assert set(tree) == {"machine", "packages", "choices", "missing"}
    assert tree["packages"]["torch"] == "9.9.9"
    assert tree["machine"]["GPUs"] == "none"


def test_a_missing_package(machine: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    machine(sglang=None, ray=None)
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "packages sglang, ray: run `make setup`" in out
    assert "not ready" in out


@pytest.mark.parametrize("shared", [None, 64 * 2**20])
def test_not_enough_shared_memory(machine: Callable[..., None], shared: int | None) -> None:
    machine(shared=shared)
    (problem,) = diagnose().missing
    assert problem.startswith("512 MiB of shared memory in /dev/shm, got ")


def test_missing_compiler(machine: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    machine()
    monkeypatch.setattr(doctor, "_find_compiler", lambda: None)
    assert diagnose().missing == ("a C compiler: install gcc or clang, or name one in CC",)


def test_choices_without_a_gpu(machine: Callable[..., None]) -> None:
    # A GPU package on a machine without a GPU changes nothing.
    machine(transformer_engine="2.0", triton="3.0", sglang_kernel="1.0")
    assert uses() == {
        "attention and layers": "megarl's torch layers",
        "optimizer": "torch's AdamW",
        "collectives": "gloo",
        "rollout engine": "SGLang's CPU engine, stand-ins for its GPU packages",
        "kernels": "torch",
        "sandbox for programs": "launcher",
    }


def test_choices_with_a_gpu(machine: Callable[..., None]) -> None:
    machine(gpus=("H200",), transformer_engine="2.0", triton="3.0", sglang_kernel="1.0")
    assert uses() == {
        "attention and layers": "Transformer Engine",
        "optimizer": "Transformer Engine's FusedAdam",
        "collectives": "nccl",
        "rollout engine": "SGLang on CUDA",
        "kernels": "Triton",
        "sandbox for programs": "launcher",
    }
    machine(gpus=("H200",), transformer_engine=None, apex="0.1")
    assert uses()["optimizer"] == "apex's FusedAdam"
    assert uses()["attention and layers"] == "megarl's torch layers"
    machine(gpus=("H200",), triton=None)
    assert uses()["kernels"] == "torch"
    machine(gpus=("H200",), sglang_kernel=None)
    assert uses()["rollout engine"].startswith("SGLang on CUDA, but sglang-kernel is missing")


def test_option_cluster_needs_ray_address(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert main(["doctor", "--cluster"]) == 2
    assert capsys.readouterr().err == (
        "error: --cluster needs the address of a Ray cluster in RAY_ADDRESS; `megarl launch doctor --cluster` starts "
        "one on the nodes of a job\n"
    )


def test_option_config_needs_option_cluster(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--config", "x.yaml"]) == 2
    assert capsys.readouterr().err.startswith("error: --config and --set need --cluster")
