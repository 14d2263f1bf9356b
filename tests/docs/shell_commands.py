"""Check the commands of a shell block: syntax, options of megarl and its scripts, targets of make, and paths."""

from __future__ import annotations

import argparse
import contextlib
import io
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path, PurePath
from typing import NoReturn
from unittest import mock

from megarl.cli.main import main
from tests.docs.yaml_blocks import ROOT, Finding, find_override_problem, find_yaml_problems

FOLDERS = "benchmarks|docs|examples|launch|megarl|requirements|tests|yaml"
REPOSITORY_PATH = re.compile(rf"(?:{FOLDERS})/[\w./-]*")
"""A path in the repository, from its root."""

BENCHMARK = re.compile(r"-m (benchmarks(?:\.\w+)+)")
HEREDOC = re.compile(r"(?<!<)<<-?\s*(['\"]?)(\w+)\1")
PREFIXES = ("do", "then", "else", "if", "while", "!", "{", "time", "exec", "nohup", "sudo", "env")
"""Words in front of a command."""

LAUNCHERS = ("srun", "ray", "torchrun", "timeout", "docker")
"""Programs that start the megarl command among their arguments."""


def find_shell_problems(text: str) -> list[Finding]:
    """Return line, counted from 0, and message of each problem of a shell block."""
    checked = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True, check=False)
    if checked.returncode:
        line = re.search(r"line (\d+): (.*)", checked.stderr)
        return [(int(line[1]) - 1 if line else 0, f"not valid bash: {line[2] if line else checked.stderr.strip()}")]
    found = []
    for number, line, heredoc in logical_lines(text):
        for words in simple_commands(line):
            found += [(number, message) for message in find_command_problems(words)]
        if heredoc is not None and re.search(r"\.ya?ml\b", line):
            found += [(number + 1 + at, message) for at, message in find_yaml_problems(heredoc)]
    return found


def logical_lines(text: str) -> Iterator[tuple[int, str, str | None]]:
    """Yield number, text and heredoc of each command line; continued lines and open quotes are joined."""
    numbered = iter(enumerate(text.splitlines()))
    for number, line in numbered:
        while line.endswith("\\") or _is_open(line):
            _, more = next(numbered)
            line = line[:-1] + " " + more if line.endswith("\\") else f"{line}\n{more}"
        marker = HEREDOC.search(line)
        body = None
        if marker is not None:
            content = []
            for _, each in numbered:
                if each.strip() == marker[2]:
                    break
                content.append(each)
            body = "\n".join(content)
        yield number, line, body


def _is_open(line: str) -> bool:
    try:
        shlex.split(line, comments=True)
    except ValueError:
        return True
    return False


def simple_commands(line: str) -> Iterator[list[str]]:
    """Yield the words of each command of a line, without assignments and redirections; substitutions become 1."""
    line = re.sub(r"\$\([^()]*\)|\$\{?\w+\}?", "1", HEREDOC.sub("", line))
    line = re.sub(r"(?<=\s)\d?>&?\s?\S+|(?<=\s)&>\s?\S+|(?<=\s)<\s?\S+", "", line)
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    words: list[str] = []
    for token in [*lexer, ";"]:
        if not re.fullmatch(r"[();<>|&]+", token):
            words.append(token)
        elif words:
            yield words
            words = []


def find_command_problems(words: Sequence[str]) -> list[str]:
    """Return what is wrong with one command."""
    found = [f"there is no {path}" for path in map(_repository_path, words) if path and not list(ROOT.glob(path))]
    words = _without_prefixes(words)
    if found or not words:
        return found
    program = PurePath(words[0]).name
    if program == "make":
        return find_make_problems(words[1:])
    if program == "megarl":
        return find_megarl_problems(words[1:])
    if program.startswith("python") or program in LAUNCHERS:
        return _find_launched_problems(words)
    return _find_script_argument_problems(words)


def _repository_path(word: str) -> str | None:
    value = word.rpartition("=")[2].removeprefix("./")
    return value if re.fullmatch(rf"(?:{FOLDERS})/[\w./*-]+", value) else None


