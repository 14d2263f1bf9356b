"""Runs whose groups are sampled ahead, with real engines: killed, repeated, and compared with synchronous ones."""

import json
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from benchmarks.chaos.compare import compare
from benchmarks.chaos.read import read_model, read_rollouts
from benchmarks.chaos.schedule import num_sampled_again, trained_ordinals
from megarl.run.reward_weights import request_weights
from megarl.run.run_logs import log_folder, read_log
from megarl.run.schedule.events import Leased, Pushed
from tests.end_to_end.launched import RAY_AGENTS, LaunchedCommand, list_steps, run_to_end
from tests.end_to_end.test_resume import processes, steps_saved
from tests.end_to_end.tiny_world import LR, write_run

CAP, EVERY = 3, 4
COMPARED = ("loss", "grad_norm", "reward/mean", "response/length", "drift/ess", "staleness/mean", "reward/one/weight")


def sections(steps: int, every: int, **schedule: Any) -> dict[str, Any]:
    return {
        "schedule": schedule,
        "trainer": {"steps": steps, "optimizer": {"lr": LR}},
        "checkpoint": {"every": every, "keep_every": every, "keep_journal": "all"},
    }


def kill_command(run: LaunchedCommand, config: Path, folder: Path) -> LaunchedCommand:
    """Kill the command and resume the run; return the new command."""
    run.send(signal.SIGKILL)
    run.wait()
    run.assert_no_processes_left(but=RAY_AGENTS)
    run.end()
    return LaunchedCommand(folder, "train", config, "--resume", "auto")


def kill_trainer(run: LaunchedCommand, config: Path, folder: Path) -> LaunchedCommand:
    """Kill a trainer rank, which the command replaces."""
    processes(run, "ray::WorkerHost")[-1].kill()
    return run


@pytest.mark.parametrize("kill", [kill_trainer, pytest.param(kill_command, marks=pytest.mark.slow)])
def test_killed_asynchronous_run_trains_each_group_once_within_the_cap_until_it_is_stopped(
    kill, world, tmp_path, run_here, capsys
):
    """Steps that were finished before the kill have the same metrics afterwards, bit for bit.

    The weight of the reward changes its sign before the kill. SIGUSR1 ends the run after a step. A replay of the
    journal, without engines, has the same checkpoints, bit for bit.
    """
    schedule = {"type": "async", "lookahead": 2, "max_staleness": CAP}
    config = write_run(world, tmp_path, **sections(100_000, EVERY, **schedule))
    run = LaunchedCommand(tmp_path, "train", config)
    try:
        run.wait_for_step(2)
        request_weights(tmp_path / "run", {"one": -1.0})
        run.wait_until(lambda: list_steps(tmp_path / "run")[-1]["reward/one/weight"] < 0 and steps_saved(tmp_path))
        before = list_steps(tmp_path / "run")
        run = kill(run, config, tmp_path)
        run.wait_until(lambda: "resuming from step" in run.stdout)
        run.wait_for_step(before[-1]["step"] + EVERY)
        for _ in range(2):
            for process in run.find_live_processes():  # as Slurm does when it tracks processes by their parents
                process.send_signal(signal.SIGUSR1)
        assert run.wait() == 75
        check_stopped(run, world, tmp_path / "run")
        run.assert_nothing_left()
    finally:
        run.end()
    check_steps(before, tmp_path / "run", run.steps_done())
    capsys.readouterr()
    assert run_here("replay", tmp_path / "run", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["begun_at"], report["last_step"]) == (0, run.steps_done())
    assert 0 < report["training_share"] < 1
    assert report["checkpoints"] == {str(step): [] for step in steps_saved(tmp_path)}


def check_stopped(run: LaunchedCommand, world: Path, folder: Path) -> None:
    """Check that the run has exported the model of its last step, and saved it."""
    last = run.steps_done()
    ended = re.fullmatch(r"stopped after step (\d+) of 100000 on SIGUSR1; model exported to (.*)\n", run.stderr)
    assert ended is not None, run.stderr
    assert (int(ended[1]), ended[2]) == (last, str(folder / "model"))
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["steps"], summary["steps_planned"]) == (last, 100_000)
    exported, initial = ((path / "model.safetensors").read_bytes() for path in (folder / "model", world / "model"))
    assert len(exported) == len(initial)
    assert exported != initial
    assert steps_saved(folder.parent) == sorted({*range(EVERY, last + 1, EVERY), last})


def check_steps(before: list[dict[str, Any]], folder: Path, last: int) -> None:
    """Check the steps up to the last one: each has the metrics that it had before the kill, and groups of its own."""
    rows = list_steps(folder)
    weights = [row["reward/one/weight"] for row in rows]
    changed = weights.index(-1.0)
    assert 2 <= changed < len(before)
    assert weights == [1.0] * changed + [-1.0] * (last - changed)
    assert [row["step"] for row in rows] == list(range(1, last + 1))
    assert max(row["staleness/max"] for row in rows) <= CAP
    assert any(row["staleness/max"] > 0 for row in rows)
    for old, new in zip(before, rows, strict=False):
        assert {name: old[name] for name in COMPARED} == {name: new[name] for name in COMPARED}

    events = list(read_log(log_folder(folder / "journal")))
    leased = {event.step: event.ordinals for event in events if isinstance(event, Leased)}
    assert set(leased) == set(range(1, last + 1))
    assert max(event.version for event in events if isinstance(event, Pushed)) == last
    trained = trained_ordinals(events)
    assert (len(trained), set(trained.values())) == (4 * last, {1})
    assert num_sampled_again(events) == 0
    rollouts = read_rollouts(folder)
    assert sum(map(len, rollouts.prompt_ids.values())) == 4 * last
    assert set(rollouts.samples.values()) == {2}


@pytest.mark.slow
def test_one_step_off_repeats_bitwise_also_after_a_kill(world, tmp_path):
    folders = tmp_path / "undisturbed", tmp_path / "killed"
    for folder in folders:
        folder.mkdir()
    config = write_run(world, folders[1], **sections(100_000, 5, type="one_step_off"))
    run = LaunchedCommand(folders[1], "train", config)
    try:
        run.wait_for_step(8)
        run.send(signal.SIGKILL)
        run.wait()
        run.assert_no_processes_left(but=RAY_AGENTS)
    finally:
        run.end()
    settings = sections(run.steps_done() + 5, 5, type="one_step_off")
    run_to_end(folders[1], "train", write_run(world, folders[1], **settings), "--resume", "auto")
    run_to_end(folders[0], "train", write_run(world, folders[0], **settings))
    found = compare(folders[0] / "run", folders[1] / "run")
    assert found.differences == []
    assert (found.prompts_lost, found.prompts_repeated, found.trajectories_repeated) == (0, 0, 0)


@pytest.mark.slow
def test_async_without_lookahead_equals_sync(world, tmp_path):
    models, rollouts = [], []
    for name, schedule in (("sync", {}), ("async", {"type": "async", "lookahead": 0, "max_staleness": 0})):
        folder = tmp_path / name
        folder.mkdir()
        config = write_run(world, folder, **sections(10, 5, **schedule))
        run_to_end(folder, "train", config, "--set", "algorithm.rollout_is=null")
        models.append(read_model(folder / "run/model"))
        rollouts.append(read_rollouts(folder / "run"))
    assert models[0].keys() == models[1].keys()
    assert all(models[0][name] == models[1][name] for name in models[0])
    assert rollouts[0].prompt_ids == rollouts[1].prompt_ids
    assert rollouts[0].samples == rollouts[1].samples
