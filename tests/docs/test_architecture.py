"""docs/architecture.md against the code: files and functions of the main path exist, and every package is listed."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/architecture.md").read_text()


def section(title: str) -> str:
    return PAGE.partition(f"\n## {title}")[2].partition("\n## ")[0]


def rows(title: str) -> list[list[str]]:
    """Cells of the table rows below `title`, without header and rule."""
    lines = [line for line in section(title).splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def definitions(file: Path) -> set[str]:
    """Names of the top-level functions and classes of `file`, and of methods as `Class.method`."""
    names = set()
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            members = (m for m in node.body if isinstance(m, ast.FunctionDef | ast.AsyncFunctionDef))
            names |= {f"{node.name}.{member.name}" for member in members}
    return names


def test_main_path_names_existing_functions() -> None:
    steps = rows("The main path")
    assert len(steps) > 10
    for number, file, function, *_ in steps:
        path, name = ROOT / "megarl" / file.strip("`"), function.strip("`")
        assert path.is_file(), f"step {number}: {file}"
        assert name in definitions(path), f"step {number}: {file} has no {name}"


def test_every_package_is_listed_once() -> None:
    listed = [cells[0].strip("`").rstrip("/") for cells in rows("Packages")]
    modules = (ROOT / "megarl").rglob("*.py")
    packages = {str(m.parent.relative_to(ROOT / "megarl")) for m in modules if m.name != "__init__.py"}
    assert sorted(listed) == sorted(p for p in packages if p != "." and "stubs" not in p)


def test_every_kernel_is_named() -> None:
    modules = {module.name for module in (ROOT / "kernels/megarl_kernels").glob("*.py")}
    assert {name for name in modules - {"__init__.py"} if f"`{name}`" not in section("Kernels")} == set()


def test_layers_are_those_that_import_linter_checks() -> None:
    contracts = (ROOT / "pyproject.toml").read_text()
    (block,) = re.findall(r'name = "imports point down".*?layers = \[(.*?)\]', contracts, re.DOTALL)
    checked = re.findall(r'"([\w| ]+)"', block)
    (drawn,) = re.findall(r"`(cli > [^`]*)`", section("Packages"))
    assert [" ".join(layer.split()) for layer in drawn.split(">")] == checked
