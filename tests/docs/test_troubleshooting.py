"""docs/troubleshooting.md against the code: every quoted message is still raised, and the exit codes are the code's."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from megarl import errors
from megarl.checkpoint.run_lock import LOCK_TIMEOUT_SECONDS
from megarl.cli.main import INTERRUPTED
from megarl.errors import MegarlError
from tests.docs.code_blocks import split_page
from tests.docs.tables import code, section, tables

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/troubleshooting.md").read_text()
MESSAGES = [block.text for block in split_page(PAGE)[0] if block.language == "text"]

VALUE = "\0"
"""Stands for a value that an f-string inserts."""


@cache
def templates(file: Path) -> tuple[str, ...]:
    """Return the strings and f-strings of a module, without docstrings; `VALUE` in place of what is inserted."""
    found: list[str] = []

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            return
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append(node.value)
        if isinstance(node, ast.JoinedStr):
            found.append("".join(p.value if isinstance(p, ast.Constant) else VALUE for p in node.values))
        for below in ast.iter_child_nodes(node):
            visit(below)

    visit(ast.parse(file.read_text()))
    return tuple(found)


def find_sources(message: str) -> list[str]:
    """Return the modules with a string that has the constant parts of the message, in this order."""
    parts = re.split(r"<[A-Z]+>", message)
    pattern = re.compile(r"[\s\S]*".join(map(re.escape, parts)))
    return [
        str(file.relative_to(ROOT))
        for file in sorted((ROOT / "megarl").rglob("*.py"))
        if any(pattern.search(each) for each in templates(file))
    ]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: message[:50])
def test_quoted_messages_occur_in_the_source(message: str) -> None:
    assert find_sources(message), f"no module has the message: {message}"


def test_a_message_that_nothing_raises_is_found() -> None:
    assert find_sources("run_dir <FOLDER> is in use by <PROCESS>: wait for it") == ["megarl/checkpoint/run_lock.py"]
    assert find_sources("run_dir <FOLDER> is taken by <PROCESS>") == []
    assert find_sources("<CALL>: <WORKER> has died. <CAUSE>") == []


def subclasses(kind: type[MegarlError]) -> set[type[MegarlError]]:
    return {kind, *(each for below in kind.__subclasses__() for each in subclasses(below))}


def test_exit_codes_are_those_of_the_code() -> None:
    (table,) = tables(section(PAGE, "Exit codes"))
    stated = {int(row[0]): set(code(row[1])) for row in table[1:]}
    raised: dict[int, set[str]] = {0: set(), INTERRUPTED: set()}
    for each in subclasses(MegarlError):
        if each.__module__ == errors.__name__:
            raised.setdefault(each.exit_code, set()).add(each.__name__)
    assert stated == raised


def test_every_entry_quotes_a_message() -> None:
    titles = re.findall(r"^### (.+)$", PAGE, re.MULTILINE)
    assert 25 <= len(titles) <= 60
    assert all("```text" in section(PAGE, title) for title in titles)


def test_the_lock_timeout_is_that_of_the_code() -> None:
    assert set(re.findall(r"(\d+) seconds", section(PAGE, "Checkpoints and locks"))) == {f"{LOCK_TIMEOUT_SECONDS:g}"}
