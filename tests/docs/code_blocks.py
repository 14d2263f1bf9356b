"""Check what Markdown files quote: code blocks, links, and commands, configuration keys and paths in inline code.

Shell, YAML and Python blocks and keys are checked against parsers, configuration types and modules of this checkout.
Diagrams are checked by `make docs`, which draws them.
"""

import argparse
import ast
import contextlib
import copy
import io
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from importlib.util import find_spec
from itertools import dropwhile
from pathlib import Path, PurePath
from typing import Any, NoReturn
from unittest import mock
from urllib.parse import unquote

import yaml
from markdown_it import MarkdownIt
from markdown_it.token import Token

from megarl.cli.main import SUMMARIES, main
from megarl.cli.schema import make_schema
from megarl.config import STAGES, make_convert_config, make_score_config
from megarl.config.load import load_config, make_config
from megarl.config.section import merge
from megarl.errors import ConfigError

ROOT = Path(__file__).parents[2]
FOLDERS = "benchmarks|docs|examples|launch|megarl|requirements|tests|yaml"
REPOSITORY_PATH = re.compile(rf"(?:{FOLDERS})/[\w./-]*")
"""A path in the repository, from its root."""
BENCHMARK = re.compile(r"-m (benchmarks(?:\.\w+)+)")
HEREDOC = re.compile(r"(?<!<)<<-?\s*(['\"]?)(\w+)\1(.*)\n((?:.*\n)*?)\s*\2$", re.MULTILINE)
PREFIX = re.compile(r"do|then|else|if|while|!|\{|time|exec|nohup|sudo|env|\w+=.*", re.DOTALL)
"""A word in front of a command."""
LAUNCHER = re.compile(r"python.*|srun|ray|torchrun|timeout|docker")
"""A program that starts a command among its arguments."""


def find_shell_problems(text: str) -> Iterator[str]:
    checked = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True, check=False)
    if checked.returncode:
        yield f"not valid bash: {checked.stderr.strip()}"
        return
    for heredoc in HEREDOC.finditer(text):
        if re.search(r"\.ya?ml\b", text[: heredoc.start()].rpartition("\n")[2] + heredoc[3]):
            yield from find_yaml_problems(heredoc[4])
    for words in simple_commands(text):
        yield from find_command_problems(words)


def simple_commands(text: str) -> Iterator[list[str]]:
    """Yield the words of each command, without assignments and redirections; substitutions become 1."""
    text = HEREDOC.sub(r"\3", text).replace("\\\n", " ")
    text = re.sub(r"(?m)(?:^|(?<=\s))#\s.*$", "", text)  # comments
    text = re.sub(r"\$\([^()]*\)|\$\{?\w+\}?", "1", text)
    text = re.sub(r"(?<=\s)(?:\d?>&?|&>|<)[ \t]?\S+", "", text)
    lexer = shlex.shlex(text, posix=True, punctuation_chars="\n();<>|&")
    lexer.whitespace_split, lexer.whitespace, lexer.commenters = True, " \t", ""
    words: list[str] = []
    for token in [*lexer, ";"]:
        if not re.fullmatch(r"[\n();<>|&]+", token):
            words.append(token)
        elif words:
            yield words
            words = []


def find_command_problems(words: Sequence[str]) -> list[str]:
    paths = [word.rpartition("=")[2].removeprefix("./") for word in words]
    paths = [path for path in paths if re.fullmatch(rf"(?:{FOLDERS})/[\w./*-]+", path)]
    found = [f"there is no {path}" for path in paths if not list(ROOT.glob(path))]
    words = list(dropwhile(PREFIX.fullmatch, words))
    if found or not words:
        return found
    program = PurePath(words[0]).name
    if program in COMMAND_CHECKS:
        return COMMAND_CHECKS[program](words[1:])
    for at, word in enumerate(words):
        rest = words[at + 1 :]
        if script := re.fullmatch(r"launch/slurm/(train|sft|rm)\.sbatch", word):
            return find_megarl_problems([script[1], *rest])
        if word == "launch/torchrun/hosts.sh":
            return _find_module_problems(rest[1:])
        if LAUNCHER.fullmatch(program) and word == "-m" and rest and re.match("megarl$|benchmarks", rest[0]):
            return _find_module_problems(rest if rest[0] != "megarl" else rest[1:])
        if LAUNCHER.fullmatch(program) and PurePath(word).name == "megarl":
            return find_megarl_problems(rest)
        if LAUNCHER.fullmatch(program) and word.endswith(".py") and (ROOT / word).is_file():
            return find_script_problems(ROOT / word, rest)
    return []


