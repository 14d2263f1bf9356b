"""Ends at any moment, nodes of two kinds, one node and two, and where a start's time goes."""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.launched import name_of
from tests.end_to_end.tiny_world import write_run
from tests.launch.slurm.cluster import SlurmCluster
from tests.launch.slurm.conftest import Submit
from tests.launch.slurm.job import LOOK_SECONDS, Job
from tests.launch.slurm.test_train import END_SECONDS, RECIPE, here

pytestmark = pytest.mark.slow

NUM_CANCELS = 20
LATEST_CANCEL_SECONDS = 60.0
"""By then a run on two idle cores has done steps."""

REPEATED = ("loss", "grad_norm", "reward/mean", "response/length", "entropy", "mismatch/logprob_abs_max")

LONG = {"trainer.steps": 1000}

TWO_KINDS = {
    "labels": {"megarl.het-group": "0"},
    "pools": {"engines": {"labels": {"megarl.het-group": "1"}}},
    "rollout": {"pool": "engines"},
}

MARKS = ("nodes met", "Ray up", "Ray joined by all", "starting trainer ranks", "step 1/")
"""What the log says first at the end of each phase of a start."""


@contextmanager
def submitted(
    slurm: SlurmCluster, folder: Path, *arguments: str | Path, options: tuple[str, ...] = ()
) -> Iterator[Job]:
    """A job of `train.sbatch` that ends with the block, in a folder of its own."""
    folder.mkdir(exist_ok=True)
    slurm.wait_until_idle()
    job = Job(slurm, folder, "train.sbatch", *arguments, options=options)
    try:
        yield job
    finally:
        job.end()


def steps(folder: Path) -> list[dict[str, Any]]:
    """What must be the same at every step."""
    rows = map(json.loads, (folder / "run/metrics.jsonl").read_text().splitlines())
    return [{name: row[name] for name in REPEATED} for row in rows if "loss" in row]


def test_two_nodes_and_one_come_to_the_same_losses(slurm: SlurmCluster, world: Path, tmp_path: Path):
    losses = {}
    for nodes in (2, 1):
        folder = tmp_path / str(nodes)
        folder.mkdir()
        config = write_run(world, folder, placement={"nodes": nodes, "slots_per_node": 2 // nodes})
        with submitted(slurm, folder, config, "--set", "trainer.steps=4", options=(f"--nodes={nodes}",)) as job:
            assert job.wait(300) == 0, job.output
            job.assert_nothing_is_left(5)
        losses[nodes] = steps(folder)
    assert len(losses[1]) == 4
    assert any(row["grad_norm"] > 0 for row in losses[1])
    assert losses[1] == losses[2]


def test_usr1_ends_a_run_after_its_step_and_queues_it_again(submit: Submit, tmp_path: Path):
    job = submit("train.sbatch", RECIPE, *here(tmp_path, **LONG), REQUEUE="1")
    job.wait_for_step(2, 240)
    job.cancel("--signal=USR1")
    job.wait_until_it_says(f"queueing job {job.id} again", 60)
    said = re.search(r"stopped after step (\d+) of 1000, as SIGUSR1 asked; the model as it is: (.*)", job.output)
    assert said is not None, job.output
    assert (Path(said[2]) / "model.safetensors").exists()
    assert int(said[1]) == job.steps_done()
    job.assert_nothing_is_left(END_SECONDS)
    assert job.field("Restarts") == "1"
    job.wait_until_it_says(f"going on from step {said[1]}: ", 240)


def test_asked_to_end_early_while_it_starts_the_job_fails_with_code_75(submit: Submit, tmp_path: Path):
    job = submit("train.sbatch", RECIPE, *here(tmp_path, **LONG))
    job.wait_until_it_says("nodes met", 120)
    job.cancel("--signal=USR1")
    assert job.wait(120) == 75, job.output
    assert "stopped before its first step of 1000, as SIGUSR1 asked" in job.output
    job.assert_nothing_is_left(5)


def test_tasks_that_are_told_to_end_do_so_in_order(submit: Submit, tmp_path: Path):
    job = submit("train.sbatch", RECIPE, *here(tmp_path, **LONG))
    job.wait_for_step(1, 240)
    # as `scancel` does where Slurm tracks processes by cgroup: the script and the launchers, and none of their children
    tasks = [process for process in job.living() if (parent := process.parent()) and parent.name() == "slurmstepd"]
    assert sorted(map(job.node_of, tasks)) == ["n1", "n1", "n2"]
    for task in tasks:
        task.terminate()
    assert job.wait(END_SECONDS) == 75, job.output
    assert "as SIGTERM asked" in job.output
    job.assert_nothing_is_left(5)


def test_components_of_a_heterogeneous_job_are_pools(submit: Submit, world: Path, tmp_path: Path):
    config = write_run(world, tmp_path, placement=TWO_KINDS)
    job = submit("train.sbatch", config, options=("--nodes=1", ":", "--nodes=1", "--exclusive", "--mem=0"))
    job.wait_for_step(1, 240)
    for kind, node in (("sglang::scheduler", "n2"), ("ray::Shell", "n1")):
        assert {job.node_of(process) for process in job.living() if name_of(process).startswith(kind)} == {node}
    job.cancel()
    job.assert_nothing_is_left(END_SECONDS)


@pytest.mark.parametrize("seed", range(NUM_CANCELS))
def test_cancelled_at_a_random_moment_nothing_is_left(seed: int, submit: Submit, tmp_path: Path):
    job = submit("train.sbatch", RECIPE, *here(tmp_path, **LONG))
    until = time.monotonic() + random.Random(seed).uniform(0.5, LATEST_CANCEL_SECONDS)
    while time.monotonic() < until:
        job.living()
        time.sleep(LOOK_SECONDS)
    assert not job.has_ended, job.output
    job.cancel()
    job.assert_nothing_is_left(END_SECONDS)


def test_the_first_completion_and_what_came_before(submit: Submit, tmp_path: Path):
    job = submit("train.sbatch", RECIPE, *here(tmp_path))
    seen = {"submitted": job.submitted}
    while len(seen) <= len(MARKS) and not job.has_ended:
        seen |= {mark: time.time() for mark in MARKS if mark not in seen and mark in job.output}
        time.sleep(0.05)
    assert job.wait(60) == 0, job.output
    assert list(seen) == ["submitted", *MARKS], job.output
    (first, *_) = map(json.loads, (tmp_path / "run/metrics.jsonl").read_text().splitlines())
    began = seen.pop("step 1/") - first["time/step_seconds"]
    ends = seen | {"workers up": began, "first completions": began + first["time/rollout_seconds"]}
    seconds = {name: after - before for (_, before), (name, after) in pairwise(ends.items())}
    seconds["in all"] = ends["first completions"] - job.submitted
    print("", *(f"{name:<24} {value:6.2f} s" for name, value in seconds.items()), sep="\n")  # noqa: T201 -- pytest -s
    waited = datetime.fromisoformat(job.field("StartTime")).timestamp() - job.submitted
    assert waited < 3, "Slurm did not start the job at once"
    assert seconds["in all"] < 120
