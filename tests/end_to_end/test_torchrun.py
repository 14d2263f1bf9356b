"""SFT under torchrun, without Ray: errors and signals. `test_resume_stages.py` has its results."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.conftest import Launch
from tests.end_to_end.launched import LaunchedCommand
from tests.end_to_end.tiny_world import write_sft

TWO_RANKS = ("--standalone", "--nproc-per-node", "2", "-m")


def errors(run: LaunchedCommand) -> list[str]:
    """Return the error lines of the ranks on stderr, without torchrun's own report."""
    return [line for line in run.stderr.splitlines() if line.startswith("error: ")]


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            {"placement": {"slots_per_node": 4}},
            "placement: needs as many slots as torchrun has ranks, got nodes * slots_per_node = 1 * 4 = 4, torchrun's "
            "world size = 2 (without nodes and slots_per_node, the world decides)",
        ),
        pytest.param({"trainer": {"stepz": 3}}, "{config}: trainer.stepz: unknown key", marks=pytest.mark.slow),
        pytest.param({"data": {"path": "nothing.jsonl"}}, "data.path: ", marks=pytest.mark.slow),
    ],
)
def test_configuration_error_of_all_ranks_is_reported_once(
    sections: dict[str, Any], message: str, world: Path, tmp_path: Path, launch: Launch
) -> None:
    config = write_sft(world, tmp_path, **sections)
    run = launch(*TWO_RANKS, "megarl", "sft", config, program="torchrun")
    assert run.wait() == 1  # torchrun's
    (error,) = errors(run)
    assert error.startswith("error: " + message.replace("{config}", str(config)))
    assert "exitcode  : 2" in run.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize("how", ["error", "exception", "SIGKILL"])
def test_failing_rank_ends_the_others(how: str, world: Path, tmp_path: Path, launch: Launch) -> None:
    config = write_sft(world, tmp_path)
    run = launch(*TWO_RANKS, "tests.end_to_end.torchrun_stage", "sft", config, how, program="torchrun")
    assert run.wait() == 1
    found = errors(run)
    match how:
        case "error":
            assert found == ["error: rank 1 has read something bad"]
        case "exception":
            assert found == ["error: the run failed on rank 1:"]
            assert "ZeroDivisionError: of no use" in run.stderr
        case "SIGKILL":
            assert len(found) <= 1
            assert "Signal 9 (SIGKILL)" in run.stderr
    run.assert_no_processes_left()


@pytest.mark.slow
def test_torchrun_can_forward_sigusr1(world: Path, tmp_path: Path, launch: Launch) -> None:
    config = write_sft(world, tmp_path, trainer={"steps": 100_000, "batch_size": 8})
    signals = ("--signals-to-handle", "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1", "--shutdown-timeout", "60")
    run = launch(*TWO_RANKS[:-1], *signals, "-m", "megarl", "sft", config, program="torchrun")
    run.wait_for_step(3)
    run.send(signal.SIGUSR1)
    assert run.wait() == 1  # torchrun's
    assert f"stopped after step {run.steps_done()} of 100000 on SIGUSR1; model exported to " in run.stderr
    assert (tmp_path / "run/model/model.safetensors").exists()
    run.assert_no_processes_left()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupt_is_reported_once(number: signal.Signals, world: Path, tmp_path: Path, launch: Launch) -> None:
    config = write_sft(world, tmp_path, trainer={"steps": 100_000, "batch_size": 8})
    logs = tmp_path / "logs"
    arguments = (*TWO_RANKS[:-1], "--log-dir", logs, "--redirects", "3", "-m", "megarl", "sft", config)
    run = launch(*arguments, program="torchrun")
    run.wait_for_step(3)
    run.send(number, group=number == signal.SIGINT)
    run.wait()
    run.assert_no_processes_left()
    first, second = (next(logs.glob(f"*/*/{rank}/stderr.log")).read_text() for rank in (0, 1))
    assert first == "error: interrupted\n"
    assert second == ""