def _find_module_problems(words: Sequence[str]) -> list[str]:
    """Return what is wrong with the name of a benchmark and its options, or with the arguments of megarl."""
    module = words[0] if words else ""
    if not module.startswith("benchmarks."):
        return find_megarl_problems(words)
    path = ROOT / module.replace(".", "/")
    file = path / "__main__.py" if path.is_dir() else path.with_suffix(".py")
    return find_script_problems(file, words[1:], module=module) if file.exists() else [f"there is no module {module}"]


def find_make_problems(words: Sequence[str]) -> list[str]:
    """Return the targets and variables that the Makefile lacks."""
    makefile = (ROOT / "Makefile").read_text()
    known = re.findall(r"^(?:export )?([A-Z_0-9]+ )\?=|^([a-z-]+):", makefile, re.MULTILINE)
    names = {variable or target for variable, target in known}
    if any(word.startswith("-C") for word in words):
        return []
    given = [re.sub("=.*", " ", word) for word in words if not word.startswith("-")]
    return [f"the Makefile has no {name}" for name in given if name not in names]


def parse_arguments(program: Callable[[], object], name: str, words: Sequence[str]) -> argparse.Namespace | str:
    """Run a program up to the end of `parse_args`; return the parsed arguments, or the error message."""
    parse_args, found = argparse.ArgumentParser.parse_args, list[argparse.Namespace]()

    def parse_and_stop(parser: argparse.ArgumentParser, *arguments: Sequence[str]) -> NoReturn:
        found.append(parse_args(parser, *arguments))
        raise SystemExit

    errors = io.StringIO()
    with (
        mock.patch.object(argparse.ArgumentParser, "parse_args", parse_and_stop),
        mock.patch.object(sys, "argv", [name, *words]),
        contextlib.redirect_stderr(errors),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.suppress(SystemExit),
    ):
        program()
    message = errors.getvalue().strip().partition("error: ")[2]
    return (found or [message or argparse.Namespace()])[0]  # neither of them after --help


def find_script_problems(file: Path, words: Sequence[str], *, module: str | None = None) -> list[str]:
    """Return the options of a script or module that its parser rejects; a script without a parser is not run."""
    if "parse_args" not in file.read_text():
        return []

    def program() -> None:
        if module is None:
            runpy.run_path(str(file), run_name="__main__")
        else:
            runpy.run_module(module, run_name="__main__", alter_sys=True)

    parsed = parse_arguments(program, file.name, words)
    return [f"{module or file.name}: {parsed}"] if isinstance(parsed, str) else []


def find_megarl_problems(words: Sequence[str]) -> list[str]:
    """Return what megarl's parser and configuration types reject in a command line."""
    parsed = parse_arguments(lambda: main(list(words)), "megarl", words)
    if isinstance(parsed, str):
        return [f"megarl {words[0] if words else ''}: {parsed}"]
    name = next((word for word in words if not word.startswith("-")), None)
    if name == "launch" and getattr(parsed, "command", None):
        return find_megarl_problems(parsed.command)
    if name is None or not vars(parsed):
        return []
    stage = getattr(parsed, "stage", None) or {"eval": "train", "demo": "train"}.get(name, name)
    config = getattr(parsed, "train" if name == "demo" else "config", None)
    problem = find_override_problem(stage, config, getattr(parsed, "overrides", []))
    return [] if problem is None else [f"megarl {name}: {problem}"]


COMMAND_CHECKS: dict[str, Callable[[Sequence[str]], list[str]]] = {
    "make": find_make_problems,
    "megarl": find_megarl_problems,
}
"""Program -> check of its arguments."""
REQUIRED: dict[str, Any] = {"run_dir": "runs/x", "model": {"path": "models/x"}, "data": {"path": "x.jsonl"}}
"""The keys without defaults, which an excerpt may lack."""
EXAMPLES = [str(folder) for folder in sorted((ROOT / "examples").iterdir()) if folder.is_dir()]
"""Folders of modules that the commands of examples find with PYTHONPATH."""
SEVERAL_SECTIONS = re.compile("|".join(f"{kind.__name__}: " for kind in STAGES.values()))
"""Begin of a message about several sections."""


