"""A run that loses a trainer rank, its command and its layout is the run that it would have been."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from benchmarks.chaos.compare import compare
from megarl.checkpoint.store import CheckpointStore
from tests.end_to_end.conftest import Launch
from tests.end_to_end.launched import RAY_AGENTS, Launched, name_of, wait_until
from tests.end_to_end.tiny_world import run_tree

SECTIONS: dict[str, Any] = {
    # rewards that differ, so that there is something to learn
    "reward": {"terms": {"some": {"type": "format", "pattern": "[0-4]"}}},
    "algorithm": {"kl_loss": None, "group_size": 4, "prompts_per_step": 4},
    "checkpoint": {"every": 3},
    "recovery": {"backoff_seconds": 0.1},
}
STEPS = 10


def write(world: Path, run_dir: Path, *, steps: int = STEPS, **sections: Any) -> Path:
    """The YAML file of a run, beside its folder."""
    optimizer = {"lr": 1e-3, "warmup_steps": 2}
    tree = run_tree(world, run_dir, **SECTIONS, trainer={"steps": steps, "optimizer": optimizer})
    path = run_dir.with_suffix(".yaml")
    path.write_text(yaml.safe_dump(tree | sections))
    return path


def processes(run: Launched, name: str) -> list[psutil.Process]:
    return [process for process in run.living() if name_of(process).startswith(name)]


@pytest.fixture(scope="module")
def undisturbed(world: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that nothing happens to."""
    folder = tmp_path_factory.mktemp("undisturbed")
    run = Launched(folder, "train", write(world, folder / "run"))
    try:
        assert run.wait(120) == 0, run.stderr
    finally:
        run.end()
    return folder / "run"


def assert_same(run: Path, undisturbed: Path) -> None:
    found = compare(undisturbed, run)
    assert found.differences == []
    assert (found.prompts_lost, found.prompts_repeated, found.trajectories_repeated) == (0, 0, 0)


def metrics(run: Path) -> list[dict[str, Any]]:
    rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [row for row in rows if "loss" in row]


def test_killed_as_a_part_and_as_a_whole_a_run_comes_to_the_same(
    world: Path, tmp_path: Path, launch: Launch, undisturbed: Path
) -> None:
    config = write(world, tmp_path / "run")
    run = launch("train", config)
    run.wait_for_step(4)
    processes(run, "ray::Shell")[-1].kill()
    said: Callable[[], bool] = lambda: "going on from step 3" in run.stdout  # noqa: E731
    run.wait_until(said, 60)
    run.wait_for_step(7)
    run.send(signal.SIGKILL)
    run.wait(10)
    run.assert_nothing_lives(30, but=RAY_AGENTS)
    assert run.stdout.count("the trainer was lost (") == 1

    again = launch("train", config, "--resume", "auto")
    assert again.wait(120) == 0, again.stderr
    assert_same(tmp_path / "run", undisturbed)
    again.assert_nothing_lives(5, but=RAY_AGENTS)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ray::Controller", "sglang::scheduler"])
def test_other_processes_are_replaced_too(
    name: str, world: Path, tmp_path: Path, launch: Launch, undisturbed: Path
) -> None:
    run = launch("train", write(world, tmp_path / "run"))
    run.wait_for_step(5)
    processes(run, name)[0].kill()
    assert run.wait(120) == 0, run.stderr
    assert_same(tmp_path / "run", undisturbed)
    run.assert_nothing_lives(5)
    assert run.leftovers() == []


@pytest.mark.slow
def test_another_layout_goes_on_with_the_same_loss_and_prompts(
    world: Path, tmp_path: Path, launch: Launch, undisturbed: Path
) -> None:
    whole = metrics(undisturbed)
    saved = CheckpointStore(undisturbed).saved()[0]
    config = write(
        world,
        tmp_path / "run",
        trainer={"steps": STEPS, "optimizer": {"lr": 1e-3, "warmup_steps": 2}, "parallel": {"tp": 2}},
    )
    run = launch("train", config, "--resume", saved.folder)
    assert run.wait(120) == 0, run.stderr
    first = metrics(tmp_path / "run")[0]
    assert first["step"] == saved.step + 1
    (want,) = (row for row in whole if row["step"] == first["step"])
    assert first["loss"] == pytest.approx(want["loss"], abs=1e-5)
    assert first["grad_norm"] == pytest.approx(want["grad_norm"], rel=1e-3)
    assert want["grad_norm"] > 0
    found = compare(undisturbed, tmp_path / "run")
    assert found.prompts_repeated == 0


@pytest.mark.slow
def test_told_to_end_a_run_saves_its_step_within_its_grace(
    world: Path, tmp_path: Path, launch: Launch, undisturbed: Path
) -> None:
    config = write(world, tmp_path / "run", checkpoint={"every": 1000})
    run = launch("train", config)
    run.wait_for_step(5)
    run.send(signal.SIGTERM)
    assert run.wait(20) == 75
    step = run.steps_done()
    assert run.stderr.startswith(f"stopped after step {step} of {STEPS}, as SIGTERM asked")
    assert [saved.step for saved in CheckpointStore(tmp_path / "run").saved()] == [step]
    run.assert_nothing_lives(5)
    again = launch("train", write(world, tmp_path / "run"), "--resume", "auto")
    assert again.wait(120) == 0, again.stderr
    assert_same(tmp_path / "run", undisturbed)


@pytest.mark.slow
def test_a_folder_in_use_is_refused_and_left_alone(world: Path, tmp_path: Path, launch: Launch) -> None:
    config = write(world, tmp_path / "run", steps=100_000)
    run = launch("train", config)
    run.wait_for_step(4)
    other = tmp_path / "other"
    other.mkdir()
    second = Launched(other, "train", config)
    try:
        assert second.wait(60) == 2
        assert f"is in use by pid {run.process.pid} on host {os.uname().nodename}" in second.stderr
    finally:
        second.end()
    assert wait_until(lambda: run.steps_done() >= 8, 30)
    assert not list((tmp_path / "run").glob("*.1"))
