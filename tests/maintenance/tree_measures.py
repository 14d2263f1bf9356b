"""Measures of the source tree, each with a limit; `make measures` fails where a figure is above its limit.

The limits are the figures of today: the tree may get better, not worse. Lower a limit when its figure falls.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).parents[2]

LIMITS = {
    "packages with too many files": 0,
    "base names that occur more than once": 4,
    "docstrings of at most three words": 1,
    "broad excepts": 23,
    "words to avoid": 0,
    "functions of more than 80 lines": 0,
    "unexpected names": 0,
    "reaches into private names by tests": 57,
}
"""Places found at most, by measure."""

SIZE_LIMITS = {"Python files of megarl": 383, "lines of the weight sync": 11_934}
"""Figures of the tree without places."""

WEIGHT_SYNC = (
    "megarl/reshard/",
    "megarl/run/sync/",
    "megarl/engines/sglang/weight_layout/",
    "megarl/engines/sglang/weight_update/",
)
"""Packages of the weight sync, on the side of trainer, controller and engines."""

FILES_PER_PACKAGE = 15
"""Modules of a package, without `__init__`."""

FILES_PER_CATALOG = 30
"""The same for packages that are lists of equals, `CATALOGS`."""

CATALOGS = {"megarl/config", "megarl/megatron/families"}

LINES_PER_FUNCTION = 80

WORDS = re.compile(
    r"\b(anew|vigil|berth|diary|ballot|knock|freest|stands still|whole of|came up|goes on|go on|gives up|given up)\b",
    re.IGNORECASE,
)
"""Words for which the field has others: again, monitor, slot, trace, vote, probe, least loaded, hangs, continues ..."""

ROOT_NAMES = frozenset(
    {
        *(".ci", ".dockerignore", ".gitattributes", ".github", ".gitignore", ".pre-commit-config.yaml"),
        *(
            "CHANGELOG.md",
            "CITATION.cff",
            "CONTRIBUTING.md",
            "LICENSE",
            "SECURITY.md",
            "Makefile",
            "README.md",
            "mkdocs.yml",
        ),
        *("benchmarks", "docs", "examples", "kernels", "launch", "megarl", "megarl_kernels", "requirements"),
        *("pyproject.toml", "setup.py", "tests", "yaml"),
    }
)
"""All that is tracked at the root."""

PRODUCT = ("megarl/", "kernels/", "examples/")

SOURCES = ("megarl/", "kernels/", "benchmarks/", "examples/", "launch/", "docs/", "README.md", "CONTRIBUTING.md")
"""Where words are looked for."""


def tracked_files() -> list[str]:
    """Return the paths that git tracks or would track, from the root, without those deleted.

    Raises:
        subprocess.CalledProcessError: this is no git checkout.
    """
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return sorted({name for name in listed.split("\0") if name and (ROOT / name).exists()})


def measure(files: list[str]) -> dict[str, list[str]]:
    """Return the places that each measure of `LIMITS` finds, as `path:line: what`."""
    found: dict[str, list[str]] = {name: [] for name in LIMITS}
    modules = [f for f in files if f.startswith("megarl/") and f.endswith(".py") and "/stubs/" not in f]
    found["packages with too many files"] = list(_large_packages(modules))
    found["base names that occur more than once"] = list(_equal_names(modules))
    found["unexpected names"] = list(_unexpected_names(files))
    for file in files:
        if (
            file.startswith(SOURCES)
            and not (ROOT / file).is_symlink()
            and file.endswith((".py", ".md", ".sh", ".sbatch"))
        ):
            text = (ROOT / file).read_text()
            for number, line in enumerate(text.splitlines(), 1):
                found["words to avoid"] += [f"{file}:{number}: {match[0]}" for match in WORDS.finditer(line)]
    for file in modules:
        for name, line, what in _measure_module(ast.parse((ROOT / file).read_text())):
            found[name].append(f"{file}:{line}: {what}")
    found["reaches into private names by tests"] = list(_private_reaches(files))
    return found


def sizes(files: list[str]) -> dict[str, int]:
    """Return the figure of each measure of `SIZE_LIMITS`."""
    modules = [f for f in files if f.startswith("megarl/") and f.endswith(".py")]
    lines = sum(len((ROOT / f).read_text().splitlines()) for f in modules if f.startswith(WEIGHT_SYNC))
    return dict(zip(SIZE_LIMITS, (len(modules), lines), strict=True))


PRIVATE = re.compile(r"_[a-zA-Z]\w*")
"""Names with one leading underscore."""


def _private_reaches(files: list[str]) -> Iterator[str]:
    """Yield where tests import, read or replace names that the product defines with a leading underscore.

    A test's own `self._name`, and private names of other packages, do not count.
    """
    defined: set[str] = set()
    for file in files:
        if file.endswith(".py") and file.startswith(PRODUCT) and "/stubs/" not in file:
            defined |= set(filter(PRIVATE.fullmatch, _defined_names(ast.parse((ROOT / file).read_text()))))
    for file in files:
        if file.endswith(".py") and file.startswith("tests/"):
            for line, name in _reached_names(ast.parse((ROOT / file).read_text())):
                if name in defined:
                    yield f"{file}:{line}: {name}"


def _defined_names(module: ast.Module) -> Iterator[str]:
    for node in ast.walk(module):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


def _reached_names(module: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield line and name of each attribute, imported name, and name that a string argument gives."""
    for node in ast.walk(module):
        if isinstance(node, ast.Attribute) and not (isinstance(node.value, ast.Name) and node.value.id == "self"):
            yield node.lineno, node.attr
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("megarl"):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.Call):  # such as `monkeypatch.setattr(module, "_name", value)`
            strings = [arg.value for arg in node.args[:2] if isinstance(arg, ast.Constant)]
            yield from ((node.lineno, text.rpartition(".")[2]) for text in strings if isinstance(text, str))


