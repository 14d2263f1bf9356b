"""Tests that `make setup-gpu` reports in one line what a machine lacks, before it installs anything."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="needs make")

Setup = Callable[..., subprocess.CompletedProcess[str]]

SUFFICIENT_MACHINE = {
    "python3.11": "echo 3.11",
    "uname": "echo Linux x86_64",
    "getconf": "echo glibc 2.39",
    "c++": ":",
    "git": ":",
    "nvidia-smi": "echo 580.95.05",
}


@pytest.fixture
def setup_gpu(tmp_path: Path) -> Setup:
    """Run the checks of make on a simulated machine; a command that is None does not exist there."""

    def run(*arguments: str, **commands: str | None) -> subprocess.CompletedProcess[str]:
        folder = tmp_path / "bin"
        folder.mkdir()
        for tool in ("sh", "make", "cut", "head", "sort"):
            found = shutil.which(tool)
            assert found is not None
            (folder / tool).symlink_to(found)
        names = {name.replace("_", "-"): body for name, body in commands.items()}
        for name, body in {**SUFFICIENT_MACHINE, **names}.items():
            if body is not None:
                (folder / name).write_text(f"#!/bin/sh\n{body}\n")
                (folder / name).chmod(0o755)
        # variables that make passes to nested makes
        excluded = {"TORCH_CUDA_ARCH_LIST", "PYTHON", "MAKEFLAGS", "MFLAGS", "MAKELEVEL"}
        environment = {name: value for name, value in os.environ.items() if name not in excluded}
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
    ("commands", "message"),
    [
        (
            {"python3.11": None},
            "needs Python 3.11 or 3.12, found no python3.11; set its path: make setup-gpu PYTHON=...",
        ),
        ({"python3.11": "echo 3.14"}, "needs Python 3.11 or 3.12, got 3.14; set its path: make setup-gpu PYTHON=..."),
        ({"uname": "echo Linux aarch64"}, "needs Linux x86_64, got Linux aarch64"),
        (
            {"getconf": "echo glibc 2.28"},
            "needs glibc 2.34 or later for SGLang's wheel (Ubuntu 22.04, RHEL 9), got 2.28",
        ),
        ({"git": None}, "needs git to build Transformer Engine and apex, found none"),
        (
            {"nvidia_smi": None},
            "needs a GPU, but nvidia-smi shows none; on a machine without GPU, such as a login node, name the GPUs to "
            "build for: make setup-gpu TORCH_CUDA_ARCH_LIST=9.0",
        ),
        ({"nvidia_smi": "echo 550.54.15"}, "needs NVIDIA's driver 580 or later for CUDA 13, got 550.54.15"),
    ],
)
def test_missing_requirement_gives_a_one_line_error(
    setup_gpu: Setup, tmp_path: Path, commands: dict[str, str | None], message: str
) -> None:
    done = setup_gpu(**commands)
    first, *rest = done.stderr.splitlines()
    assert first == f"make setup-gpu {message}"
    assert [line for line in rest if "***" not in line] == []  # all other lines are from make itself
    assert done.returncode == 2
    assert not (tmp_path / "venv").exists()


@pytest.mark.parametrize("arguments", [(), ("TORCH_CUDA_ARCH_LIST=9.0",)])
def test_installation_starts_if_nothing_is_missing(setup_gpu: Setup, arguments: tuple[str, ...]) -> None:
    done = setup_gpu(*arguments, nvidia_smi="echo 580.95.05" if not arguments else None)
    assert done.stdout.startswith("[1/5]")


def test_gpu_environment_is_kept_by_other_targets(tmp_path: Path) -> None:
    def plan_make(target: str) -> str:
        make = ["make", "-n", target, f"VENV={tmp_path}"]
        return subprocess.run(make, cwd=ROOT, capture_output=True, text=True, check=True).stdout

    assert "requirements/cpu.txt" in plan_make("test")
    assert "requirements/gpu.txt" not in plan_make("test")
    (tmp_path / ".gpu").touch()  # as `make setup-gpu` does first
    assert "requirements/gpu.txt" in plan_make("test")
    assert "requirements/cpu.txt" not in plan_make("test")
