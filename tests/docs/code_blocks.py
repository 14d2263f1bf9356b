"""Check what Markdown files quote: code blocks, links, and commands, configuration keys and paths in inline code.

Shell, YAML and Python blocks are checked against the parsers, configuration types and modules of this checkout.
Diagrams are checked by `make docs`, which draws them.
"""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Callable, Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import unquote

from markdown_it import MarkdownIt
from markdown_it.token import Token

from megarl.cli.main import SUMMARIES
from tests.docs.checks import (
    BENCHMARK,
    REPOSITORY_PATH,
    ROOT,
    find_key_problem,
    find_make_problems,
    find_shell_problems,
    find_yaml_problems,
)

OTHER_PROJECTS = ("verl", "slime", "NeMo-RL")
"""Headers of the first columns of tables with configuration keys that are not megarl's."""


def pages(root: Path = ROOT) -> list[Path]:
    """Return the Markdown files that are written by hand."""
    patterns = ("README.md", "CONTRIBUTING.md", "docs/**/*.md", "examples/**/*.md", "launch/**/*.md")
    return sorted(path for pattern in patterns for path in root.glob(pattern))


def find_problems(files: Iterable[Path], root: Path = ROOT) -> list[str]:
    """Return the problems of Markdown files, each with its file and line.

    The line is the first one of the block or paragraph, or that of the row of a table.
    """
    return [
        f"{file.relative_to(root)}:{line}: {message}"
        for file in files
        for line, message in find_page_problems(file.read_text(), file.parent)
    ]


def parse(markdown: str) -> list[Token]:
    """Return the tokens of a page."""
    return MarkdownIt("commonmark").enable("table").parse(markdown)


def blocks(markdown: str, language: str) -> list[str]:
    """Return the content of the code blocks in a language."""
    return [token.content for token in parse(markdown) if token.type == "fence" and token.info == language]


def find_page_problems(markdown: str, folder: Path) -> Iterator[tuple[int, str]]:
    """Yield line, counted from 1, and message of each problem of a page in `folder`."""
    line, column, in_header, first_header = 1, 0, False, ""
    for token in parse(markdown):
        line = token.map[0] + 1 if token.map else line
        if token.type == "fence" and token.info not in CHECKS:
            yield line, f"a code block needs one of the languages {', '.join(CHECKS)}, got {token.info or 'none'}"
        elif token.type == "fence":
            yield from ((line, message) for message in CHECKS[token.info](token.content))
        elif token.type == "code_block":
            yield line, "code needs a fenced block with a language, this is only indented"
        elif token.type in ("th_open", "td_open"):
            column, in_header = column + 1, token.type == "th_open"
        elif token.type in ("tr_open", "table_close"):
            column = 0
        elif token.type == "inline":
            first_header = token.content if in_header and column == 1 else first_header
            if column != 1 or first_header not in OTHER_PROJECTS:
                yield from ((line, message) for message in find_text_problems(token, folder))


def find_text_problems(paragraph: Token, folder: Path) -> Iterator[str]:
    """Yield what is wrong in a paragraph, heading or cell of a page in `folder`."""
    if paragraph.content.startswith("!!!"):
        yield "an admonition is plain text in the repository, use a quote: > **Title.** text"
    for token in paragraph.children or ():
        if token.type == "code_inline":
            yield from find_inline_problems(token.content)
        path = unquote(str(token.attrGet("href") or token.attrGet("src") or "")).partition("#")[0]
        if path and not re.match(r"\w+:", path) and not (folder / path).exists():
            yield f"a link leads to {path}, which does not exist"


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
    key_problem = find_key_problem(code)
    return [] if key_problem is None else [key_problem]


def find_python_problems(text: str) -> list[str]:
    """Return the first syntax error, or the imports from this checkout that fail; nothing else is executed."""
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        return [f"not valid Python: {error}"]
    found = []
    for node in ast.walk(tree):
        ours = re.match(r"(?:from|import) (?:megarl|benchmarks)\b", ast.unparse(node))
        if isinstance(node, ast.Import | ast.ImportFrom) and ours:
            try:
                exec(compile(ast.Module([node], []), "block", "exec"), {})
            except ImportError as error:
                found.append(str(error))
    return found


CHECKS: dict[str, Callable[[str], Iterable[str]]] = {
    "bash": find_shell_problems,
    "yaml": find_yaml_problems,
    "python": find_python_problems,
    **dict.fromkeys(("text", "mermaid"), lambda _: ()),
}
"""Language -> check of a block's content."""
