"""Commands that run in the test's process, and a tiny model for them."""

from collections.abc import Callable
from pathlib import Path

import pytest

from megarl.cli.main import main
from tests.cli.tiny_run import write_tiny_run

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys) -> Run:
    """Function that runs a command; returns its exit code, output and error output."""

    def run_command(*words: str) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main([str(word) for word in words])
        return (code, *capsys.readouterr())

    return run_command


@pytest.fixture
def output(run: Run) -> Callable[..., str]:
    """Function that runs a command, which has to succeed; returns its output."""

    def run_command(*words: str) -> str:
        code, out, err = run(*words)
        assert code == 0, err
        return out

    return run_command


@pytest.fixture
def refusal(run: Run) -> Callable[..., str]:
    """Function that runs a command, which has to be refused; returns its error output."""

    def run_command(*words: str) -> str:
        code, _, err = run(*words)
        assert code == 2
        assert "error: " in err
        return err

    return run_command


@pytest.fixture
def no_cluster(monkeypatch, tmp_path) -> None:
    """Run in `tmp_path`; starting a cluster fails the test."""

    def start(*_: object) -> None:
        raise AssertionError("the cluster was started")

    monkeypatch.setattr("megarl.controller.ray_session.start_cluster", start)
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory) -> Path:
    """Model folder: 4 heads, 2 key-value heads, 2 layers, 384 token ids, 128 positions; float32."""
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny_run(folder)
    return folder / "model"
