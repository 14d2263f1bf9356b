"""Every example: its README names a command for each configuration, configurations load, and modules import."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from megarl.config import STAGES, load_config

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
FOLDERS = sorted(path for path in EXAMPLES.iterdir() if path.is_dir() and path.name != "__pycache__")
CONFIGURATIONS = sorted(EXAMPLES.glob("*/*.yaml"))
MODULES = sorted(path for path in EXAMPLES.glob("**/*.py") if not path.name.startswith("use_"))
"""All but programs for frameworks of others, which are installed in environments of their own."""


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def commands_of(path: Path) -> set[str]:
    """Return the commands that the README beside `path` runs with this configuration, or checks it for."""
    text = (path.parent / "README.md").read_text()
    found = set()
    for name, options in re.findall(rf"megarl (\w+) {re.escape(relative(path))}([^\n`]*)", text):
        stage = re.search(r"--stage (\w+)", options)
        found.add(name if name != "check" else stage[1] if stage else "train")
    return found


@pytest.mark.parametrize("folder", FOLDERS, ids=relative)
def test_a_folder_has_a_readme_and_something_to_run(folder: Path) -> None:
    assert (folder / "README.md").is_file()
    assert [*folder.glob("*.yaml"), *folder.glob("*.py")]
    assert f"]({folder.name}" in (EXAMPLES / "README.md").read_text(), "examples/README.md does not list it"


@pytest.mark.parametrize("path", CONFIGURATIONS, ids=relative)
def test_a_configuration_loads_for_the_command_of_its_readme(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (command,) = re.findall(r"\$schema=\S*/(\w+)\.json$", path.read_text().splitlines()[0])
    assert commands_of(path) == {command}, f"README.md needs `megarl {command} {relative(path)}`"
    monkeypatch.syspath_prepend(path.parent)  # as with the PYTHONPATH of the README
    load_config(STAGES[command], path)


@pytest.mark.parametrize("path", MODULES, ids=relative)
def test_a_module_imports(path: Path) -> None:
    assert runpy.run_path(str(path))["__doc__"]