def _large_packages(modules: list[str]) -> Iterator[str]:
    names = defaultdict(list)
    for module in map(PurePosixPath, modules):
        if module.name != "__init__.py":
            names[str(module.parent)].append(module.name)
    for package, members in names.items():
        most = FILES_PER_CATALOG if package in CATALOGS else FILES_PER_PACKAGE
        if len(members) > most:
            yield f"{package}: {len(members)} files, at most {most}"


def _equal_names(modules: list[str]) -> Iterator[str]:
    counts = Counter(PurePosixPath(module).name for module in modules)
    for name, count in counts.items():
        if count > 1 and not name.startswith("__"):
            yield f"{name}: {count} files"


def _unexpected_names(files: list[str]) -> Iterator[str]:
    for name in sorted({PurePosixPath(file).parts[0] for file in files} - ROOT_NAMES):
        yield f"{name}: not among the names of the root"
    for file in files:
        if any(part.startswith("-") for part in PurePosixPath(file).parts):
            yield f"{file}: begins with -"


def _measure_module(module: ast.Module) -> Iterator[tuple[str, int, str]]:
    """Yield measure, line and description of what a module has too little or too much of."""
    for node in ast.walk(module):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            docstring = ast.get_docstring(node)
            if docstring is not None and len(docstring.split()) <= 3:
                yield "docstrings of at most three words", getattr(node, "lineno", 1), docstring
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > LINES_PER_FUNCTION:
                yield "functions of more than 80 lines", node.lineno, f"{node.name}: {lines} lines"
        if isinstance(node, ast.ExceptHandler) and _is_broad(node.type):
            yield "broad excepts", node.lineno, "except of any exception"


def _is_broad(caught: ast.expr | None) -> bool:
    if isinstance(caught, ast.Tuple):
        return any(map(_is_broad, caught.elts))
    return caught is None or (isinstance(caught, ast.Name) and caught.id in ("Exception", "BaseException"))


def main() -> int:
    """Print each measure beside its limit, and all places of those above it; return 1 if there are any."""
    files = tracked_files()
    found = measure(files)
    for name, limit in LIMITS.items():
        places = found[name]
        print(f"{name:40} {len(places):4} of {limit:3}" + ("; lower the limit" if len(places) < limit else ""))
        if len(places) > limit:
            print(*(f"  {place}" for place in places), sep="\n")
    counted = sizes(files)
    for name, limit in SIZE_LIMITS.items():
        print(f"{name:40} {counted[name]:4} of {limit:3}")
    is_larger = [len(found[name]) > limit for name, limit in LIMITS.items()]
    return int(any([*is_larger, *(counted[name] > limit for name, limit in SIZE_LIMITS.items())]))


if __name__ == "__main__":
    sys.exit(main())
