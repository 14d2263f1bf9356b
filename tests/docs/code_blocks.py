"""Check what Markdown files quote: code blocks, and commands, configuration keys and paths in inline code.

Every code block needs a language. `bash`, `yaml`, `python`, `json` and `jsonl` blocks are checked against the parsers,
configuration types and modules of this checkout; `text` and all other languages are not.
"""

from __future__ import annotations

import ast
import json
import re
import shlex
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from megarl.cli.main import SUMMARIES
from tests.docs.shell_commands import BENCHMARK, REPOSITORY_PATH, find_make_problems, find_shell_problems
from tests.docs.yaml_blocks import ROOT, Finding, find_yaml_problems, is_config_key


@dataclass(frozen=True, slots=True)
class CodeBlock:
    """A fenced code block."""

    language: str
    """First word after the fence; empty without one."""
    text: str
    """Content, without the indentation of the fence."""
    line: int
    """Line of the file that the content starts at, counted from 1."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong in a file."""

    path: str
    line: int
    message: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.message}"


def pages(root: Path = ROOT) -> list[Path]:
    """Return the Markdown files that are written by hand."""
    patterns = ("README.md", "CONTRIBUTING.md", "docs/**/*.md", "examples/**/*.md", "launch/**/*.md")
    return sorted(path for pattern in patterns for path in root.glob(pattern))


def find_problems(files: Iterable[Path], root: Path = ROOT) -> list[Problem]:
    """Return the problems of Markdown files; their paths are relative to `root`."""
    return [
        Problem(str(file.relative_to(root)), line, message)
        for file in files
        for line, message in find_page_problems(file.read_text())
    ]


def find_page_problems(markdown: str) -> list[Finding]:
    """Return line, counted from 1, and message of each problem of a page."""
    found: list[Finding] = []
    blocks, prose = split_page(markdown)
    for block in blocks:
        if block.language == "":
            found.append((block.line - 1, "a code block needs a language, such as bash, yaml, python or text"))
        check = CHECKS.get(block.language)
        if check is not None:
            found += [(block.line + line, message) for line, message in check(block.text)]
    for number, line in _without_keys_of_others(prose):
        if line.startswith("!!!"):
            found.append((number, "an admonition is plain text in the repository, use a quote: > **Title.** text"))
        if COMMAND_LINE.match(line):
            found.append((number, "a command needs a fenced block with the language bash, this line is only indented"))
        for code in re.findall(r"`([^`]+)`", line):
            found += [(number, message) for message in find_inline_problems(code)]
    return sorted(found)


OTHER_PROJECTS = ("verl", "slime", "NeMo-RL")
"""Headers of table columns with configuration keys that are not megarl's."""


def _without_keys_of_others(prose: Iterable[tuple[int, str]]) -> Iterator[tuple[int, str]]:
    """Yield the lines without the first cells of tables that map the keys of another project to megarl's."""
    skips = False
    for number, line in prose:
        cells = re.split(r"(?<!\\)\|", line)
        is_row = line.startswith("|") and len(cells) > 2
        skips = is_row and (skips or cells[1].strip() in OTHER_PROJECTS)
        yield number, "|".join(["", "", *cells[2:]]) if skips else line


COMMAND_LINE = re.compile(r"(?:    |\t)(?:[A-Z_]+=\S+ )*(?:\.venv/bin/)?(?:megarl|make|python|torchrun|pip) ")


def split_page(markdown: str) -> tuple[list[CodeBlock], list[tuple[int, str]]]:
    """Return the fenced blocks of a page, and the other lines with their numbers, counted from 1."""
    blocks, prose = [], []
    numbered = iter(enumerate(markdown.splitlines(), start=1))
    for number, line in numbered:
        fence = re.match(r"( *)(```+|~~~+) *([\w-]*)", line)
        if fence is None:
            prose.append((number, line))
            continue
        indent, marks, language = fence.groups()
        content = list(_until_closing(numbered, marks))
        blocks.append(CodeBlock(language, "\n".join(each.removeprefix(indent) for each in content), number + 1))
    return blocks, prose


def _until_closing(numbered: Iterator[tuple[int, str]], marks: str) -> Iterator[str]:
    for _, line in numbered:
        if line.strip() == marks:
            return
        yield line


