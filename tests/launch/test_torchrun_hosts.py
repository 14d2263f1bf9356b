"""torchrun's agents on hosts of their own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megarl.reshard.scenario import STRATEGIES
from tests.end_to_end.tiny_world import write_sft, write_world
from tests.launch.hosts import Command, Hosts, missing

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))

DELAY = 0.005
TIMED = ("tokens_per_second", "time/step_seconds")


@pytest.fixture
def hosts(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    with Hosts(2, tmp_path, shared=[tmp_path_factory.getbasetemp()], delay=DELAY) as hosts:
        yield hosts


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_world(tmp_path_factory.mktemp("world"))


def agents(hosts: Hosts, *module: str | Path, local_addr: bool) -> list[Command]:
    """An agent a host; the first keeps the rendezvous, which it knows by its name."""
    first, *_ = hosts
    flags = [
        "--nnodes",
        "2",
        "--nproc-per-node",
        "1",
        "--rdzv-backend",
        "c10d",
        "--rdzv-endpoint",
        f"{first.name}:29400",
    ]
    own = {host: ["--local-addr", host.address] if local_addr else [] for host in hosts}
    return [host.start("torchrun", *flags, *own[host], "-m", *module) for host in hosts]


def metrics(folder: Path) -> list[dict[str, float]]:
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k not in TIMED} for line in lines]


def test_two_hosts_fine_tune_as_one_does(hosts: Hosts, world: Path, tmp_path: Path) -> None:
    sections: dict[str, Any] = {"trainer": {"steps": 3, "batch_size": 8, "parallel": {"pp": 2}}}
    for command in agents(hosts, "megarl", "sft", write_sft(world, tmp_path, **sections), local_addr=False):
        assert command.wait(60) == 0, command.stderr
    seen = metrics(tmp_path)
    a, b = hosts
    assert not b.processes()
    alone = ("torchrun", "--standalone", "--nproc-per-node", "2", "-m", "megarl", "sft")
    a.run(*alone, write_sft(world, tmp_path, **sections))
    assert len(seen) == 3
    assert seen == metrics(tmp_path)


@pytest.mark.slow
def test_the_benchmark_moves_weights_between_hosts(hosts: Hosts) -> None:
    options = ("--model=synthetic:1", "--train=dp=2", "--gen=tp=2", "--nodes=2", "--repeats=3", "--json")
    writer, other = agents(hosts, "benchmarks.reshard", *options, local_addr=True)
    assert writer.wait(120) == 0, writer.stderr
    assert other.wait(10) == 0, other.stderr
    reports = [json.loads(line) for line in (writer.stdout + other.stdout).splitlines()]
    assert {report["strategy"] for report in reports} >= set(STRATEGIES)
    assert all(report["mismatched_bytes"] == 0 for report in reports)
    assert all(report["sync_seconds_p50"] > DELAY for report in reports)
