"""Job scripts on two Slurm nodes: training, errors on one node, early stops, cancellation, and heterogeneous jobs."""

import random
import re
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.launch.conftest import PATIENT
from tests.cluster.launch.slurm.cluster import NODES
from tests.cluster.launch.slurm.job import POLL_SECONDS, Job
from tests.end_to_end.launched import COMPARED_METRICS, list_steps, process_title
from tests.end_to_end.tiny_world import write_run, write_sft

CONFIG = "yaml/demo-2node.yaml"

OLD_RAY_ON_N2 = """\
#!/usr/bin/env bash
[[ $SLURMD_NODENAME == n2 ]] && export PYTHONPATH={folder}${{PYTHONPATH:+:$PYTHONPATH}}
exec {megarl} "$@"
"""


def pools_by_label(label: str) -> dict[str, Any]:
    """Return a section `placement` of trainers on nodes where the label is 0, and engines where it is 1."""
    engines = {"labels": {label: "1"}}
    return {"labels": {label: "0"}, "pools": {"engines": engines}, "rollout": {"pool": "engines"}, **PATIENT}


def local_overrides(folder: Path, **values: object) -> list[str]:
    """Return overrides that make the run write only to `folder`, with few prompts and much patience."""
    values = {"run_dir": folder / "run", "model.path": folder / "model", "algorithm.prompts_per_step": 4} | values
    values |= {f"placement.{name}": value for name, value in PATIENT.items()}
    return [word for key, value in values.items() for word in ("--set", f"{key}={value}")]


def cancel_once_training(job: Job, placed: dict[str, list[str]]) -> None:
    """Cancel a job in its third step; nothing of it may be left.

    Args:
        placed: beginning of the titles of processes -> the node of each of them.
    """
    job.wait_for_step(2)
    for kind, nodes in placed.items():
        workers = [process for process in job.find_live_processes() if process_title(process).startswith(kind)]
        assert sorted(map(job.node_of, workers)) == nodes, [process_title(p) for p in job.find_live_processes()]
    job.cancel()
    job.assert_nothing_is_left()
    job.wait()
    assert job.field("JobState") == "CANCELLED"


def test_trainer_and_engine_on_two_nodes_train_until_cancelled(submit, world, tmp_path):
    config = write_run(world, tmp_path, placement=pools_by_label("megarl.node-rank"))
    job = submit("train.sbatch", config, "--set", "trainer.steps=1000")
    cancel_once_training(job, {"ray::WorkerHost": ["n1"], "sglang::scheduler": ["n2"]})


@pytest.mark.slow
def test_demo_config_trains_on_both_nodes_until_cancelled(submit, tmp_path):
    job = submit("train.sbatch", CONFIG, *local_overrides(tmp_path, **{"trainer.steps": 1000}))
    cancel_once_training(job, {"ray::WorkerHost": list(NODES), "sglang::scheduler": list(NODES)})


def test_job_fails_and_names_the_node_with_other_packages(submit, tmp_path):
    old = tmp_path / "ray-0.1.dist-info/METADATA"
    old.parent.mkdir()
    old.write_text("Metadata-Version: 2.1\nName: ray\nVersion: 0.1\n")
    megarl = tmp_path / "venv/bin/megarl"
    megarl.parent.mkdir(parents=True)
    megarl.write_text(OLD_RAY_ON_N2.format(folder=tmp_path, megarl=Path(sys.executable).with_name("megarl")))
    megarl.chmod(0o755)
    job = submit("train.sbatch", CONFIG, *local_overrides(tmp_path), VENV=str(tmp_path / "venv"))
    assert job.wait() == 1
    assert "error: node n2 (127.0.0.1, rank 1) has ray 0.1, n1 (rank 0) has " in job.output
    assert "Ray head started" not in job.output
    assert job.find_live_processes() == []


def test_sft_on_two_nodes(submit, world, tmp_path):
    job = submit("sft.sbatch", write_sft(world, tmp_path), "--set", "trainer.steps=2", PROCS_PER_NODE="1")
    assert job.wait() == 0, job.output
    assert job.last_step() == 2
    assert (tmp_path / "run/model/model.safetensors").exists()
    assert "nodes: 2" in (tmp_path / "run/sft.yaml").read_text()
    job.assert_nothing_is_left()


