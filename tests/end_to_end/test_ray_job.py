"""A run that is submitted as a job to an existing Ray cluster, which remains."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.end_to_end.conftest import StartHead
from tests.end_to_end.launched import process_title
from tests.end_to_end.tiny_world import run_tree
from tests.time_limits import HANG_SECONDS, wait_until

pytestmark = pytest.mark.slow

REWARD = """
def score(trajectory, text, row):
    return float("1" in text)
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def submit(server: str, folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    ray = Path(sys.executable).with_name("ray")
    where = ["job", "submit", "--address", server, "--working-dir", str(folder), "--"]
    return subprocess.run([ray, *where, *command], capture_output=True, text=True, check=False, timeout=HANG_SECONDS)


def test_submitted_run_uses_its_working_dir_and_keeps_the_cluster(
    world: Path, tmp_path: Path, start_head: StartHead
) -> None:
    port = free_port()
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
    assert wait_until(lambda: "sglang::scheduler" not in map(process_title, head.find_live_processes()))

    shutil.rmtree(tmp_path / "run")
    done = submit(server, sent, sys.executable, "-m", "megarl", "train", "run.yaml", "--set", "rollout.tp=2")
    assert done.returncode == 1
    assert "rollout needs tp * replicas <= slots, got 2 * 1 = 2 > 1" in done.stdout
    assert "exit code 2" in done.stdout
    assert not (tmp_path / "run").exists()
