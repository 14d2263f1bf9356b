"""Runs that lose a process, the command or their parallel layout resume with the same results."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from benchmarks.chaos.compare import compare
from megarl.checkpoint.store import CheckpointStore
from tests.end_to_end.conftest import FinishedRun, Launch
from tests.end_to_end.launched import RAY_AGENTS, LaunchedCommand, list_steps, process_title, wait_until
from tests.end_to_end.tiny_world import STEPS, write_run
from tests.rollout.sglang.test_start_gate import assert_waited_before_allocating


def processes(run: LaunchedCommand, name: str) -> list[psutil.Process]:
    return [process for process in run.find_live_processes() if process_title(process).startswith(name)]


def assert_same(run: Path, undisturbed: FinishedRun) -> None:
    found = compare(undisturbed.folder, run)
    assert found.differences == []
    assert (found.prompts_lost, found.prompts_repeated, found.trajectories_repeated) == (0, 0, 0)


def test_run_with_killed_trainer_and_driver_has_the_same_results(
    world: Path, tmp_path: Path, launch: Launch, fifty_steps: FinishedRun
) -> None:
    """Also, the disturbed run moves memory between trainer and engine, as on GPUs, and the undisturbed one does not."""
    trainer = {"steps": STEPS, "optimizer": {"lr": 1e-3}, "offload": {"optimizer": True, "gradients": True}}
    rollout = {"max_new_tokens": 12, "engine": {"release_memory": True, "extra_args": {"log_level": "info"}}}
    config = write_run(world, tmp_path, trainer=trainer, rollout=rollout)
    run = launch("train", config)
    run.wait_for_step(12)
    processes(run, "ray::WorkerHost")[-1].kill()
    has_resumed: Callable[[], bool] = lambda: "resuming from step 10" in run.stdout  # noqa: E731
    run.wait_until(has_resumed)
    run.wait_for_step(23)
    run.send(signal.SIGKILL)
    run.wait()
    run.assert_no_processes_left(but=RAY_AGENTS)
    (log,) = (tmp_path / "run/logs/engine-0").glob("scheduler-*.log")
    assert_waited_before_allocating(log.read_text())
    assert run.stdout.count("the trainer was lost (") == 1

    again = launch("train", config, "--resume", "auto")
    assert again.wait() == 0, again.stderr
    assert_same(tmp_path / "run", fifty_steps)
    again.assert_no_processes_left(but=RAY_AGENTS)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ray::Controller", "sglang::scheduler"])
def test_killed_controller_and_scheduler_are_replaced(
    name: str, world: Path, tmp_path: Path, launch: Launch, fifty_steps: FinishedRun
) -> None:
    run = launch("train", write_run(world, tmp_path))
    run.wait_for_step(15)
    processes(run, name)[0].kill()
    assert run.wait() == 0, run.stderr
    assert_same(tmp_path / "run", fifty_steps)
    run.assert_no_processes_left()
    assert run.find_leftovers() == []


@pytest.mark.slow
def test_resume_in_another_layout_continues_with_the_same_loss_and_prompts(
    world: Path, tmp_path: Path, launch: Launch, fifty_steps: FinishedRun
) -> None:
    rows = {row["step"]: row for row in fifty_steps.steps()}
    saved = [saved for saved in CheckpointStore(fifty_steps.folder).entries() if saved.step < STEPS]
    informative = next(saved for saved in saved if rows[saved.step + 1]["grad_norm"] > 0)
    config = write_run(world, tmp_path, trainer={"steps": STEPS, "optimizer": {"lr": 1e-3}, "parallel": {"tp": 2}})
    run = launch("train", config, "--resume", informative.folder)
    assert run.wait() == 0, run.stderr
    first, want = list_steps(tmp_path / "run")[0], rows[informative.step + 1]
    assert first["step"] == want["step"]
    assert first["loss"] == pytest.approx(want["loss"], abs=1e-5)
    assert first["grad_norm"] == pytest.approx(want["grad_norm"], rel=1e-3)
    found = compare(fifty_steps.folder, tmp_path / "run")
    assert found.prompts_repeated == 0


@pytest.mark.slow
def test_sigterm_saves_a_checkpoint_within_the_grace_period(
    world: Path, tmp_path: Path, launch: Launch, fifty_steps: FinishedRun
) -> None:
    config = write_run(world, tmp_path, checkpoint={"every": 1000})
    run = launch("train", config)
    run.wait_for_step(5)
    run.send(signal.SIGTERM)
    assert run.wait() == 75
    step = run.steps_done()
    assert run.stderr.startswith(f"stopped after step {step} of {STEPS} on SIGTERM; model exported to ")
    assert [saved.step for saved in CheckpointStore(tmp_path / "run").entries()] == [step]
    run.assert_no_processes_left()
    again = launch("train", write_run(world, tmp_path), "--resume", "auto")
    assert again.wait() == 0, again.stderr
    assert_same(tmp_path / "run", fifty_steps)


@pytest.mark.slow
def test_run_folder_in_use_is_refused_and_unchanged(world: Path, tmp_path: Path, launch: Launch) -> None:
    config = write_run(world, tmp_path, trainer={"steps": 100_000})
    run = launch("train", config)
    run.wait_for_step(4)
    other = tmp_path / "other"
    other.mkdir()
    second = LaunchedCommand(other, "train", config)
    try:
        assert second.wait() == 2
        assert f"is in use by pid {run.process.pid} on host {os.uname().nodename}" in second.stderr
    finally:
        second.end()
    assert wait_until(lambda: run.steps_done() >= 8)
    assert not list((tmp_path / "run").glob("*.1"))
