"""Runs whose groups are sampled ahead, with real engines: killed, repeated, and compared with synchronous ones."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.chaos.compare import compare
from benchmarks.chaos.read import read_model, read_rollouts
from benchmarks.chaos.schedule import num_sampled_again, trained_ordinals
from megarl.checkpoint.store import CheckpointStore
from megarl.run.reward_weights import request_weights
from megarl.run.schedule_log import log_folder, read_log
from megarl.schedule.events import Leased, Pushed
from tests.end_to_end.launched import RAY_AGENTS, LaunchedCommand, list_steps, wait_until
from tests.end_to_end.test_resume import processes
from tests.end_to_end.tiny_world import write_run

CAP = 3

ASYNC: dict[str, Any] = {"type": "async", "lookahead": 2, "max_staleness": CAP}


def sections(steps: int, every: int, **schedule: Any) -> dict[str, Any]:
    return {
        "schedule": schedule,
        "trainer": {"steps": steps, "optimizer": {"lr": 1e-3}},
        "checkpoint": {"every": every, "keep_every": every, "keep_journal": "all"},
    }


def finish(folder: Path, *arguments: str | Path) -> str:
    """Run a `megarl` command in `folder` to its end, and return its standard output."""
    run = LaunchedCommand(folder, *arguments)
    try:
        assert run.wait() == 0, run.stdout + run.stderr
        run.assert_no_processes_left(but=RAY_AGENTS)
        return run.stdout
    finally:
        run.end()


def kill_and_resume(config: Path, folder: Path, step: int, **weights: float) -> list[dict[str, Any]]:
    """Kill the command after `step`, resume the run, and return the metrics of the steps before the kill.

    `weights`: of reward terms, to which the run is changed after two steps.
    """
    run = LaunchedCommand(folder, "train", config)
    try:
        change_weights(run, folder, weights)
        run.wait_for_step(step)
        run.send(signal.SIGKILL)
        run.wait()
        run.assert_no_processes_left(but=RAY_AGENTS)
    finally:
        run.end()
    before = list_steps(folder / "run")
    finish(folder, "train", config, "--resume", "auto")
    return before


def change_weights(run: LaunchedCommand, folder: Path, weights: dict[str, float]) -> None:
    if weights:
        wait_for_step(run, 2)
        request_weights(folder / "run", weights)


def wait_for_step(run: LaunchedCommand, step: int) -> None:
    """Wait until the run has finished `step`, without a search for its processes, which takes as long as some steps."""
    assert wait_until(lambda: run.process.poll() is not None or run.steps_done() >= step)


def kill_trainer(config: Path, folder: Path, step: int, **weights: float) -> list[dict[str, Any]]:
    """Kill a trainer rank after `step`, wait for the end of the run, and return the metrics of the steps before.

    `weights`: as for `kill_and_resume`.
    """
    run = LaunchedCommand(folder, "train", config)
    try:
        run.wait_until(lambda: "started in" in run.stdout)
        rank = processes(run, "ray::WorkerHost")[-1]
        change_weights(run, folder, weights)
        wait_for_step(run, step)
        before = list_steps(folder / "run")
        rank.kill()
        assert run.wait() == 0, run.stdout + run.stderr
        assert "resuming from step" in run.stdout
        run.assert_no_processes_left(but=RAY_AGENTS)
        return before
    finally:
        run.end()


@pytest.mark.parametrize("kill", [kill_trainer, pytest.param(kill_and_resume, marks=pytest.mark.slow)])
def test_killed_asynchronous_run_trains_each_group_once_within_the_cap(
    kill: Callable[[Path, Path, int], list[dict[str, Any]]], world: Path, tmp_path: Path
) -> None:
    """Steps that were finished before the kill have the same metrics afterwards, bit for bit.

    A replay of the journal, without engines, has the same checkpoints, bit for bit. The weight of the reward changes
    its sign before the kill.
    """
    steps = 12
    config = write_run(world, tmp_path, **sections(steps, 4, **ASYNC))
    before = kill(config, tmp_path, 6, one=-1.0)
    rows = list_steps(tmp_path / "run")
    weights = [row["reward/one/weight"] for row in rows]
    assert weights == [1.0] * weights.index(-1.0) + [-1.0] * weights.count(-1.0)
    assert 2 <= weights.index(-1.0) <= 6
    assert [row["step"] for row in rows] == list(range(1, steps + 1))
    assert max(row["staleness/max"] for row in rows) <= CAP
    assert any(row["staleness/max"] > 0 for row in rows)
    compared = (
        "loss",
        "grad_norm",
        "reward/mean",
        "response/length",
        "drift/ess",
        "staleness/mean",
        "reward/one/weight",
    )
    assert len(before) >= 6
    for old, new in zip(before, rows, strict=False):
        assert {name: old[name] for name in compared} == {name: new[name] for name in compared}

    events = list(read_log(log_folder(tmp_path / "run/journal")))
    leased = {event.step: event.ordinals for event in events if isinstance(event, Leased)}
    assert set(leased) == set(range(1, steps + 1))
    assert max(event.version for event in events if isinstance(event, Pushed)) == steps
    rollouts = read_rollouts(tmp_path / "run")
    trained = [prompt for prompts in rollouts.prompt_ids.values() for prompt in prompts]
    assert len(trained) == len(set(trained)) == 4 * steps  # less than an epoch
    assert set(rollouts.samples.values()) == {2}
    assert [saved.step for saved in CheckpointStore(tmp_path / "run").entries()] == [4, 8, 12]
    report = json.loads(finish(tmp_path, "replay", tmp_path / "run", "--json"))
    assert (report["begun_at"], report["last_step"]) == (0, steps)
    assert 0 < report["training_share"] < 1
    assert report["checkpoints"] == {"4": [], "8": [], "12": []}
    assert trained_ordinals(events) == dict.fromkeys(range(4 * steps), 1)
    assert num_sampled_again(events) == 0


@pytest.mark.parametrize("update", ["in_place", pytest.param("abort", marks=pytest.mark.slow)])
def test_pushes_while_requests_run(update: str, world: Path, tmp_path: Path) -> None:
    """Tokens of the last version agree with the trainer, except for those on a KV cache of older weights."""
    settings = sections(8, 8, update=update, **ASYNC) | {
        "rollout": {"max_new_tokens": 100},
        "placement": {"slots_per_node": 1},
    }
    finish(tmp_path, "train", write_run(world, tmp_path, **settings))
    rows = list_steps(tmp_path / "run")
    assert [row["step"] for row in rows] == list(range(1, 9))
    assert max(row["staleness/max"] for row in rows) <= CAP
    assert max(row["train_infer_mismatch/logprob_abs_max"] for row in rows) <= 1e-4
    assert max(row["drift/logprob_abs_mean"] for row in rows) > 1e-3
    if update == "in_place":
        assert max(row["policy/mixed_kv"] for row in rows) > 0


@pytest.mark.slow
def test_one_step_off_repeats_bitwise_also_after_a_kill(world: Path, tmp_path: Path) -> None:
    folders = tmp_path / "undisturbed", tmp_path / "killed"
    for folder in folders:
        folder.mkdir()
    settings = sections(16, 5, type="one_step_off")
    finish(folders[0], "train", write_run(world, folders[0], **settings))
    kill_and_resume(write_run(world, folders[1], **settings), folders[1], 8)
    found = compare(folders[0] / "run", folders[1] / "run")
    assert found.differences == []
    assert (found.prompts_lost, found.prompts_repeated, found.trajectories_repeated) == (0, 0, 0)


@pytest.mark.slow
def test_async_without_lookahead_equals_sync(world: Path, tmp_path: Path) -> None:
    models, rollouts = [], []
    for name, schedule in (("sync", {}), ("async", {"type": "async", "lookahead": 0, "max_staleness": 0})):
        folder = tmp_path / name
        folder.mkdir()
        config = write_run(world, folder, **sections(10, 5, **schedule))
        finish(folder, "train", config, "--set", "algorithm.rollout_is=null")
        models.append(read_model(folder / "run/model"))
        rollouts.append(read_rollouts(folder / "run"))
    assert models[0].keys() == models[1].keys()
    assert all(models[0][name] == models[1][name] for name in models[0])
    assert rollouts[0].prompt_ids == rollouts[1].prompt_ids
    assert rollouts[0].samples == rollouts[1].samples
