"""Checks of the Dockerfile that do not need to build the image."""

from __future__ import annotations

import re
import shutil
import subprocess
from fnmatch import fnmatch
from pathlib import Path

import pytest

from tests.packaging.test_requirements import read_pins

ROOT = Path(__file__).parents[2]
DOCKERFILE = ROOT / "launch" / "docker" / "Dockerfile"


def read_instructions() -> list[tuple[str, str]]:
    """Return the instructions in order, as pairs (name, arguments on one line)."""
    lines = [line for line in DOCKERFILE.read_text().splitlines() if not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    return [(word, rest) for word, rest in (line.split(None, 1) for line in joined.splitlines() if line)]


def instructions_of(kind: str) -> list[str]:
    return [rest for word, rest in read_instructions() if word == kind]


def test_all_instructions_are_known():
    known = {"FROM", "ARG", "ENV", "RUN", "COPY", "WORKDIR", "USER", "CMD"}
    assert {word for word, _ in read_instructions()} == known


def test_base_image_is_an_nvidia_pytorch_release():
    (base,) = instructions_of("FROM")
    assert re.fullmatch(r"nvcr\.io/nvidia/pytorch:\d\d\.\d\d-py3", base)


@pytest.mark.parametrize("source", [source for copy in instructions_of("COPY") for source in copy.split()[:-1]])
def test_copied_files_exist_and_are_not_ignored(source: str) -> None:
    listed = subprocess.run(["git", "ls-files", source], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip(f"needs a git checkout that this user may read: {listed.stderr.strip()}")
    tracked = listed.stdout.splitlines()
    assert tracked
    ignored = [line.removeprefix("**/") for line in (ROOT / ".dockerignore").read_text().splitlines()[1:]]
    hidden = {path for path in tracked for part in path.split("/") if any(fnmatch(part, name) for name in ignored)}
    assert hidden == set()


def test_versions_are_pinned_only_in_requirements():
    assert "==" not in "".join(rest for _, rest in read_instructions())
    release = read_pins("gpu.txt")["cuda-toolkit"].rsplit(".", 2)[0]
    assert f"with the same CUDA ({release})" in DOCKERFILE.read_text().replace("\n# ", " ")


def test_python_version_is_supported_by_the_pins():
    named = {version for run in instructions_of("RUN") for version in re.findall(r"PYTHON=python(3\.\d+)", run)}
    assert len(named) == 1
    assert named.pop() in re.findall(r"3\.\d+", (ROOT / "requirements" / "gpu.txt").read_text().split("\n", 1)[0])


@pytest.mark.parametrize("run", instructions_of("RUN"))
def test_run_commands_are_valid_shell(run: str) -> None:
    subprocess.run(["sh", "-n", "-c", run], check=True)


def test_packages_and_megarl_are_installed_in_two_layers(tmp_path: Path) -> None:
    targets = [target for run in instructions_of("RUN") for target in re.findall(r"make ([a-z-]+) PYTHON=", run)]
    plans = [plan_make(target, ROOT, tmp_path) for target in targets]
    assert targets == ["packages-gpu", "setup-gpu"]
    assert ["-r requirements/gpu-build.txt" in each for each in plans] == [True, True]
    assert ["-e ." in each for each in plans] == [False, True]


def test_packages_layer_needs_only_files_copied_before_it(tmp_path: Path) -> None:
    """In the image, packages are built from Makefile and requirements only."""
    names = [word for word, _ in read_instructions()]
    before = [
        rest for word, rest in read_instructions()[: len(names) - names[::-1].index("COPY") - 1] if word == "COPY"
    ]
    assert [copy.split()[0] for copy in before] == ["Makefile", "requirements"]
    for name in ("Makefile", "requirements"):
        (tmp_path / name).symlink_to(ROOT / name)
    assert "-r requirements/gpu.txt" in plan_make("packages-gpu", tmp_path, tmp_path / "venv")


def plan_make(target: str, folder: Path, venv: Path) -> str:
    """Return the commands that make would run in `folder`."""
    if shutil.which("make") is None:
        pytest.skip("needs make")
    make = ["make", "-n", target, f"VENV={venv}"]
    return subprocess.run(make, cwd=folder, capture_output=True, text=True, check=True).stdout
