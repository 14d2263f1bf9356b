"""Exit codes and messages of runs that end early; none of their processes may remain."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.conftest import Launch
from tests.end_to_end.launched import RAY_AGENTS, LaunchedCommand, process_title
from tests.end_to_end.scaled_weights import SCALED_PUSH
from tests.end_to_end.tiny_world import write_run

LONG = {"trainer": {"steps": 100_000}, "placement": {"slots_per_node": 1}}
"""Sections of a long run on one slot, which starts faster."""


def start_long_run(launch: Launch, world: Path, folder: Path, **sections: Any) -> LaunchedCommand:
    run = launch("train", write_run(world, folder, **LONG, **sections))
    run.wait_for_step(3)
    assert {"ray::Controller", "sglang::scheduler"} <= {process_title(p) for p in run.find_live_processes()}
    return run


@pytest.mark.parametrize("how", ["Ctrl-C", pytest.param("SIGTERM", marks=pytest.mark.slow)])
def test_interrupted_run_leaves_no_processes_or_files(how: str, world: Path, tmp_path: Path, launch: Launch) -> None:
    run = start_long_run(launch, world, tmp_path)
    if how == "Ctrl-C":
        run.send(signal.SIGINT, group=True)
    else:
        run.send(signal.SIGTERM)
    assert run.wait() == 130
    run.assert_no_processes_left()
    assert run.stderr == "error: interrupted\n"
    assert json.loads((tmp_path / "run" / "heartbeat.json").read_text())["status"] == "failed"
    assert run.find_leftovers() == []


def test_sigusr1_finishes_the_step_and_exports_the_model(world: Path, tmp_path: Path, launch: Launch) -> None:
    run = start_long_run(launch, world, tmp_path)
    for _ in range(2):
        for process in run.find_live_processes():  # as Slurm does when it tracks processes by their parents
            process.send_signal(signal.SIGUSR1)
    assert run.wait() == 75
    ended = re.fullmatch(r"stopped after step (\d+) of 100000 on SIGUSR1; model exported to (.*)\n", run.stderr)
    assert ended is not None, run.stderr
    folder = tmp_path / "run"
    assert ended[2] == str(folder / "model")
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["steps"], summary["steps_planned"]) == (int(ended[1]), 100_000)
    assert run.steps_done() == int(ended[1])
    exported, initial = ((path / "model.safetensors").read_bytes() for path in (folder / "model", world / "model"))
    assert len(exported) == len(initial)
    assert exported != initial
    run.assert_no_processes_left()
    assert run.find_leftovers() == []


@pytest.mark.slow
@pytest.mark.parametrize("process", ["raylet", "ray::AsyncWorkerHost.build", "sglang::scheduler"])
def test_sigusr1_during_startup_runs_no_step(process: str, world: Path, tmp_path: Path, launch: Launch) -> None:
    run = launch("train", write_run(world, tmp_path, **LONG))
    run.wait_until(lambda: any(process in process_title(p) for p in run.find_live_processes()))
    for each in run.find_live_processes():
        each.send_signal(signal.SIGUSR1)
    assert run.wait() == 75
    assert run.stderr == "stopped before the first of 100000 steps on SIGUSR1\n"
    assert not (tmp_path / "run" / "model").exists()
    run.assert_no_processes_left()
    assert run.find_leftovers() == []


@pytest.mark.slow
@pytest.mark.parametrize("process", ["ray::AsyncWorkerHost.build", "sglang::scheduler"])
def test_run_interrupted_during_startup_leaves_no_processes_or_files(
    process: str, world: Path, tmp_path: Path, launch: Launch
) -> None:
    run = launch("train", write_run(world, tmp_path, **LONG))
    run.wait_until(lambda: process in {process_title(p) for p in run.find_live_processes()})
    run.send(signal.SIGINT, group=True)
    assert run.wait() == 130
    run.assert_no_processes_left()
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
    assert run.find_leftovers() == []


@pytest.mark.slow
def test_processes_end_after_the_driver_is_killed(world: Path, tmp_path: Path, launch: Launch) -> None:
    run = start_long_run(launch, world, tmp_path)
    run.send(signal.SIGKILL)
    assert run.wait() == -signal.SIGKILL
    run.assert_no_processes_left(but=RAY_AGENTS)


@pytest.mark.slow
def test_ray_agents_and_shared_memory_are_gone_90_seconds_after_the_driver_is_killed(
    world: Path, tmp_path: Path, launch: Launch
) -> None:
    run = start_long_run(launch, world, tmp_path)
    run.send(signal.SIGKILL)
    run.wait()
    run.assert_no_processes_left()
    assert not [path for path in run.find_leftovers() if path.startswith("/dev/shm")]


@pytest.mark.slow
def test_killed_engine_without_restarts_ends_the_run_with_its_log_tail(
    world: Path, tmp_path: Path, launch: Launch
) -> None:
    run = start_long_run(launch, world, tmp_path, recovery={"max_restarts": 0})
    scheduler = next(p for p in run.find_live_processes() if process_title(p) == "sglang::scheduler")
    scheduler.kill()
    assert run.wait() == 1
    log = tmp_path / "run" / "logs" / "engine-0" / f"scheduler-{scheduler.pid}.log"
    # contained anywhere: during a weight sync the error begins with the name of the engine
    assert run.stderr.startswith("error: ")
    assert f"the engine's scheduler process of TP rank 0 was ended by SIGKILL; the end of {log}:\n" in run.stderr
    assert log.read_text().splitlines()[-1] in run.stderr
    run.assert_no_processes_left()
    assert run.find_leftovers() == []


@pytest.mark.slow
def test_an_engine_matrix_scaled_by_a_quarter_ends_the_run_with_exit_code_3(
    world: Path, tmp_path: Path, launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bfloat16, with the limits by default; the steps before pass them."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]), prepend=":")
    algorithm = {"type": "tests.end_to_end.scaled_weights:ScaledAfterPush", "kl_loss": None, "group_size": 4}
    model = {"path": str(world / "model"), "dtype": "bfloat16"}
    run = launch("train", write_run(world, tmp_path, **LONG, algorithm=algorithm, model=model))
    assert run.wait() == 3
    started = re.match(
        r"error: step (\d+): train_infer_mismatch/kl = (\S+) passed limits.logprob_kl = (\S+) ", run.stderr
    )
    assert started is not None, run.stderr
    assert int(started[1]) in (SCALED_PUSH + 1, SCALED_PUSH + 2)
    assert float(started[2]) > float(started[3])
    assert f"in the last {SCALED_PUSH} steps; 6.3e-08 to 9.6e-06 in bfloat16 in the demo)" in run.stderr
    assert "trainer and engine disagree about the log-probability of a sampled token" in run.stderr
    run.assert_no_processes_left()
    assert run.find_leftovers() == []
