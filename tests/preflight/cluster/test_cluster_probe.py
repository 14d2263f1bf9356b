"""Two Ray nodes on this machine, as an agent on each sees them."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import ray

from megarl.config.placement import PlacementConfig
from megarl.errors import ConfigError
from megarl.placement.nodes import ClusterNode, cluster_nodes
from megarl.preflight.cluster import cluster_check
from megarl.preflight.cluster.cluster_check import Places, require_sound_nodes
from megarl.preflight.cluster.cluster_probe import surveyed
from megarl.preflight.cluster.findings import sentences
from megarl.preflight.cluster.node_report import Question
from tests.cli.tiny_run import write_config, write_tiny_run
from tests.end_to_end.launched import wait_until

NOTHING = Question(readable={}, writable={}, token="token")
SECONDS = 20.0


@pytest.fixture(scope="module")
def second_node(cluster: None) -> Iterator[psutil.Process]:
    """The process that keeps another node of the tests' cluster, on the same machine, until the module ends."""
    address = ray.get_runtime_context().gcs_address
    options = ["--num-cpus=1", "--object-store-memory=100000000", "--min-worker-port=0", "--max-worker-port=0"]
    ray_command = Path(sys.executable).parent / "ray"
    node = subprocess.Popen(
        [ray_command, "start", f"--address={address}", *options, "--labels=megarl.node-rank=1", "--block"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        assert wait_until(lambda: len(cluster_nodes()) == 2, SECONDS)
        yield psutil.Process(node.pid)
    finally:
        descendants = psutil.Process(node.pid).children(recursive=True)
        node.terminate()
        node.wait(SECONDS)
        for process in psutil.wait_procs(descendants, 5)[1]:
            process.kill()
        assert wait_until(lambda: len(cluster_nodes()) == 1, SECONDS)


def agents(node: psutil.Process) -> list[psutil.Process]:
    return [
        p for p in node.children(recursive=True) if p.cmdline()[:1] == ["ray::NodeAgent"] or "NodeAgent" in p.name()
    ]


def test_sound_nodes_are_ready_for_a_run(second_node: psutil.Process, tmp_path: Path) -> None:
    tree = write_tiny_run(tmp_path) | {"placement": {"nodes": 2}}
    command = ["doctor", "--cluster", "--json", "--config", str(write_config(tmp_path / "run.yaml", tree))]
    environment = os.environ | {"RAY_ADDRESS": ray.get_runtime_context().gcs_address}
    done = subprocess.run(
        [sys.executable, "-m", "megarl", *command], env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr
    check = json.loads(done.stdout)
    assert check["sentences"] == check["problems"] == []
    first, second = check["reports"]
    assert "node rank 1" in first["name"]
    assert first["versions"] == second["versions"]
    assert abs(first["clock"]["ahead_seconds"]) < 1
    for report in (first, second):
        paths = {path["key"]: path for path in report["facts"]["paths"]}
        assert set(paths) == {"data.path", "data.eval_path", "model.path", "run_dir"}
        assert paths["data.path"]["num_bytes"] == (tmp_path / "train.jsonl").stat().st_size
        assert not any(path["trouble"] for path in paths.values())
    assert sorted(p.name for p in tmp_path.iterdir()) == ["heldout.jsonl", "model", "run.yaml", "train.jsonl"]
    assert wait_until(lambda: not agents(second_node), 5)


def test_what_is_wrong_is_said_and_shown(
    second_node: psutil.Process, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    places = Places(readable={"data.path": str(tmp_path / "none")}, writable={"run_dir": str(tmp_path)})
    with pytest.raises(ConfigError) as raised:
        require_sound_nodes(PlacementConfig(), places)
    assert str(raised.value) == f"all 2 nodes: cannot see data.path {tmp_path / 'none'}; is the file system shared?"
    assert "data.path" in capfd.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_node_that_does_not_come_is_named(second_node: psutil.Process) -> None:
    nodes = cluster_nodes()
    with surveyed(nodes, timeout_seconds=SECONDS) as survey:
        reports = survey.reports(NOTHING)
        assert survey.reduce(reports, "gloo") == survey.reduce(reports, "nccl") == []
        (agent,) = agents(second_node)
        survey.timeout_seconds = 1.5
        agent.send_signal(signal.SIGSTOP)
        (problem,) = survey.reduce(reports, "gloo")
        gloo = reports[0].facts and reports[0].facts.gloo
        assert gloo
        assert sentences([problem], 2) == [
            f"node {nodes[0].name}: did not add up a number with the other nodes over gloo on {gloo.name}, by "
            f"its host name ({gloo.address}): no answer within 1.5 s"
        ]
        agent.kill()
        survey.timeout_seconds = SECONDS
        first, second = survey.reports(NOTHING)
        assert str(first.failure).startswith("no process of megarl runs there: ")
        assert (first.facts, second.failure) == (None, None)
        assert sentences(survey.unreached([first, second]), 2) == []


def test_a_node_that_is_gone_is_named(cluster: None) -> None:
    ghost = ClusterNode(id="a" * 56, address="10.0.0.9", hostname="ghost", cpus=1, gpus=0)
    with surveyed([ghost], timeout_seconds=SECONDS) as survey:
        (report,) = survey.reports(NOTHING)
    assert report.name == "ghost (10.0.0.9)"
    assert str(report.failure).startswith("no process of megarl runs there: ")


def test_checks_are_asked_for_or_due_to_several_nodes(
    second_node: psutil.Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert require_sound_nodes(PlacementConfig(node_checks=False), Places()) is None
    one, _ = cluster_nodes()
    monkeypatch.setattr(cluster_check, "cluster_nodes", lambda: [one])
    assert require_sound_nodes(PlacementConfig(), Places()) is None
    line = require_sound_nodes(PlacementConfig(node_checks=True), Places())
    assert re.fullmatch(r"1 node checked in \d+\.\d s", str(line))
