"""The public names of megarl, and that README, docs and examples use nothing deeper."""

from __future__ import annotations

import ast
import doctest
import inspect
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

import megarl
from megarl import rl
from megarl.config.section import Section
from tests.errors import expect_error

ROOT = Path(__file__).parents[1]

DOORS = ("agents", "engines", "environments", "functional", "models", "rewards", "rl")

CODE_BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)


def test_import_of_megarl_imports_nothing_heavy() -> None:
    code = "import json, sys, megarl; print(json.dumps([*sys.modules]))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    found = {name.partition(".")[0] for name in json.loads(done.stdout)}
    assert found.isdisjoint({"torch", "ray", "numpy", "pydantic", "transformers", "sglang"})


@pytest.mark.parametrize("door", ["", *DOORS])
def test_every_public_name_exists_in_a_new_process(door: str) -> None:
    """In a new process, where no other test has imported the modules that the names are in."""
    where = "megarl" + (f".{door}" if door else "")
    code = f"import megarl; print([name for name in {where}.__all__ if getattr({where}, name, None) is None])"
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_doors_are_public_names() -> None:
    assert {*DOORS} <= {*megarl.__all__}
    with expect_error(AttributeError, "'megarl'", "'algoritms'"):
        megarl.algoritms  # type: ignore[attr-defined]  # noqa: B018


@pytest.mark.parametrize(
    "door", ["megarl", "engines", "rollout.agents", "rollout.environments", "reward", "megatron.families"]
)
def test_names_for_type_checkers_are_those_that_are_imported(door: str) -> None:
    """Which a package writes twice: for type checkers, and by module for the import at the first use."""
    package = import_module("megarl" if door == "megarl" else f"megarl.{door}")
    tree = ast.parse(Path(str(package.__file__)).read_text())
    (checked,) = [node for node in tree.body if isinstance(node, ast.If)]
    imports = [node for node in checked.body if isinstance(node, ast.ImportFrom)]
    imported = {(alias.asname, node.module, alias.name) for node in imports for alias in node.names}
    assert {name for name, _, _ in imported} == {*package.__all__}
    for shown, module, name in imported:
        expected = import_module(module or "")
        same = getattr(expected, name) if hasattr(expected, name) else import_module(f"{module}.{name}")
        assert getattr(package, str(shown)) is same


def public_objects() -> Iterator[tuple[str, Any]]:
    """Yield the classes and functions of all public names but sections, which describe each of their fields."""
    for door in DOORS:
        module = getattr(megarl, door)
        for name in module.__all__:
            found = getattr(module, name)
            if inspect.isfunction(found) or (inspect.isclass(found) and not issubclass(found, Section)):
                yield f"{door}.{name}", found


def test_every_docstring_has_an_example():
    """An interactive session, or an indented block of code."""
    without = [
        name
        for name, found in public_objects()
        if not re.search(
            r"\n\n    \S|^Examples:$", inspect.cleandoc(found.__doc__ or "").partition("\nArgs:")[0], re.MULTILINE
        )
    ]
    assert without == []


@pytest.mark.parametrize("name", sorted({name for name, found in public_objects() if ">>> " in (found.__doc__ or "")}))
def test_examples_give_what_they_show(name: str) -> None:
    found = dict(public_objects())[name]
    namespace = {
        **vars(import_module(found.__module__)),
        "torch": torch,
        **{each: getattr(rl, each) for each in rl.__all__},
    }
    example = doctest.DocTestParser().get_doctest(found.__doc__, namespace, name, None, None)
    assert example.examples
    assert not doctest.DocTestRunner().run(example).failed


def test_readme_docs_and_examples_import_public_names_only() -> None:
    guides = [ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("examples/**/*.md")]
    blocks = [(path, code) for path in guides for code in CODE_BLOCK.findall(path.read_text())]
    blocks += [(path, path.read_text()) for path in ROOT.glob("examples/**/*.py")]
    lines = [f"{path.name}: {line}" for path, code in blocks for line in code.splitlines()]
    assert [line for line in lines if re.search(r": *(from|import) megarl\.", line)] == []
