"""The command `megarl`: exit codes, error output, help, imports; and `megarl demo`, whose stages do not run."""

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from megarl.cli import main
from megarl.cli.options import print_error
from megarl.config import RunConfig, SftConfig
from megarl.controller import run_stage as driver
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


@pytest.fixture
def outcome(monkeypatch) -> Callable[[BaseException], int]:
    def of(error: BaseException) -> int:
        monkeypatch.setattr(main, "import_command", lambda name: Raises(error))
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
    [([], 2, "usage: megarl"), (["trian"], 2, "invalid choice: 'trian'"), (["check", "--help"], 0, "--set KEY=VALUE")],
)
def test_usage_is_printed(words, code, printed, capsys):
    with pytest.raises(SystemExit) as error:
        sys.exit(main.main(words))
    assert error.value.code == code
    assert printed in "".join(capsys.readouterr())


@pytest.mark.parametrize("name", sorted(main.SUMMARIES))
def test_every_command_can_be_imported(name):
    parser = argparse.ArgumentParser()
    command = main.import_command(name)
    command.add_arguments(parser)
    assert callable(command.run)


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["train", "~/c.yaml"], "config"),
        (["attach", "~/c.yaml"], "run"),
        (["checkpoint", "ls", "~/c.yaml"], "run_dir"),
        (["convert", "hf-to-megatron", "--model=~/c.yaml", "--output=x"], "model"),
        (["convert", "hf-to-megatron", "--output=~/c.yaml", "--model=x"], "output"),
        (["data", "--config=~/c.yaml"], "config"),
        (["demo", "--out=~/c.yaml"], "out"),
        (["doctor", "--config=~/c.yaml"], "config"),
        (["replay", "x", "--out=~/c.yaml"], "out"),
        (["score", "--model=m", "--input=~/c.yaml", "--output=x"], "input"),
        (["score", "--model=m", "--output=~/c.yaml", "--input=x"], "output"),
    ],
)
def test_paths_may_begin_with_the_home_folder(words, name, monkeypatch, capsys):
    # shells expand `~` at the beginning of a word only
    monkeypatch.setenv("HOME", "/h")
    command, *arguments = words
    parser = argparse.ArgumentParser()
    main.import_command(command).add_arguments(parser)
    assert getattr(parser.parse_args(arguments), name) == Path("/h/c.yaml")
    with pytest.raises(SystemExit):
        parser.parse_args([word.replace("~", "~no-such-user") for word in arguments])
    assert "the home folder of ~no-such-user is not known" in capsys.readouterr().err


def test_the_checkpoint_to_resume_from_may_be_in_the_home_folder(monkeypatch):
    monkeypatch.setenv("HOME", "/h")
    parser = argparse.ArgumentParser()
    main.import_command("train").add_arguments(parser)
    for given, want in {"~/run/checkpoints/step-3": "/h/run/checkpoints/step-3", "auto": "auto", "3": "3"}.items():
        assert parser.parse_args(["c.yaml", f"--resume={given}"]).resume == want


def test_models_to_explain_may_be_in_the_home_folder(monkeypatch):
    monkeypatch.setenv("HOME", "/h")
    parser = argparse.ArgumentParser()
    main.import_command("reshard").add_arguments(parser)
    words = ["explain", "--model=~/m", "--train=tp=1", "--gen=tp=1"]
    assert parser.parse_args(words).model == "/h/m"


def test_help_imports_no_heavy_packages():
    code = (
        "import sys; from megarl.cli.main import _parser; _parser(None, None).format_help();"
        "print([m for m in ('torch', 'ray', 'rich', 'pydantic', 'transformers', 'megatron') if m in sys.modules])"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout == "[]\n"


def test_data_only_writes_the_problems_and_rotates_an_earlier_folder(tmp_path):
    out = tmp_path / "demo"
    for _ in range(2):
        assert main.main(["demo", "--data-only", "--out", str(out)]) == 0
    assert {path.name for path in tmp_path.iterdir()} == {"demo", "demo.1"}
    names = {path.name for path in (out / "data").iterdir()}
    assert {"train.jsonl", "heldout.jsonl", "sft.jsonl"} <= names
    assert (out / "data/train.jsonl").read_bytes() == (tmp_path / "demo.1/data/train.jsonl").read_bytes()


def test_fine_tuning_is_followed_by_grpo_on_its_model(tmp_path, monkeypatch, capsys):
    out, stages = tmp_path / "demo", []

    def run_stage(config, *_, **__):
        stages.append(config)
        summary = {"eval_before": 0.25, "eval_after": 0.75, "seconds_by_phase": {"start": 1.0}, "seconds_total": 2.0}
        (out / "summary.json").write_text(json.dumps(summary))

    monkeypatch.setattr(driver, "run_stage", run_stage)
    assert main.main(["demo", "--out", str(out), "--seed", "3", "--set", "trainer.steps=5"]) == 0
    sft, grpo = stages
    assert isinstance(sft, SftConfig)
    assert isinstance(grpo, RunConfig)
    assert (sft.seed, grpo.seed, grpo.trainer.steps) == (3, 3, 5)
    assert grpo.model.path == str(sft.export_path)
    assert sft.data.path == f"{out}/data/sft.jsonl"
    assert (grpo.data.path, grpo.data.eval_path) == (f"{out}/data/train.jsonl", f"{out}/data/heldout.jsonl")
    summary = json.loads((out / "summary.json").read_text())
    assert list(summary["seconds_by_phase"]) == ["make_data", "sft", "start"]
    assert "held-out accuracy 0.250 -> 0.750" in capsys.readouterr().out
