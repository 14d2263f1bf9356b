"""The API pages name what exists, and all that algorithms call on a run."""

from __future__ import annotations

import ast
import re
from importlib import import_module
from pathlib import Path

import pytest
import yaml

from megarl.algorithms import RLRun

ROOT = Path(__file__).parents[2]
OBJECTS = [
    (page.name, *found)
    for page in sorted((ROOT / "docs/api").glob("*.md"))
    for found in re.findall(r"^::: (\S+)\n((?:    .*\n)*)", page.read_text() + "\n", re.MULTILINE)
]


def run_members(file: Path) -> set[str]:
    """Return the attributes of a name `run` or `self.run` that a module reads."""
    return {
        node.attr
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "run"
    }


@pytest.mark.parametrize(("page", "path", "options"), OBJECTS, ids=[path for _, path, _ in OBJECTS])
def test_the_object_and_its_members_exist(page: str, path: str, options: str) -> None:
    module, _, name = path.rpartition(".")
    found = getattr(import_module(module), name)
    for member in yaml.safe_load(options)["options"].get("members", []):
        assert hasattr(found, member), f"{page}: {path} has no {member}"


def test_everything_that_algorithms_call_on_a_run_is_listed() -> None:
    (options,) = [options for _, path, options in OBJECTS if path == "megarl.algorithms.RLRun"]
    listed = set(yaml.safe_load(options)["options"]["members"])
    modules = [*ROOT.glob("megarl/algorithms/*.py"), *ROOT.glob("examples/custom-algorithm/*.py")]
    called = {name for module in modules for name in run_members(module) if callable(getattr(RLRun, name, None))}
    assert len(called) > 15
    assert called <= listed


def test_every_name_of_the_package_for_algorithms_has_an_entry() -> None:
    documented = {path.rpartition(".")[2] for _, path, _ in OBJECTS}
    assert set(import_module("megarl.algorithms").__all__) <= documented