def _without_prefixes(words: Sequence[str]) -> Sequence[str]:
    skipped = 0
    while skipped < len(words) and (words[skipped] in PREFIXES or re.match(r"\w+=", words[skipped])):
        skipped += 1
    return words[skipped:]


def _find_launched_problems(words: Sequence[str]) -> list[str]:
    for at, word in enumerate(words[:-1]):
        if word == "-m" and words[at + 1] == "megarl":
            return find_megarl_problems(words[at + 2 :])
        if word == "-m" and words[at + 1].partition(".")[0] == "benchmarks":
            return find_module_problems(words[at + 1], words[at + 2 :])
        if at > 0 and PurePath(word).name == "megarl":
            return find_megarl_problems(words[at + 1 :])
        if at > 0 and word.endswith(".py") and (ROOT / word).is_file():
            return find_script_problems(ROOT / word, words[at + 1 :])
    return []


def _find_script_argument_problems(words: Sequence[str]) -> list[str]:
    """Return what is wrong with the arguments of the scripts in launch/, which are those of megarl."""
    for at, word in enumerate(words):
        rest = words[at + 1 :]
        if re.fullmatch(r"launch/slurm/(?:train|sft|rm)\.sbatch", word):
            return find_megarl_problems([PurePath(word).stem, *rest])
        if word == "launch/torchrun/hosts.sh":
            if rest[1:] and rest[1].startswith("benchmarks."):
                return find_module_problems(rest[1], rest[2:])
            return find_megarl_problems(rest[1:])
    return []


def find_make_problems(words: Sequence[str]) -> list[str]:
    """Return the targets and variables that the Makefile lacks."""
    if any(word.startswith("-C") for word in words):
        return []
    targets = [word for word in words if "=" not in word and not word.startswith("-")]
    variables = [word.partition("=")[0] for word in words if "=" in word]
    found = [f"the Makefile has no target {target}" for target in targets if target not in make_targets()]
    return found + [f"the Makefile has no variable {name}" for name in variables if name not in make_variables()]


@cache
def make_targets() -> frozenset[str]:
    """Return the targets of the Makefile."""
    return frozenset(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


@cache
def make_variables() -> frozenset[str]:
    """Return the variables of the Makefile that a caller may set."""
    return frozenset(re.findall(r"^(?:export )?([A-Z_0-9]+) \?=", (ROOT / "Makefile").read_text(), re.MULTILINE))


class _ParsedError(BaseException):
    """Ends a program once it has parsed its arguments."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments


def parse_arguments(program: Callable[[], object], name: str, words: Sequence[str]) -> argparse.Namespace | str:
    """Run a program up to the end of `parse_args`; return the parsed arguments, or the error message."""
    parse_args = argparse.ArgumentParser.parse_args

    def parse_and_stop(parser: argparse.ArgumentParser, *arguments: Sequence[str]) -> NoReturn:
        raise _ParsedError(parse_args(parser, *arguments))

    errors = io.StringIO()
    with (
        mock.patch.object(argparse.ArgumentParser, "parse_args", parse_and_stop),
        mock.patch.object(sys, "argv", [name, *words]),
        contextlib.redirect_stderr(errors),
        contextlib.redirect_stdout(io.StringIO()),
    ):
        try:
            program()
        except _ParsedError as parsed:
            return parsed.arguments
        except SystemExit as end:
            if end.code in (0, None):  # --help
                return argparse.Namespace()
    return errors.getvalue().strip().rpartition("error: ")[2]


def find_module_problems(module: str, words: Sequence[str]) -> list[str]:
    """Return the options of `python -m MODULE` that its parser rejects."""
    spec = find_spec(module)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = find_spec(f"{module}.__main__")
    if spec is None or spec.origin is None:
        return [f"there is no module {module}"]
    return find_script_problems(Path(spec.origin), words, module=module)


def find_script_problems(file: Path, words: Sequence[str], *, module: str | None = None) -> list[str]:
    """Return the options of a script that its parser rejects; a script without a parser is not run."""
    if "parse_args" not in file.read_text():
        return []

    def program() -> None:
        if module is not None:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(str(file), run_name="__main__")

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
