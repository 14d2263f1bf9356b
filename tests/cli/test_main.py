"""The command `megarl`: exit codes, error output, help, imports."""

from __future__ import annotations

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
def outcome(monkeypatch: pytest.MonkeyPatch) -> Outcome:
    def of(error: BaseException) -> int:
        monkeypatch.setattr(main, "_import_command", lambda name: Raises(error))
        return main.main(["train"])

    return of


@pytest.mark.parametrize(
    ("error", "code"),
    [(ConfigError("a"), 2), (WorkerError("a"), 1), (LimitError("a"), 3), (MegarlError("a"), 1)],
)
def test_errors_become_their_exit_code(
    outcome: Outcome, error: MegarlError, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert outcome(error) == code
    assert capsys.readouterr() == ("", "error: a\n")


def test_early_stop_is_not_printed_as_an_error(outcome: Outcome, capsys: pytest.CaptureFixture[str]) -> None:
    assert outcome(EarlyStop("stopped after step 1 of 2")) == 75
    assert capsys.readouterr() == ("", "stopped after step 1 of 2\n")


def test_an_interrupt_exits_with_130(outcome: Outcome, capsys: pytest.CaptureFixture[str]) -> None:
    assert outcome(KeyboardInterrupt()) == 130
    assert capsys.readouterr().err == "error: interrupted\n"


def test_other_exceptions_propagate(outcome: Outcome) -> None:
    with pytest.raises(ZeroDivisionError):
        outcome(ZeroDivisionError())


def test_a_remote_error_shows_its_cause(outcome: Outcome, capsys: pytest.CaptureFixture[str]) -> None:
    class Remote(WorkerError):  # like those of ray.exceptions.RayTaskError.as_instanceof_cause()
        cause = LimitError("limits.logprob_abs_max: got 3")

    assert outcome(Remote("Traceback ...")) == 3
    assert capsys.readouterr().err == "error: limits.logprob_abs_max: got 3\n"


def test_messages_are_printed_verbatim(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    message = "x.yaml: [red]data[/red] " + "long " * 60 + "\nsecond line [/]"
    print_error(message)
    assert capsys.readouterr().err == f"error: {message}\n"
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    print_error(message)
    assert capsys.readouterr().err.replace("\x1b[1;31m", "").replace("\x1b[0m", "") == f"error: {message}\n"


def run(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(SCRIPT), *args], capture_output=True, text=True, check=False)


def test_help_lists_every_command() -> None:
    answer = run("--help")
    assert answer.returncode == 0
    for name, summary in main.SUMMARIES.items():
        assert f"    {name} " in answer.stdout
        assert " ".join(summary.split()) in " ".join(answer.stdout.split())


def test_no_command_shows_the_help() -> None:
    answer = run()
    assert answer.returncode == 2
    assert "usage: megarl" in answer.stderr


def test_unknown_command() -> None:
    answer = run("trian")
    assert answer.returncode == 2
    assert "invalid choice: 'trian'" in answer.stderr


def test_help_of_a_command_shows_its_arguments() -> None:
    answer = run("check", "--help")
    assert answer.returncode == 0
    assert "--set KEY=VALUE" in answer.stdout


@pytest.mark.parametrize("name", sorted(main.SUMMARIES))
def test_every_command_can_be_imported(name: str) -> None:
    parser = argparse.ArgumentParser()
    command = main._import_command(name)
    command.add_arguments(parser)
    assert callable(command.run)


def test_help_imports_no_heavy_packages() -> None:
    code = (
        "import sys; from megarl.cli.main import _parser; _parser(None, None).format_help();"
        "print([m for m in ('torch', 'ray', 'rich', 'pydantic', 'transformers', 'megatron') if m in sys.modules])"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout == "[]\n"
