"""The wheel: its content, and the demo in an environment that has nothing else of the checkout."""

import os
import shutil
import sys
import sysconfig
import venv
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

from megarl import __version__
from tests.end_to_end.launched import run_program

ROOT = Path(__file__).parents[2]
SOURCES = ("megarl", "kernels", "megarl_kernels", "yaml", "requirements", "pyproject.toml", "README.md", "LICENSE")


def pip(*arguments: str | Path) -> None:
    done = run_program(sys.executable, "-m", "pip", "--disable-pip-version-check", "-q", *arguments)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel from a copy of the sources: a build writes into their folder, and packs what it finds there."""
    folder = tmp_path_factory.mktemp("wheel")
    ignored = shutil.ignore_patterns("__pycache__")
    for name in SOURCES:
        if (ROOT / name).is_symlink():
            (folder / "source" / name).symlink_to((ROOT / name).readlink())
        elif (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / "source" / name, symlinks=True, ignore=ignored)
        else:
            shutil.copy(ROOT / name, folder / "source" / name)
    pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, folder / "source")
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def files(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_wheel_has_every_file_of_both_packages_and_no_others(files):
    source = {str(path.relative_to(ROOT)): path.read_bytes() for path in (ROOT / "megarl").rglob("*.py")}
    kernels = ROOT / "kernels"
    source |= {str(path.relative_to(kernels)): path.read_bytes() for path in kernels.rglob("*.py")}
    source["megarl/py.typed"] = source["megarl_kernels/py.typed"] = b""
    for folder, pattern in (("yaml", "**/*"), ("requirements", "*.txt")):
        package = {"yaml": "megarl/recipes", "requirements": "megarl/requirements"}[folder]
        for path in (ROOT / folder).glob(pattern):
            if path.is_file():
                source[f"{package}/{path.relative_to(ROOT / folder)}"] = path.read_bytes()
    packed = {name: content for name, content in files.items() if ".dist-info/" not in name}
    assert packed.keys() == source.keys()
    assert packed == source
    assert {"megarl/recipes/demo.yaml", "megarl/recipes/demo-sft.yaml", "megarl/requirements/cpu.txt"} <= packed.keys()
    assert "megarl/engines/sglang/stubs/triton/__init__.py" in packed


def test_wheel_has_command_and_license(files):
    information = f"megarl-{__version__}.dist-info"
    assert b"megarl = megarl.cli.main:main" in files[f"{information}/entry_points.txt"]
    assert files[f"{information}/licenses/LICENSE"] == (ROOT / "LICENSE").read_bytes()


def test_metadata_describes_the_package(files):
    metadata = Parser().parsestr(files[f"megarl-{__version__}.dist-info/METADATA"].decode())
    assert metadata["Name"] == "megarl"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == "<3.14,>=3.12"
    assert metadata.get_all("Provides-Extra") == ["cpu", "gpu"]
    assert str(metadata.get_payload()).startswith("# megarl")


def test_recipes_of_the_checkout_are_those_of_the_package():
    # an editable installation reads the files through these links
    assert (ROOT / "megarl/recipes").resolve() == ROOT / "yaml"
    assert (ROOT / "megarl/requirements").resolve() == ROOT / "requirements"


def test_folder_of_the_kernels_is_no_package():
    assert (ROOT / "megarl_kernels").resolve() == ROOT / "kernels/megarl_kernels"
    assert not (ROOT / "kernels/__init__.py").exists()  # it would shadow Hugging Face's `kernels`


@pytest.mark.slow
def test_demo_runs_from_an_installed_wheel_in_any_folder(wheel, tmp_path):
    environment, elsewhere = tmp_path / "env", tmp_path / "elsewhere"
    venv.create(environment, symlinks=True)
    packages = Path(sysconfig.get_path("purelib", "venv", {"base": environment, "platbase": environment}))
    # the installed dependencies; link files in that folder have no effect here, such as that of an editable megarl
    (packages / "dependencies.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    pip("--python", environment / "bin/python", "install", "--no-deps", "--no-index", wheel)
    elsewhere.mkdir()
    variables = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "RAY_ADDRESS")}
    command = (environment / "bin/megarl", "demo", "--set", "trainer.steps=2")
    done = run_program(*command, cwd=elsewhere, env=variables | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    assert f"2/3  a random Qwen3 model, supervised fine-tuning ({packages}/megarl/recipes/demo-sft.yaml)" in done.stdout
    assert f"3/3  GRPO ({packages}/megarl/recipes/demo.yaml)" in done.stdout
    assert "held-out accuracy" in done.stdout
    assert (elsewhere / "runs/demo/summary.json").is_file()
    assert list(elsewhere.iterdir()) == [elsewhere / "runs"]