def find_yaml_problems(text: str) -> list[str]:
    """Return the problems of a YAML block: a configuration of one of megarl's commands, or an excerpt of one.

    What needs several sections, such as the number of slots, is checked only in a whole configuration. An algorithm of
    the reader's own is not checked, as its module does not exist here. Kubernetes objects are only parsed.
    """
    try:
        documents = list(yaml.safe_load_all(text))
    except yaml.YAMLError as error:
        return [f"not valid YAML: {error}"]
    found = []
    for tree in documents:
        if not isinstance(tree, dict):
            found.append(f"needs keys of a configuration, got {type(tree).__name__}")
        elif not {"apiVersion", "kind"} <= tree.keys():
            by_command = {command: _find_config_problems(command, tree) for command in STAGES}
            if all(by_command.values()):  # valid for none of the commands
                found += by_command[next((name for name in ("rm", "dpo") if name in tree), "train")]
    return found


def _find_config_problems(command: str, tree: dict[str, Any]) -> list[str]:
    tree, is_whole = copy.deepcopy(tree), "run_dir" in tree
    algorithm = tree.get("algorithm")
    module, colon, _ = str(algorithm.get("type")).partition(":") if isinstance(algorithm, dict) else ("", "", "")
    with mock.patch.object(sys, "path", [*sys.path, *EXAMPLES]):
        if colon and find_spec(module.partition(".")[0]) is None:
            del tree["algorithm"]
        left_out = "data" if "sources" in (tree.get("data") or {}) else ""
        required = {} if is_whole else {key: value for key, value in REQUIRED.items() if key != left_out}
        try:
            make_config(STAGES[command], merge(required, tree))
        except ConfigError as error:
            return [line for line in str(error).splitlines() if is_whole or not SEVERAL_SECTIONS.match(line)]
    return []


def find_override_problem(command: str, config: Path | None, overrides: Sequence[str]) -> str | None:
    """Return what is wrong with `--set` overrides of a command, in a configuration that need not exist."""
    with mock.patch.object(sys, "path", [*sys.path, *EXAMPLES]):
        try:
            if command == "score":
                make_score_config("models/x", overrides)
            elif command == "convert":
                make_convert_config(overrides)
            elif command in STAGES and config is not None and (ROOT / config).is_file():
                load_config(STAGES[command], ROOT / config, list(overrides))
            elif command in STAGES:
                make_config(STAGES[command], copy.deepcopy(REQUIRED), overrides)
        except ConfigError as error:
            lines = [line for line in str(error).splitlines() if not SEVERAL_SECTIONS.match(line)]
            return "; ".join(lines).replace(f"{ROOT}/", "") or None
    return None


_schema = cache(make_schema)


def find_key_problem(code: str) -> str | None:
    """Return what is wrong with `key.path` or `key.path: value`; None if it does not begin with a section."""
    found = re.match(r"([a-z_]+(?:\.\w+)+)(?:$|[:= ] *([a-z_]+$)?)", code)
    if found is None or re.search(r"\.(py|md|json|jsonl|yaml|safetensors|txt|sh|sbatch)$", found[1]):
        return None
    parts = found[1].split(".")
    schemas = [schema for schema in map(_schema, STAGES) if parts[0] in schema["properties"]]
    nodes = [node for schema in schemas for node in find_nodes(schema, schema, parts)]
    if schemas and not nodes:
        return f"no configuration has the key {found[1]}"
    words = {word for node in nodes for word in (*node.get("enum", ()), node.get("const", "null"))} - {"null"}
    is_wrong = found[2] and words and found[2] not in {*words, "true", "false", "null"}
    return f"{found[1]} cannot be {found[2]}, only {sorted(map(str, words))}" if is_wrong else None


def find_nodes(schema: dict[str, Any], node: dict[str, Any], parts: list[str]) -> Iterator[dict[str, Any]]:
    """Yield the schemas of the key with the path `parts` below `node`; none if there is no such key.

    A name in `parts` may stand for a key of the user's choice. `schema` is the whole schema, with its definitions.
    """
    if "$ref" in node:
        node = schema["$defs"][node["$ref"].rpartition("/")[2]]
    alternatives = [each for kind in ("anyOf", "oneOf") for each in node.get(kind, ())]
    for each in alternatives:
        yield from find_nodes(schema, each, parts)
    if not parts:
        yield from [] if alternatives else [node]
        return
    extra = node.get("additionalProperties")
    if parts[0] in node.get("properties", {}):
        yield from find_nodes(schema, node["properties"][parts[0]], parts[1:])
    elif isinstance(extra, dict):
        yield from find_nodes(schema, extra, parts[1:])
    elif extra is True and not node.get("properties"):  # arguments of a function
        yield {}


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
