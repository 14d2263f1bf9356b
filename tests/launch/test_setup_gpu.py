"""`make setup-gpu` says in one sentence what a machine lacks, before it installs anything."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

Setup = Callable[..., subprocess.CompletedProcess[str]]

GOOD = {
    "python3.11": "echo 3.11",
    "uname": "echo Linux x86_64",
    "getconf": "echo glibc 2.39",
    "c++": ":",
    "git": ":",
    "nvidia-smi": "echo 580.95.05",
}


@pytest.fixture
def setup_gpu(tmp_path: Path) -> Setup:
    """Runs make's checks on a pretended machine; a command of None is not there."""

    def run(*arguments: str, **commands: str | None) -> subprocess.CompletedProcess[str]:
        folder = tmp_path / "bin"
        folder.mkdir()
        for tool in ("sh", "make", "cut", "head", "sort"):
            found = shutil.which(tool)
            assert found is not None
            (folder / tool).symlink_to(found)
        names = {name.replace("_", "-"): body for name, body in commands.items()}
        for name, body in {**GOOD, **names}.items():
            if body is not None:
                (folder / name).write_text(f"#!/bin/sh\n{body}\n")
                (folder / name).chmod(0o755)
        # make tells the makes below it how it was called
        ours = {"TORCH_CUDA_ARCH_LIST", "MAKEFLAGS", "MFLAGS", "MAKELEVEL"}
        environment = {name: value for name, value in os.environ.items() if name not in ours}
        return subprocess.run(
            [folder / "make", "setup-gpu", f"VENV={tmp_path / 'venv'}", *arguments],
            cwd=ROOT,
            env=environment | {"PATH": str(folder)},
            capture_output=True,
            text=True,
            check=False,
        )

    return run


@pytest.mark.parametrize(
    ("commands", "sentence"),
    [
        ({"python3.11": None}, "needs Python 3.11 or 3.12, found no python3.11; name one: make setup-gpu PYTHON=..."),
        ({"python3.11": "echo 3.14"}, "needs Python 3.11 or 3.12, got 3.14; name one: make setup-gpu PYTHON=..."),
        ({"uname": "echo Linux aarch64"}, "needs Linux x86_64, got Linux aarch64"),
        (
            {"getconf": "echo glibc 2.28"},
            "needs glibc 2.34 or later for SGLang's wheel (Ubuntu 22.04, RHEL 9), got 2.28",
        ),
        ({"git": None}, "needs git to build Transformer Engine and apex, found none"),
        (
            {"nvidia_smi": None},
            "needs a GPU, and nvidia-smi shows none; where there is none, as on a login node, name the GPUs to build "
            "for: make setup-gpu TORCH_CUDA_ARCH_LIST=9.0",
        ),
        ({"nvidia_smi": "echo 550.54.15"}, "needs NVIDIA's driver 580 or later for CUDA 13, got 550.54.15"),
    ],
)
def test_one_sentence(setup_gpu: Setup, tmp_path: Path, commands: dict[str, str | None], sentence: str) -> None:
    done = setup_gpu(**commands)
    first, *rest = done.stderr.splitlines()
    assert first == f"make setup-gpu {sentence}"
    assert [line for line in rest if "***" not in line] == []  # but make's own
    assert done.returncode == 2
    assert not (tmp_path / "venv").exists()


@pytest.mark.parametrize("arguments", [(), ("TORCH_CUDA_ARCH_LIST=9.0",)])
def test_goes_on_where_nothing_is_missing(setup_gpu: Setup, arguments: tuple[str, ...]) -> None:
    done = setup_gpu(*arguments, nvidia_smi="echo 580.95.05" if not arguments else None)
    assert done.stdout.startswith("[1/5]")


def test_an_environment_for_gpus_stays_one(tmp_path: Path) -> None:
    def plan(target: str) -> str:
        make = ["make", "-n", target, f"VENV={tmp_path}"]
        return subprocess.run(make, cwd=ROOT, capture_output=True, text=True, check=True).stdout

    assert "requirements/cpu.txt" in plan("test")
    assert "requirements/gpu.txt" not in plan("test")
    (tmp_path / ".gpu").touch()  # as `make setup-gpu` does first
    assert "requirements/gpu.txt" in plan("test")
    assert "requirements/cpu.txt" not in plan("test")
