"""What can be told of the image without building it."""

from __future__ import annotations

import re
import subprocess
from fnmatch import fnmatch
from pathlib import Path

import pytest

from tests.launch.test_requirements import pins

ROOT = Path(__file__).parents[2]
DOCKERFILE = ROOT / "launch" / "docker" / "Dockerfile"


def instructions() -> list[tuple[str, str]]:
    """(`RUN`, its text on one line), in order."""
    lines = [line for line in DOCKERFILE.read_text().splitlines() if not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    return [(word, rest) for word, rest in (line.split(None, 1) for line in joined.splitlines() if line)]


def of(kind: str) -> list[str]:
    return [rest for word, rest in instructions() if word == kind]


def test_every_instruction_is_docker_s():
    known = {"FROM", "ARG", "ENV", "RUN", "COPY", "WORKDIR", "USER", "CMD"}
    assert {word for word, _ in instructions()} == known


def test_the_base_is_a_release_of_nvidia_s_image():
    (base,) = of("FROM")
    assert re.fullmatch(r"nvcr\.io/nvidia/pytorch:\d\d\.\d\d-py3", base)


@pytest.mark.parametrize("source", [source for copy in of("COPY") for source in copy.split()[:-1]])
def test_what_is_copied_is_there(source: str) -> None:
    tracked = subprocess.run(
        ["git", "ls-files", source], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert tracked
    ignored = [line.removeprefix("**/") for line in (ROOT / ".dockerignore").read_text().splitlines()[1:]]
    hidden = {path for path in tracked for part in path.split("/") if any(fnmatch(part, name) for name in ignored)}
    assert hidden == set()


def test_versions_stand_in_requirements_alone():
    assert "==" not in "".join(rest for _, rest in instructions())
    release = pins("gpu.txt")["cuda-toolkit"].rsplit(".", 2)[0]
    assert f"with the same CUDA ({release})" in DOCKERFILE.read_text().replace("\n# ", " ")


def test_python_is_one_that_the_pins_are_for():
    named = {version for run in of("RUN") for version in re.findall(r"PYTHON=python(3\.\d+)", run)}
    assert len(named) == 1
    assert named.pop() in re.findall(r"3\.\d+", (ROOT / "requirements" / "gpu.txt").read_text().split("\n", 1)[0])


@pytest.mark.parametrize("run", of("RUN"))
def test_commands_are_shell(run: str) -> None:
    subprocess.run(["sh", "-n", "-c", run], check=True)


def test_packages_and_megarl_are_made_in_two_layers(tmp_path: Path) -> None:
    targets = [target for run in of("RUN") for target in re.findall(r"make ([a-z-]+) PYTHON=", run)]
    plans = [plan(target, ROOT, tmp_path) for target in targets]
    assert targets == ["packages-gpu", "setup-gpu"]
    assert ["-r requirements/gpu-build.txt" in each for each in plans] == [True, True]
    assert ["-e ." in each for each in plans] == [False, True]


def test_packages_need_nothing_that_is_copied_after_them(tmp_path: Path) -> None:
    """In the image they are built from Makefile and requirements alone."""
    names = [word for word, _ in instructions()]
    before = [rest for word, rest in instructions()[: len(names) - names[::-1].index("COPY") - 1] if word == "COPY"]
    assert [copy.split()[0] for copy in before] == ["Makefile", "requirements"]
    for name in ("Makefile", "requirements"):
        (tmp_path / name).symlink_to(ROOT / name)
    assert "-r requirements/gpu.txt" in plan("packages-gpu", tmp_path, tmp_path / "venv")


def plan(target: str, folder: Path, venv: Path) -> str:
    """What make would run in `folder`."""
    make = ["make", "-n", target, f"VENV={venv}"]
    return subprocess.run(make, cwd=folder, capture_output=True, text=True, check=True).stdout
