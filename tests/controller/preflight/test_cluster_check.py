"""Two Ray nodes on this machine, checked through a probe actor on each."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import ray

from megarl.cluster.placement.assign import ClusterNode, cluster_nodes
from megarl.cluster.placement.hardware import free_shared_memory
from megarl.config.placement import PlacementConfig
from megarl.controller.preflight import cluster_check
from megarl.controller.preflight.cluster_check import RequiredPaths, check_nodes_or_raise, cluster_probe
from megarl.controller.preflight.cluster_findings import MIN_MEMORY, MIN_SHARED_MEMORY, messages
from megarl.controller.preflight.node_report import ProbeRequest
from megarl.errors import ConfigError
from tests.cli.tiny_run import write_config, write_tiny_run
from tests.time_limits import END_SECONDS, HANG_SECONDS, wait_until

NOTHING = ProbeRequest(readable={}, writable={}, token="token")
PATIENT = PlacementConfig(node_check_timeout_seconds=HANG_SECONDS)


@pytest.fixture(scope="module")
def second_node(cluster: None) -> Iterator[psutil.Process]:
    """Process of a second node of the tests' cluster, on the same machine, for the duration of the module."""
    if psutil.virtual_memory().available < 2 * MIN_MEMORY or (free_shared_memory() or 0) < 2 * MIN_SHARED_MEMORY:
        pytest.skip("needs 4 GiB of free memory, and 1 GiB of it in /dev/shm")
    address = ray.get_runtime_context().gcs_address
    folder = tempfile.TemporaryDirectory(prefix="megarl-test-")  # that of Ray may be of another user
    limits = ["--num-cpus=1", "--object-store-memory=100000000", "--min-worker-port=0", "--max-worker-port=0"]
    others = ["--labels=megarl.node-rank=1", f"--temp-dir={folder.name}", "--block"]
    arguments = [f"--address={address}", *limits, *others]
    request = {"arguments": arguments, "environment": {}, "timeout_seconds": HANG_SECONDS}
    node = subprocess.Popen(
        [sys.executable, "-m", "megarl.cluster.launch.ray_start"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert node.stdin is not None
    with node.stdin as stdin:
        stdin.write(json.dumps(request) + "\n")
    try:
        assert wait_until(lambda: len(cluster_nodes()) == 2)
        yield psutil.Process(node.pid)
    finally:
        descendants = psutil.Process(node.pid).children(recursive=True)
        node.terminate()
        node.wait(HANG_SECONDS)
        for process in psutil.wait_procs(descendants, END_SECONDS)[1]:
            process.kill()
        assert wait_until(lambda: len(cluster_nodes()) == 1)
        folder.cleanup()


def probe_actors(node: psutil.Process) -> list[psutil.Process]:
    return [
        p for p in node.children(recursive=True) if p.cmdline()[:1] == ["ray::ProbeActor"] or "ProbeActor" in p.name()
    ]


def test_doctor_reports_healthy_nodes_as_ready(second_node: psutil.Process, tmp_path: Path) -> None:
    tree = write_tiny_run(tmp_path) | {"placement": {"nodes": 2, "node_check_timeout_seconds": HANG_SECONDS}}
    command = ["doctor", "--cluster", "--json", "--config", str(write_config(tmp_path / "run.yaml", tree))]
    environment = os.environ | {"RAY_ADDRESS": ray.get_runtime_context().gcs_address}
    done = subprocess.run(
        [sys.executable, "-m", "megarl", *command],
        env=environment,
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    check = json.loads(done.stdout)
    assert check["sentences"] == check["problems"] == []
    first, second = check["reports"]
    assert "node rank 1" in first["name"]
    assert first["versions"] == second["versions"]
    clock = first["clock"]
    assert abs(clock["ahead_seconds"]) <= clock["uncertainty_seconds"] + 0.001
    for report in (first, second):
        paths = {path["key"]: path for path in report["facts"]["paths"]}
        assert set(paths) == {"data.path", "data.eval_path", "model.path", "run_dir"}
        assert paths["data.path"]["num_bytes"] == (tmp_path / "train.jsonl").stat().st_size
        assert not any(path["trouble"] for path in paths.values())
    assert sorted(p.name for p in tmp_path.iterdir()) == ["heldout.jsonl", "model", "run.yaml", "train.jsonl"]
    assert wait_until(lambda: not probe_actors(second_node))


def test_problems_are_raised_and_printed(
    second_node: psutil.Process, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    places = RequiredPaths(readable={"data.path": str(tmp_path / "none")}, writable={"run_dir": str(tmp_path)})
    with pytest.raises(ConfigError) as raised:
        check_nodes_or_raise(PATIENT, places)
    assert str(raised.value) == f"all 2 nodes: cannot see data.path {tmp_path / 'none'}; is the file system shared?"
    assert "data.path" in capfd.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_hung_or_dead_probe_actor_is_reported(second_node: psutil.Process) -> None:
    nodes = cluster_nodes()
    with cluster_probe(nodes, timeout_seconds=HANG_SECONDS) as probe:
        reports = probe.collect_reports(NOTHING)
        assert probe.all_reduce(reports, "gloo") == probe.all_reduce(reports, "nccl") == []
        (actor,) = probe_actors(second_node)
        probe.timeout_seconds = 1.0  # of the store, which the stopped actor is to open
        actor.send_signal(signal.SIGSTOP)
        (problem,) = probe.all_reduce(reports, "gloo")
        gloo = reports[0].facts and reports[0].facts.gloo
        assert gloo
        assert messages([problem], 2) == [
            f"node {nodes[0].name}: all-reduce with the other nodes failed over gloo on {gloo.name}, by "
            f"its host name ({gloo.address}): no answer within 1 s"
        ]
        actor.kill()
        probe.timeout_seconds = HANG_SECONDS
        first, second = probe.collect_reports(NOTHING)
        assert str(first.failure).startswith("the probe process failed to start: ")
        assert (first.facts, second.failure) == (None, None)
        assert messages(probe.check_reachability([first, second]), 2) == []


def test_a_lost_node_is_reported(cluster: None) -> None:
    ghost = ClusterNode(id="a" * 56, address="10.0.0.9", hostname="ghost", cpus=1, gpus=0)
    with cluster_probe([ghost], timeout_seconds=HANG_SECONDS) as probe:
        (report,) = probe.collect_reports(NOTHING)
    assert report.name == "ghost (10.0.0.9)"
    assert str(report.failure).startswith("the probe process failed to start: ")


def test_checks_run_if_configured_or_on_several_nodes(
    second_node: psutil.Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert check_nodes_or_raise(PlacementConfig(node_checks=False), RequiredPaths()) is None
    one, _ = cluster_nodes()
    monkeypatch.setattr(cluster_check, "cluster_nodes", lambda: [one])
    assert check_nodes_or_raise(PATIENT, RequiredPaths()) is None
    line = check_nodes_or_raise(
        PlacementConfig(node_checks=True, node_check_timeout_seconds=HANG_SECONDS), RequiredPaths()
    )
    assert re.fullmatch(r"1 node checked in \d+\.\d s", str(line))
