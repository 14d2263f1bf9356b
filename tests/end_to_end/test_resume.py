"""Runs that lose a process, the command or their parallel layout resume with the same results."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks.chaos.compare import compare
from megarl.checkpoint.store import CheckpointStore
from tests.end_to_end.conftest import FinishedRun, Launch
from tests.end_to_end.launched import RAY_AGENTS, LaunchedCommand, list_steps, process_title
from tests.end_to_end.pausing import pause_file
from tests.end_to_end.tiny_world import EVERY, LR, STEPS, write_run
from tests.engines.sglang.test_scheduler_process import assert_waited_before_allocating
from tests.time_limits import wait_until


def processes(run: LaunchedCommand, name: str) -> list[psutil.Process]:
    return [process for process in run.find_live_processes() if process_title(process).startswith(name)]


def assert_same(run: Path, undisturbed: FinishedRun) -> None:
    found = compare(undisturbed.folder, run)
    assert found.differences == []
    assert (found.prompts_lost, found.prompts_repeated, found.trajectories_repeated) == (0, 0, 0)


def steps_saved(folder: Path) -> list[int]:
    return [saved.step for saved in CheckpointStore(folder / "run").entries()]


@pytest.fixture
def pausing(tmp_path: Path, importable_tests: None) -> str:
    """Return the algorithm of a run in `tmp_path`/run that waits before its steps `EVERY` + 2 and 2 * `EVERY` + 3."""
    for step in (EVERY + 2, 2 * EVERY + 3):
        pause_file(tmp_path / "run", step).touch()
    return "tests.end_to_end.pausing:Pausing"


def wait_until_paused(run: LaunchedCommand, folder: Path, step: int) -> None:
    """Wait until the run waits before `step` and has completed the checkpoint before."""
    run.wait_until(lambda: run.steps_done() == step - 1 and (step - 1) // EVERY * EVERY in steps_saved(folder))


def moving_memory(algorithm: str) -> dict[str, Any]:
    """Return the sections of a run that moves memory between trainer and engine."""
    return {
        "algorithm": {"type": algorithm, "kl_loss": None, "group_size": 2, "prompts_per_step": 4},
        "trainer": {"steps": STEPS, "optimizer": {"lr": LR}, "offload": {"optimizer": True, "gradients": True}},
        "rollout": {"max_new_tokens": 12, "engine": {"release_memory": True, "extra_args": {"log_level": "info"}}},
    }


def test_interrupted_run_leaves_nothing_and_resumes_with_the_same_results(
    world: Path, tmp_path: Path, launch: Launch, pausing: str, undisturbed: FinishedRun
) -> None:
    """Also, the disturbed run moves memory between trainer and engine, as on GPUs, and the undisturbed one does not."""
    config = write_run(world, tmp_path, **moving_memory(pausing))
    run = launch("train", config)
    wait_until_paused(run, tmp_path, EVERY + 2)
    assert processes(run, "ray::Controller")
    assert processes(run, "sglang::scheduler")
    run.send(signal.SIGINT, group=True)
    assert run.wait() == 130
    assert run.stderr == "error: interrupted\n"
    assert json.loads((tmp_path / "run/heartbeat.json").read_text())["status"] == "failed"
    run.assert_nothing_left()
    (log,) = (tmp_path / "run/logs/engine-0").glob("scheduler-*.log")
    assert_waited_before_allocating(log.read_text())
    for file in tmp_path.glob("pause-*"):
        file.unlink()

    again = launch("train", config, "--resume", "auto")
    assert again.wait() == 0, again.stderr
    assert f"resuming from step {EVERY}: " in again.stdout
    assert_same(tmp_path / "run", undisturbed)
    again.assert_no_processes_left(but=RAY_AGENTS)


@pytest.mark.slow
def test_run_with_killed_trainer_and_then_driver_has_the_same_results(
    world: Path, tmp_path: Path, launch: Launch, pausing: str, undisturbed: FinishedRun
) -> None:
    """`test_schedules.py` has an asynchronous run whose trainer is killed."""
    config = write_run(world, tmp_path, **moving_memory(pausing))
    run = launch("train", config)
    wait_until_paused(run, tmp_path, EVERY + 2)
    processes(run, "ray::WorkerHost")[-1].kill()
    pause_file(tmp_path / "run", EVERY + 2).unlink()
    wait_until_paused(run, tmp_path, 2 * EVERY + 3)
    assert f"resuming from step {EVERY}: " in run.stdout
    assert run.stdout.count("the trainer was lost (") == 1
    run.send(signal.SIGKILL)
    run.wait()
    run.assert_no_processes_left(but=RAY_AGENTS)
    (log,) = (tmp_path / "run/logs/engine-0").glob("scheduler-*.log")
    assert_waited_before_allocating(log.read_text())
    pause_file(tmp_path / "run", 2 * EVERY + 3).unlink()

    again = launch("train", config, "--resume", "auto")
    assert again.wait() == 0, again.stderr
    assert f"resuming from step {2 * EVERY}: " in again.stdout
    assert_same(tmp_path / "run", undisturbed)
    again.assert_no_processes_left(but=RAY_AGENTS)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ray::Controller", "sglang::scheduler"])
def test_killed_controller_and_scheduler_are_replaced(
    name: str, world: Path, tmp_path: Path, launch: Launch, pausing: str, undisturbed: FinishedRun
) -> None:
    algorithm = {"type": pausing, "kl_loss": None, "group_size": 2, "prompts_per_step": 4}
    run = launch("train", write_run(world, tmp_path, algorithm=algorithm))
    wait_until_paused(run, tmp_path, EVERY + 2)
    processes(run, name)[0].kill()
    for file in tmp_path.glob("pause-*"):
        file.unlink()
    assert run.wait() == 0, run.stderr
    assert_same(tmp_path / "run", undisturbed)
    run.assert_no_processes_left()
    assert run.find_leftovers() == []


@pytest.mark.slow
def test_resume_in_another_layout_continues_with_the_same_loss_and_prompts(
    world: Path, tmp_path: Path, launch: Launch, undisturbed: FinishedRun
) -> None:
    want = next(row for row in undisturbed.steps() if row["step"] > EVERY and row["grad_norm"] > 0)
    begin = (want["step"] - 1) // EVERY * EVERY
    saved = next(saved for saved in CheckpointStore(undisturbed.folder).entries() if saved.step == begin)
    config = write_run(world, tmp_path, trainer={"steps": STEPS, "optimizer": {"lr": LR}, "parallel": {"tp": 2}})
    run = launch("train", config, "--resume", saved.folder)
    assert run.wait() == 0, run.stderr
    rows = list_steps(tmp_path / "run")
    assert rows[0]["step"] == begin + 1
    first = next(row for row in rows if row["grad_norm"] > 0)
    assert first["step"] == want["step"]
    assert first["loss"] == pytest.approx(want["loss"], abs=1e-5)
    assert first["grad_norm"] == pytest.approx(want["grad_norm"], rel=1e-3)
    assert compare(undisturbed.folder, tmp_path / "run").prompts_repeated == 0


@pytest.mark.slow
def test_sigterm_saves_a_checkpoint_within_the_grace_period(
    world: Path, tmp_path: Path, launch: Launch, pausing: str, undisturbed: FinishedRun
) -> None:
    algorithm = {"type": pausing, "kl_loss": None, "group_size": 2, "prompts_per_step": 4}
    run = launch("train", write_run(world, tmp_path, algorithm=algorithm, checkpoint={"every": 1000}))
    run.wait_for_step(EVERY + 1)
    run.send(signal.SIGTERM)
    run.wait_until(lambda: "early end requested" in run.stdout)
    pause_file(tmp_path / "run", EVERY + 2).unlink()
    assert run.wait() == 75
    step = run.steps_done()
    assert run.stderr.startswith(f"stopped after step {step} of {STEPS} on SIGTERM; model exported to ")
    assert steps_saved(tmp_path) == [step]
    run.assert_no_processes_left()
    for file in tmp_path.glob("pause-*"):
        file.unlink()
    again = launch("train", write_run(world, tmp_path, algorithm=algorithm), "--resume", "auto")
    assert again.wait() == 0, again.stderr
    assert_same(tmp_path / "run", undisturbed)


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
    at = run.steps_done()
    assert wait_until(lambda: run.steps_done() >= at + 4)
    assert not list((tmp_path / "run").glob("*.1"))
