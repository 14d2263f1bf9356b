"""The command `megarl`: exit codes, error output, help, imports."""

import argparse
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from megarl.cli import main
from megarl.cli.output import print_error
from megarl.errors import ConfigError, EarlyStop, LimitError, MegarlError, WorkerError

SCRIPT = Path(sys.executable).with_name("megarl")


class Raises:
    """A command that raises `error` when it runs."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--set", nargs="*")

    def run(self, args: argparse.Namespace) -> int:
        raise self.error


Outcome = Callable[[BaseException], int]


@pytest.fixture
def outcome(monkeypatch) -> Outcome:
    def of(error: BaseException) -> int:
        monkeypatch.setattr(main, "_import_command", lambda name: Raises(error))
        return main.main(["train"])

    return of


@pytest.mark.parametrize(
    ("error", "code", "printed"),
    [
        (ConfigError("a"), 2, "error: a\n"),
        (WorkerError("a"), 1, "error: a\n"),
        (LimitError("a"), 3, "error: a\n"),
        (MegarlError("a"), 1, "error: a\n"),
        (EarlyStop("stopped after step 1 of 2"), 75, "stopped after step 1 of 2\n"),
        (KeyboardInterrupt(), 130, "error: interrupted\n"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_errors_become_their_exit_code(outcome, error, code, printed, capsys):
    assert outcome(error) == code
    assert capsys.readouterr() == ("", printed)


def test_other_exceptions_propagate(outcome):
    with pytest.raises(ZeroDivisionError):
        outcome(ZeroDivisionError())


def test_a_remote_error_shows_its_cause(outcome, capsys):
    class Remote(WorkerError):  # like those of ray.exceptions.RayTaskError.as_instanceof_cause()
        cause = LimitError("limits.logprob_abs_max: got 3")

    assert outcome(Remote("Traceback ...")) == 3
    assert capsys.readouterr().err == "error: limits.logprob_abs_max: got 3\n"


def test_messages_are_printed_verbatim(monkeypatch, capsys):
    message = "x.yaml: [red]data[/red] " + "long " * 60 + "\nsecond line [/]"
    print_error(message)
    assert capsys.readouterr().err == f"error: {message}\n"
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    print_error(message)
    assert capsys.readouterr().err.replace("\x1b[1;31m", "").replace("\x1b[0m", "") == f"error: {message}\n"


def test_help_lists_every_command():
    """Of the installed script."""
    answer = subprocess.run([SCRIPT, "--help"], capture_output=True, text=True, check=True)
    for name, summary in main.SUMMARIES.items():
        assert f"    {name} " in answer.stdout
        assert " ".join(summary.split()) in " ".join(answer.stdout.split())


@pytest.mark.parametrize(
    ("words", "code", "printed"),
    [
        ([], 2, "usage: megarl"),
        (["trian"], 2, "invalid choice: 'trian'"),
        (["check", "--help"], 0, "--set KEY=VALUE"),
    ],
)
def test_usage_is_printed(words, code, printed, capsys):
    with pytest.raises(SystemExit) as error:
        sys.exit(main.main(words))
    assert error.value.code == code
    assert printed in "".join(capsys.readouterr())


@pytest.mark.parametrize("name", sorted(main.SUMMARIES))
def test_every_command_can_be_imported(name):
    parser = argparse.ArgumentParser()
    command = main._import_command(name)
    command.add_arguments(parser)
    assert callable(command.run)


def test_help_imports_no_heavy_packages():
    code = (
        "import sys; from megarl.cli.main import _parser; _parser(None, None).format_help();"
        "print([m for m in ('torch', 'ray', 'rich', 'pydantic', 'transformers', 'megatron') if m in sys.modules])"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout == "[]\n"
