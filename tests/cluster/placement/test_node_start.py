"""Start of a Ray node whose agents start late, or whose raylet ends."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.time_limits import HANG_SECONDS

HELD_AGENTS = """
import os, time

words = open("/proc/self/cmdline").read().split(chr(0))
if any(word.endswith(("dashboard/agent.py", "runtime_env/agent/main.py")) for word in words):
    free = os.environ["HELD_UNTIL"]
    while not os.path.exists(free):
        if not os.path.isdir(os.path.dirname(free)):
            os._exit(1)
        time.sleep(0.05)
"""
"""A sitecustomize: Ray's agents start when the file HELD_UNTIL exists; they end when its folder is gone."""


@pytest.fixture
def folder():
    """Return a folder whose path is short enough for sockets in it."""
    with tempfile.TemporaryDirectory(prefix="megarl-test-") as path:
        yield Path(path)


@pytest.fixture
def run(folder):
    """Run a program in which Ray's agents are held."""
    (folder / "sitecustomize.py").write_text(HELD_AGENTS)
    path = os.pathsep.join([str(folder), os.getcwd()])

    def start(program, stdin="", **variables):
        env = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
        return subprocess.run(
            [sys.executable, "-c", program],
            env=env | {"PYTHONPATH": path, "RAY_TMPDIR": str(folder), "HELD_UNTIL": str(folder / "free")} | variables,
            input=stdin,
            capture_output=True,
            text=True,
            timeout=2 * HANG_SECONDS,
        )

    return start


START_WITH_HELD_AGENTS = """
import os, ray
from pathlib import Path
from megarl.config.placement import PlacementConfig
from megarl.cluster.placement.pool import start_cluster

start_cluster(PlacementConfig())
started = ray.remote(lambda: os.environ["NAME"]).options(runtime_env={"env_vars": {"NAME": "value"}}).remote()
print("the agents run:", bool(ray.wait([started], timeout=0)[0]))
Path(os.environ["HELD_UNTIL"]).touch()
print(ray.get(started))
"""


def test_node_does_not_wait_for_its_agents(run, folder):
    ended = run(START_WITH_HELD_AGENTS)
    assert ended.stdout.splitlines() == ["the agents run: False", "value"], ended.stderr


WITH_ENDING_RAYLET = """
from pathlib import Path
from megarl.cluster.placement import pool

pool.persist_port = lambda folder, node_id, name, port: Path(folder, f"{name}_{node_id}").write_text("no number")
"""

START_CLUSTER = """
from megarl.config.placement import PlacementConfig
from megarl.errors import WorkerError
from megarl.cluster.placement.pool import start_cluster

try:
    start_cluster(PlacementConfig())
except WorkerError as e:
    print(e)
"""

FAILURE = "Ray did not start: its raylet ended with exit code 1: ["


def test_ended_raylet_ends_the_start_with_its_reason(run):
    ended = run(WITH_ENDING_RAYLET + START_CLUSTER, RAY_raylet_start_wait_time_s="1")
    [line] = ended.stdout.splitlines()
    assert line.startswith(FAILURE), line
    assert line.endswith(": no number"), line


def test_ended_raylet_ends_ray_start_with_its_reason(run, folder):
    arguments = ["--head", "--port=0", "--num-cpus=1", "--include-dashboard=false", f"--temp-dir={folder}", "--block"]
    request = {"arguments": arguments, "environment": {}, "timeout_seconds": HANG_SECONDS}
    program = WITH_ENDING_RAYLET + "from megarl.cluster.launch.ray_start import start\nstart()"
    ended = run(program, stdin=json.dumps(request) + "\n", RAY_raylet_start_wait_time_s="1")
    assert ended.returncode == 1
    assert [line for line in ended.stderr.splitlines() if line.startswith(FAILURE)], ended.stderr
    assert "Traceback" not in ended.stderr
