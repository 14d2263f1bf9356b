"""`make setup` finds a Python that works; it and `make setup-gpu` report in one line what a machine lacks."""

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
    "uname": "echo Linux x86_64",
    "getconf": "echo glibc 2.39",
    "c++": ":",
    "git": ":",
    "nvidia-smi": "echo 580.95.05",
}


FAKE_PYTHON = """#!/bin/sh
case "$1 $2" in
  *ensurepip*) exit {unfit} ;;
  *python_version*) echo {version} ;;
  "-m venv") shift 2; if [ "$1" = --clear ]; then shift; rm -r "$1"; fi; mkdir -p "$1/bin"; cp "$0" "$1/bin/python" ;;
esac
"""


def write_python(file: Path, version: str, *, fits: bool = True) -> None:
    """Write a program that answers as a Python of this version does."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(FAKE_PYTHON.format(version=version, unfit=int(not fits)))
    file.chmod(0o755)


def link_tools(folder: Path, *tools: str) -> None:
    for tool in tools:
        found = shutil.which(tool)
        assert found is not None
        (folder / tool).symlink_to(found)


@pytest.fixture
def setup_gpu(tmp_path: Path) -> Setup:
    """Run the checks of make on a simulated machine; a command that is None does not exist there."""

    def run(*arguments: str, **commands: str | None) -> subprocess.CompletedProcess[str]:
        folder = tmp_path / "bin"
        folder.mkdir()
        link_tools(folder, "sh", "make", "cut", "head", "sort", "mkdir", "cp", "rm")
        names = {name.replace("_", "-"): body for name, body in commands.items()}
        write_python(folder / "python3.12", "3.12.4")
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


BROKEN = "#!/bin/sh\nexit 127\n"
"""What a shim of pyenv does for a version that is installed and not selected."""

FoundPython = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def create_venv(tmp_path: Path) -> FoundPython:
    """Run create-venv.sh where these Pythons are: version by path, None for one that cannot create environments."""

    def run(pythons: dict[str, str | None], *arguments: str) -> subprocess.CompletedProcess[str]:
        machine = tmp_path / "machine"
        (machine / "bin").mkdir(parents=True)
        link_tools(machine / "bin", "sh", "sort", "cut", "mkdir", "cp", "rm")
        for path, version in pythons.items():
            write_python(machine / path, version or "3.12.3", fits=version is not None)
        (machine / "bin/python3.12").exists() or (machine / "bin/python3.12").write_text(BROKEN)
        (machine / "bin/python3.12").chmod(0o755)
        command = [ROOT / "requirements/create-venv.sh", tmp_path / "venv", *arguments]
        environment = {"PATH": str(machine / "bin"), "HOME": str(tmp_path), "PYENV_ROOT": str(machine / "pyenv")}
        return subprocess.run(command, env=environment, cwd=machine, capture_output=True, text=True, check=False)

    return run


@pytest.mark.parametrize(
    ("pythons", "version"),
    [
        ({"bin/python3.12": "3.12.4", "bin/python3.13": "3.13.1"}, "3.12.4"),
        ({"pyenv/versions/3.12.9/bin/python": "3.12.9", "pyenv/versions/3.12.10/bin/python": "3.12.10"}, "3.12.10"),
        ({"bin/python3.12": None, "bin/python3.13": "3.13.1", "bin/python3": "3.12.2"}, "3.13.1"),
        ({"pyenv/versions/3.13.0/bin/python": "3.13.0", "bin/python3": None}, "3.13.0"),
        ({"bin/python3": "3.12.2"}, "3.12.2"),
    ],
)
def test_first_python_that_runs_is_taken(
    create_venv: FoundPython, tmp_path: Path, pythons: dict[str, str | None], version: str
) -> None:
    assert create_venv(pythons).stdout == f"{tmp_path / 'venv'}, with Python {version}\n"


@pytest.mark.parametrize(
    ("pythons", "arguments", "message"),
    [
        ({"bin/python3": None}, (), "found no Python 3.12 or 3.13 with the modules venv and ensurepip: install one "),
        (
            {"bin/python3": "3.12.2", "old": None},
            ("./old",),
            "PYTHON=./old must be Python 3.12 or 3.13 with the modules venv and ensurepip; it is Python 3.12.3",
        ),
        (
            {"bin/python3": "3.12.2"},
            ("/missing",),
            "PYTHON=/missing must be Python 3.12 or 3.13 with the modules venv and ensurepip; it does not run",
        ),
    ],
)
def test_no_other_python_is_taken_for_one_that_does_not_fit(
    create_venv: FoundPython, tmp_path: Path, pythons: dict[str, str | None], arguments: tuple[str, ...], message: str
) -> None:
    done = create_venv(pythons, *arguments)
    assert done.returncode == 1
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith(message)
    assert not (tmp_path / "venv").exists()


@pytest.mark.parametrize(("before", "is_kept"), [("3.12.1", True), ("3.11.7", False), (None, False)])
def test_environment_of_another_version_is_replaced(
    create_venv: FoundPython, tmp_path: Path, before: str | None, is_kept: bool
) -> None:
    write_python(tmp_path / "venv/bin/python", before or "")
    (tmp_path / "venv/package").touch()
    assert create_venv({"bin/python3.12": "3.12.4"}).returncode == 0
    assert (tmp_path / "venv/package").exists() == is_kept


def test_gpu_environment_is_kept_by_other_targets(tmp_path: Path) -> None:
    def plan_make(target: str) -> str:
        make = ["make", "-n", target, f"VENV={tmp_path}"]
        return subprocess.run(make, cwd=ROOT, capture_output=True, text=True, check=True).stdout

    assert "requirements/cpu.txt" in plan_make("test")
    assert "requirements/gpu.txt" not in plan_make("test")
    (tmp_path / ".gpu").touch()  # as `make setup-gpu` does first
    assert "requirements/gpu.txt" in plan_make("test")
    assert "requirements/cpu.txt" not in plan_make("test")
