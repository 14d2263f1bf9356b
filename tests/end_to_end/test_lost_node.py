"""A run that loses a node waits for a replacement and resumes on it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.conftest import Launch
from tests.end_to_end.launched import LaunchedCommand, process_title
from tests.end_to_end.tiny_world import write_run

pytestmark = pytest.mark.slow

TWO: dict[str, Any] = {
    "placement": {"nodes": 2, "slots_per_node": 1, "node_checks": False},
    "checkpoint": {"every": 5},
    "trainer": {"steps": 100_000},
}


def join(launch: Launch) -> LaunchedCommand:
    """Start another Ray node of the cluster on this machine."""
    options = ["--block", "--num-cpus=1", "--object-store-memory=100000000", "--disable-usage-stats"]
    node = launch("start", f"--address={os.environ['RAY_ADDRESS']}", *options, program="ray")
    node.wait_until(lambda: "Ray runtime started" in node.stdout + node.stderr)
    return node


def lose(node: LaunchedCommand) -> None:
    for process in node.find_live_processes():
        if Path(process_title(process).split(" ")[0]).name == "raylet":
            process.kill()
    node.end()


def test_run_resumes_on_a_replacement_node(world: Path, tmp_path: Path, launch: Launch, head: LaunchedCommand) -> None:
    second = join(launch)
    run = launch("train", write_run(world, tmp_path, **TWO), keeps_ray_address=True)
    run.wait_for_step(6)
    at = run.steps_done()
    lose(second)
    run.wait_until(lambda: "replacement nodes" in run.stdout)
    join(launch)
    run.wait_until(lambda: "resuming from step" in run.stdout)
    run.wait_until(lambda: run.steps_done() > at + 5)


def test_run_without_replacement_node_ends_with_exit_code_4(
    world: Path, tmp_path: Path, launch: Launch, head: LaunchedCommand
) -> None:
    second = join(launch)
    recovery = {"node_wait_seconds": 3.0}
    run = launch("train", write_run(world, tmp_path, **TWO, recovery=recovery), keeps_ray_address=True)
    run.wait_for_step(6)
    lose(second)
    assert run.wait() == 4, run.stdout + run.stderr
    assert "no node replaced them within 3 s (recovery.node_wait_seconds): placement: " in run.stderr
    assert "--resume auto resumes from the newest checkpoint" in run.stderr
    assert list((tmp_path / "run" / "checkpoints").iterdir())