@pytest.mark.slow
def test_reshard_benchmark_on_two_nodes(submit):
    layout = ("--train", "tp=2", "--gen", "tp=1")
    job = submit("bench_reshard.sbatch", "--model", "synthetic:4", *layout, "--strategies", "exact", PROCS_PER_NODE="1")
    assert job.wait() == 0, job.output
    # on a busy machine, torch adds warnings
    heading, row = (line for line in job.output.splitlines() if line.startswith(("strategy ", "exact ")))
    assert heading.split()[0] == "strategy"
    assert row.split()[0] == "exact"
    assert row.split()[-1] == "0"  # mismatched bytes


NUM_CANCELS = 20
LATEST_CANCEL_SECONDS = 60.0
"""By this time a run on two idle cores has finished some steps."""
LONG_RUN = {"trainer.steps": 1000}


def read_steps(folder: Path) -> list[dict[str, Any]]:
    """Return the metrics of each step that must be reproducible."""
    return [{name: row[name] for name in COMPARED_METRICS} for row in list_steps(folder / "run")]


@pytest.mark.slow
def test_two_nodes_and_one_have_the_same_losses(submit, world, tmp_path):
    losses = {}
    for nodes in (2, 1):
        folder = tmp_path / str(nodes)
        folder.mkdir()
        # with two slots a node, the ranks of two nodes are called through relays
        config = write_run(world, folder, placement={"nodes": nodes, "slots_per_node": 4 // nodes, **PATIENT})
        options = (f"--nodes={nodes}",)
        job = submit("train.sbatch", config, "--set", "trainer.steps=4", folder=folder, options=options)
        assert job.wait() == 0, job.output
        job.assert_nothing_is_left()
        losses[nodes] = read_steps(folder)
    assert len(losses[1]) == 4
    assert any(row["grad_norm"] > 0 for row in losses[1])
    assert losses[1] == losses[2]


@pytest.mark.slow
def test_usr1_stops_the_run_after_its_step_and_requeues_it(submit, tmp_path):
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


@pytest.mark.slow
def test_usr1_during_startup_exits_with_code_75(submit, tmp_path):
    job = submit("train.sbatch", CONFIG, *local_overrides(tmp_path, **LONG_RUN))
    job.wait_for_output("nodes connected")
    job.cancel("--signal=USR1")
    assert job.wait() == 75, job.output
    assert "stopped before the first of 1000 steps on SIGUSR1" in job.output
    job.assert_nothing_is_left()


@pytest.mark.slow
def test_sigterm_ends_all_tasks_gracefully(submit, tmp_path):
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


@pytest.mark.slow
def test_heterogeneous_job_places_pools_by_component(submit, world, tmp_path):
    config = write_run(world, tmp_path, placement=pools_by_label("megarl.het-group"))
    job = submit("train.sbatch", config, options=("--nodes=1", ":", "--nodes=1", "--exclusive", "--mem=0"))
    job.wait_for_step(1)
    for kind, node in (("sglang::scheduler", "n2"), ("ray::WorkerHost", "n1")):
        nodes = {job.node_of(p) for p in job.find_live_processes() if process_title(p).startswith(kind)}
        assert nodes == {node}
    job.cancel()
    job.assert_nothing_is_left()


@pytest.mark.parametrize("seed", range(NUM_CANCELS))
@pytest.mark.slow
def test_cancelling_at_a_random_time_leaves_no_process(seed, submit, tmp_path):
    job = submit("train.sbatch", CONFIG, *local_overrides(tmp_path, **LONG_RUN))
    until = time.monotonic() + random.Random(seed).uniform(0.5, LATEST_CANCEL_SECONDS)
    while time.monotonic() < until:
        job.find_live_processes()
        time.sleep(POLL_SECONDS)
    assert not job.has_ended, job.output
    job.cancel()
    job.assert_nothing_is_left()
