"""Slow tests on Slurm: early stops, cancellation at random times, and heterogeneous jobs."""

from __future__ import annotations

import json
import random
import re
import time
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.launched import process_title
from tests.end_to_end.tiny_world import write_run
from tests.launch.conftest import PATIENT
from tests.launch.slurm.conftest import Submit
from tests.launch.slurm.job import POLL_SECONDS
from tests.launch.slurm.test_train import CONFIG, local_overrides

pytestmark = pytest.mark.slow

NUM_CANCELS = 20
LATEST_CANCEL_SECONDS = 60.0
"""By this time a run on two idle cores has finished some steps."""

REPEATED = ("loss", "grad_norm", "reward/mean", "response/length", "entropy", "train_infer_mismatch/logprob_abs_max")

LONG_RUN = {"trainer.steps": 1000}

TWO_KINDS = PATIENT | {
    "labels": {"megarl.het-group": "0"},
    "pools": {"engines": {"labels": {"megarl.het-group": "1"}}},
    "rollout": {"pool": "engines"},
}


def read_steps(folder: Path) -> list[dict[str, Any]]:
    """Return the metrics of each step that must be reproducible."""
    rows = map(json.loads, (folder / "run/metrics.jsonl").read_text().splitlines())
    return [{name: row[name] for name in REPEATED} for row in rows if "loss" in row]


def test_two_nodes_and_one_have_the_same_losses(submit: Submit, world: Path, tmp_path: Path):
    losses = {}
    for nodes in (2, 1):
        folder = tmp_path / str(nodes)
        folder.mkdir()
        config = write_run(world, folder, placement={"nodes": nodes, "slots_per_node": 2 // nodes, **PATIENT})
        options = (f"--nodes={nodes}",)
        job = submit("train.sbatch", config, "--set", "trainer.steps=4", folder=folder, options=options)
        assert job.wait() == 0, job.output
        job.assert_nothing_is_left()
        losses[nodes] = read_steps(folder)
    assert len(losses[1]) == 4
    assert any(row["grad_norm"] > 0 for row in losses[1])
    assert losses[1] == losses[2]


def test_usr1_stops_the_run_after_its_step_and_requeues_it(submit: Submit, tmp_path: Path):
    job = submit("train.sbatch", CONFIG, *local_overrides(tmp_path, **LONG_RUN), REQUEUE="1")
    job.wait_for_step(2)
    job.cancel("--signal=USR1")
    job.wait_for_output(f"requeueing job {job.id}")
    said = re.search(r"stopped after step (\d+) of 1000 on SIGUSR1; model exported to (.*)", job.output)
    assert said is not None, job.output
    assert (Path(said[2]) / "model.safetensors").exists()
    assert int(said[1]) == job.last_step()
    job.assert_nothing_is_left()
    assert job.field("Restarts") == "1"
    job.wait_for_output(f"resuming from step {said[1]}: ")


def test_usr1_during_startup_exits_with_code_75(submit: Submit, tmp_path: Path):
    job = submit("train.sbatch", CONFIG, *local_overrides(tmp_path, **LONG_RUN))
    job.wait_for_output("nodes connected")
    job.cancel("--signal=USR1")
    assert job.wait() == 75, job.output
    assert "stopped before the first of 1000 steps on SIGUSR1" in job.output
    job.assert_nothing_is_left()


def test_sigterm_ends_all_tasks_gracefully(submit: Submit, tmp_path: Path):
    job = submit("train.sbatch", CONFIG, *local_overrides(tmp_path, **LONG_RUN))
    job.wait_for_step(1)
    # as `scancel` does if Slurm tracks processes by cgroup: signal the script and the launchers, not their children
    tasks = [
        process
        for process in job.find_live_processes()
        if (parent := process.parent()) and parent.name() == "slurmstepd"
    ]
    assert sorted(map(job.node_of, tasks)) == ["n1", "n1", "n2"]
    for task in tasks:
        task.terminate()
    assert job.wait() == 75, job.output
    assert " on SIGTERM; model exported to " in job.output
    job.assert_nothing_is_left()


def test_heterogeneous_job_places_pools_by_component(submit: Submit, world: Path, tmp_path: Path):
    config = write_run(world, tmp_path, placement=TWO_KINDS)
    job = submit("train.sbatch", config, options=("--nodes=1", ":", "--nodes=1", "--exclusive", "--mem=0"))
    job.wait_for_step(1)
    for kind, node in (("sglang::scheduler", "n2"), ("ray::WorkerHost", "n1")):
        nodes = {job.node_of(p) for p in job.find_live_processes() if process_title(p).startswith(kind)}
        assert nodes == {node}
    job.cancel()
    job.assert_nothing_is_left()


@pytest.mark.parametrize("seed", range(NUM_CANCELS))
def test_cancelling_at_a_random_time_leaves_no_process(seed: int, submit: Submit, tmp_path: Path):
    job = submit("train.sbatch", CONFIG, *local_overrides(tmp_path, **LONG_RUN))
    until = time.monotonic() + random.Random(seed).uniform(0.5, LATEST_CANCEL_SECONDS)
    while time.monotonic() < until:
        job.find_live_processes()
        time.sleep(POLL_SECONDS)
    assert not job.has_ended, job.output
    job.cancel()
    job.assert_nothing_is_left()