def find_inline_problems(code: str) -> list[str]:
    """Return what is wrong in a span of inline code: an unknown command, target, module, path or configuration key."""
    first, _, rest = code.partition(" ")
    words = rest.split()
    if first == "megarl" and words and re.fullmatch(r"[a-z]+", words[0]) and words[0] not in SUMMARIES:
        return [f"megarl has no command {words[0]}"]
    if first == "make":
        return find_make_problems(shlex.split(rest))
    module = BENCHMARK.search(code)
    if module and find_spec(module[1]) is None:
        return [f"there is no module {module[1]}"]
    if REPOSITORY_PATH.fullmatch(code) and not (ROOT / code).exists():
        return [f"there is no {code}"]
    key = re.match(r"[a-z_]+(?:\.\w+)+(?=$|[:= ])", code)
    if key and not is_config_key(key[0]):
        return [f"no configuration has the key {key[0]}"]
    return []


def find_python_problems(text: str) -> list[Finding]:
    """Return syntax errors, and imports from this checkout that do not exist."""
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        return [((error.lineno or 1) - 1, f"not valid Python: {error.msg}")]
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module is not None and _is_ours(node.module):
            found += [
                (node.lineno - 1, f"cannot import {alias.name} from {node.module}")
                for alias in node.names
                if not _has_name(node.module, alias.name)
            ]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names if _is_ours(alias.name)]
            found += [(node.lineno - 1, f"there is no module {name}") for name in names if not _is_module(name)]
    return found


def _is_ours(module: str) -> bool:
    return module.partition(".")[0] in ("megarl", "benchmarks")


def _is_module(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # of a parent package
        return False


def _has_name(module: str, name: str) -> bool:
    if not _is_module(module):
        return False
    return hasattr(import_module(module), name) or _is_module(f"{module}.{name}")


def find_json_problems(text: str) -> list[Finding]:
    """Return the first syntax error of a JSON document."""
    try:
        json.loads(text)
    except json.JSONDecodeError as error:
        return [(error.lineno - 1, f"not valid JSON: {error.msg}")]
    return []


def find_jsonl_problems(text: str) -> list[Finding]:
    """Return the lines that are not JSON."""
    lines = enumerate(text.splitlines())
    return [(number, message) for number, line in lines for _, message in find_json_problems(line)]


def find_mermaid_problems(text: str) -> list[Finding]:
    """Return lines that are no part of a sequence diagram, participants that are not declared, and blocks left open.

    GitHub draws the diagrams, and so does `make docs`, with Mermaid itself.
    """
    lines = [line.strip() for line in text.splitlines()]
    if lines[:1] != ["sequenceDiagram"]:
        return [(0, "a mermaid block needs to be a sequenceDiagram")]
    found: list[Finding] = []
    participants: set[str] = set()
    open_blocks: list[str] = []
    for number, line in enumerate(lines[1:], start=1):
        match = MERMAID_LINE.fullmatch(line)
        if match is None:
            found.append((number, f"no line of a sequence diagram: {line}"))
        elif match["declared"]:
            participants.add(match["declared"])
        elif match["block"]:
            open_blocks.append(match["block"])
        elif match["end"] and not open_blocks:
            found.append((number, "`end` without a block"))
        elif match["end"]:
            open_blocks.pop()
        else:
            names = {match["sender"], match["receiver"], *(match["over"] or "").split(",")} - {None, ""}
            found += [(number, f"no participant {name}") for name in sorted(names - participants)]
    return found + [(len(lines), f"{block} has no end") for block in open_blocks]


MERMAID_LINE = re.compile(
    r"participant (?P<declared>\w+) as [^;#]+|(?P<block>loop|par|opt) [^;#]+|and( [^;#]+)?|(?P<end>end)"
    r"|(?P<sender>\w+)--?>>(?P<receiver>\w+): [^;#]+|Note over (?P<over>\w+(,\w+)?): [^;#]+"
)
"""A line of a sequence diagram, as far as the pages use them; `;` and `#` end a text."""


CHECKS: dict[str, Callable[[str], list[Finding]]] = {
    "bash": find_shell_problems,
    "yaml": find_yaml_problems,
    "python": find_python_problems,
    "json": find_json_problems,
    "jsonl": find_jsonl_problems,
    "mermaid": find_mermaid_problems,
    **dict.fromkeys(("sh", "shell", "console"), lambda _: [(-1, "the language of a shell block needs to be bash")]),
    "yml": lambda _: [(-1, "the language of a YAML block needs to be yaml")],
}
"""Language -> check of a block's content."""
