"""Commands under torchrun on simulated hosts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megarl.reshard.analysis.scenario import STRATEGIES
from tests.end_to_end.tiny_world import write_sft
from tests.launch.hosts import Hosts

TIMED = ("tokens_per_second", "time/step_seconds")


def read_metrics(folder: Path) -> list[dict[str, float]]:
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k not in TIMED} for line in lines]


@pytest.mark.slow
def test_sft_on_two_hosts_matches_one_host(hosts: Hosts, world: Path, tmp_path: Path) -> None:
    sections: dict[str, Any] = {"trainer": {"steps": 3, "batch_size": 8, "parallel": {"pp": 2}}}
    for command in hosts.torchrun("megarl", "sft", write_sft(world, tmp_path, **sections), local_addr=False):
        assert command.wait() == 0, command.stderr
    seen = read_metrics(tmp_path)
    a, b = hosts
    assert not b.processes()
    standalone = ("torchrun", "--standalone", "--nproc-per-node", "2", "-m", "megarl", "sft")
    a.run(*standalone, write_sft(world, tmp_path, **sections))
    assert len(seen) == 3
    assert seen == read_metrics(tmp_path)


@pytest.mark.slow
def test_reshard_benchmark_on_two_hosts(hosts: Hosts) -> None:
    options = ("--model=synthetic:1", "--train=tp=2", "--gen=tp=1", "--nodes=2", "--repeats=3", "--json")
    writer, other = hosts.torchrun("benchmarks.reshard", *options)
    assert writer.wait() == 0, writer.stderr
    assert other.wait() == 0, other.stderr
    reports = [json.loads(line) for line in (writer.stdout + other.stdout).splitlines()]
    assert {report["strategy"] for report in reports} >= set(STRATEGIES), writer.stderr
    assert all(report["mismatched_bytes"] == 0 for report in reports)
    assert all(report["sync_seconds_p50"] > 0 for report in reports)
