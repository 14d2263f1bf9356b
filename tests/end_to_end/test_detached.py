"""Detached runs: they continue on a Ray cluster without a client."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from tests.end_to_end.conftest import Launch
from tests.end_to_end.launched import LaunchedCommand, process_title
from tests.end_to_end.tiny_world import write_run
from tests.time_limits import wait_until

pytestmark = pytest.mark.slow

LONG = {"trainer": {"steps": 100_000}, "placement": {"slots_per_node": 1}, "checkpoint": {"every": 5}}


def ours(head: LaunchedCommand) -> list[str]:
    return sorted(
        {process_title(p) for p in head.find_live_processes() if process_title(p).startswith(("ray::", "sglang::"))}
    )


def test_detached_run_continues_without_a_client(
    world: Path, tmp_path: Path, launch: Launch, head: LaunchedCommand
) -> None:
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
    assert wait_until(lambda: not any("Controller" in n or "sglang" in n for n in ours(head))), ours(head)
    late = launch("attach", folder, keeps_ray_address=True)
    assert late.wait() == 2
    assert "no controller is running in the Ray cluster" in late.stderr
    assert "last heartbeat at" in late.stderr


def test_detach_without_a_ray_address_is_refused(world: Path, tmp_path: Path, launch: Launch) -> None:
    train = launch("train", write_run(world, tmp_path, **LONG), "--detach")
    assert train.wait() == 2
    assert train.stderr.startswith("error: --detach needs RAY_ADDRESS: ")
    attached = launch("attach", tmp_path / "run")
    assert attached.wait() == 2
