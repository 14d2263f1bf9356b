"""Runs on a Ray cluster that exists before them: submitted jobs, detached runs, and a lost node."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from megarl.cluster.process.ports import find_unused_port
from tests.end_to_end.conftest import Launch
from tests.end_to_end.launched import LaunchedCommand, process_title, run_program
from tests.end_to_end.tiny_world import run_tree, write_run
from tests.time_limits import wait_until

pytestmark = pytest.mark.slow

REWARD = """
def score(trajectory, text, row):
    return float("1" in text)
"""


def submit(server: str, folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """Submit a job, once an agent of the cluster takes jobs, and return its output at its end."""
    ray = Path(sys.executable).with_name("ray")
    where = ["job", "submit", "--address", server, "--working-dir", str(folder), "--"]
    tried: list[subprocess.CompletedProcess[str]] = []

    def is_taken() -> bool:
        tried.append(run_program(ray, *where, *command))
        return "No available agent to submit job" not in tried[-1].stderr

    assert wait_until(is_taken), tried[-1].stderr
    return tried[-1]


def test_submitted_run_uses_its_working_dir_and_keeps_the_cluster(world, tmp_path, start_head):
    port = find_unused_port()
    head, server = start_head("--include-dashboard=true", f"--dashboard-port={port}"), f"http://127.0.0.1:{port}"
    head.wait_until(lambda: "Ray runtime started" in head.stderr + head.stdout)
    sent = tmp_path / "sent"
    sent.mkdir()
    reward = {"terms": {"one": {"type": "python", "path": "my_rewards:score"}}}
    tree = run_tree(world, tmp_path / "run", reward=reward, trainer={"steps": 2}, placement={"slots_per_node": 1})
    (sent / "run.yaml").write_text(yaml.safe_dump(tree))
    (sent / "my_rewards.py").write_text(REWARD)

    done = submit(server, sent, sys.executable, "-m", "megarl", "train", "run.yaml")
    assert done.returncode == 0, done.stdout + done.stderr
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) >= 2
    assert (tmp_path / "run" / "model" / "model.safetensors").exists()
    assert wait_until(lambda: "sglang::scheduler" not in titles(head))

    shutil.rmtree(tmp_path / "run")
    done = submit(server, sent, sys.executable, "-m", "megarl", "train", "run.yaml", "--set", "rollout.tp=2")
    assert done.returncode == 1
    assert "rollout needs tp * replicas <= slots, got 2 * 1 = 2 > 1" in done.stdout
    assert "exit code 2" in done.stdout
    assert not (tmp_path / "run").exists()


LONG = {"trainer": {"steps": 100_000}, "placement": {"slots_per_node": 1}, "checkpoint": {"every": 5}}


def titles(head: LaunchedCommand) -> list[str]:
    return [process_title(process) for process in head.find_live_processes()]


def test_detached_run_continues_without_a_client(world, tmp_path, launch, head):
    config, folder = write_run(world, tmp_path, **LONG), tmp_path / "run"
    train = launch("train", config, "--detach", keeps_ray_address=True)
    assert train.wait() == 0, train.stderr
    assert f"megarl attach {folder}" in train.stdout
    head.wait_until(lambda: train.steps_done() >= 3)

    follower = launch("attach", folder, keeps_ray_address=True)
    follower.wait_until(lambda: "step " in follower.stdout)
    follower.send(signal.SIGKILL)
    follower.wait()
    (controller,) = (p for p in head.find_live_processes() if process_title(p).startswith("ray::Controller"))
    controller.kill()
    at = train.steps_done()
    head.wait_until(lambda: (folder / "checkpoints").exists() and train.steps_done() >= at + 20)

    refused = launch("attach", folder, "--set", "reward.terms.nope.weight=2", keeps_ray_address=True)
    assert refused.wait() == 2
    assert "needs a term of the run's reward, one of one, got 'nope'" in refused.stderr
    changing = launch("attach", folder, "--set", "reward.terms.one.weight=0.5", keeps_ray_address=True)
    changing.wait_until(lambda: "reward.terms.one.weight is 0.5 from now on, was 1" in changing.stdout)
    changing.send(signal.SIGINT)
    changing.wait()

    stopped = launch("attach", folder, "--stop", keeps_ray_address=True)
    assert stopped.wait() == 75, stopped.stderr
    assert " on megarl attach --stop; model exported to " in stopped.stderr
    beat = json.loads((folder / "heartbeat.json").read_text())
    assert beat["status"] == "ended"
    ours = ("ray::Controller", "sglang::")
    assert wait_until(lambda: not any(title.startswith(ours) for title in titles(head))), titles(head)
    late = launch("attach", folder, keeps_ray_address=True)
    assert late.wait() == 2
    assert "no controller is running in the Ray cluster" in late.stderr
    assert "last heartbeat at" in late.stderr


def test_detach_without_a_ray_address_is_refused(world, tmp_path, launch):
    train = launch("train", write_run(world, tmp_path, **LONG), "--detach")
    assert train.wait() == 2
    assert train.stderr.startswith("error: --detach needs RAY_ADDRESS: ")
    attached = launch("attach", tmp_path / "run")
    assert attached.wait() == 2


TWO: dict[str, Any] = {
    "placement": {"nodes": 2, "slots_per_node": 1, "node_checks": False},
    "checkpoint": {"every": 5},
    "trainer": {"steps": 100_000},
}


def join(launch: Launch) -> LaunchedCommand:
    options = ["--block", "--num-cpus=1", "--object-store-memory=100000000", "--disable-usage-stats"]
    node = launch("start", f"--address={os.environ['RAY_ADDRESS']}", *options, program="ray")
    node.wait_until(lambda: "Ray runtime started" in node.stdout + node.stderr)
    return node


def lose(node: LaunchedCommand) -> None:
    for process in node.find_live_processes():
        if Path(process_title(process).split(" ")[0]).name == "raylet":
            process.kill()
    node.end()


def test_run_resumes_on_a_replacement_node(world, tmp_path, launch, head):
    second = join(launch)
    run = launch("train", write_run(world, tmp_path, **TWO), keeps_ray_address=True)
    run.wait_for_step(6)
    at = run.steps_done()
    lose(second)
    run.wait_until(lambda: "replacement nodes" in run.stdout)
    join(launch)
    run.wait_until(lambda: "resuming from step" in run.stdout)
    run.wait_until(lambda: run.steps_done() > at + 5)


def test_run_without_replacement_node_ends_with_exit_code_4(world, tmp_path, launch, head):
    second = join(launch)
    recovery = {"node_wait_seconds": 3.0}
    run = launch("train", write_run(world, tmp_path, **TWO, recovery=recovery), keeps_ray_address=True)
    run.wait_for_step(6)
    lose(second)
    assert run.wait() == 4, run.stdout + run.stderr
    assert "no node replaced them within 3 s (recovery.node_wait_seconds): placement: " in run.stderr
    assert "--resume auto resumes from the newest checkpoint" in run.stderr
    assert list((tmp_path / "run" / "checkpoints").iterdir())
