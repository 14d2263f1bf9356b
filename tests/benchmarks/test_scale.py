"""The cost of weight sync at scale, on a small case with room in every budget."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from benchmarks.reshard.scale import ScaleReport

SMALL = ("--model=qwen3-8b", "--train=pp=2,tp=2", "--ranks=32", "--gen=tp=4", "--engine-ranks=16", "--sample=1")
ROOM = 5
"""Factor by which the machine may be slower than when the budgets were set."""


@pytest.fixture(scope="module")
def reports() -> dict[str, ScaleReport]:
    """Return the reports of both arrangements by name."""
    command = [sys.executable, "-m", "benchmarks.reshard.scale", *SMALL, "--json"]  # which forks: in a fresh process
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    found = [ScaleReport(**json.loads(line)) for line in output.splitlines()]
    assert [report.arrangement for report in found] == ["colocated", "disaggregated"]
    return {report.arrangement: report for report in found}


@pytest.mark.parametrize("arrangement", ["colocated", "disaggregated"])
def test_costs_are_within_their_budgets(reports: dict[str, ScaleReport], arrangement: str) -> None:
    report = reports[arrangement]
    assert (report.trainer_ranks, report.engine_ranks) == (32, 16)
    assert report.connect_cpu_seconds_per_rank < 0.15 * ROOM
    assert report.connect_host_mb_per_rank < 20
    assert report.connect_message_mb_per_rank < 0.05
    assert report.controller_connect_cpu_seconds < 0.05 * ROOM
    assert report.sync_cpu_seconds_per_rank < 0.05 * ROOM
    assert report.controller_sync_cpu_seconds < 0.02 * ROOM
    assert report.egress_ratio_64_to_8_machines < 1.05


def test_the_controller_calls_each_process_a_fixed_number_of_times(reports: dict[str, ScaleReport]) -> None:
    trainer, engines = 32, 4
    colocated, disaggregated = reports["colocated"], reports["disaggregated"]
    assert (colocated.ray_calls_connect, colocated.fan_outs_connect) == (trainer + 2 * engines + 1, 3)
    calls = 2 * trainer + 2 * engines + 2
    assert (disaggregated.ray_calls_connect, disaggregated.fan_outs_connect) == (calls, 3)
    for report in reports.values():
        assert (report.ray_calls_sync, report.fan_outs_sync) == (trainer + engines, 1)


def test_engine_host_sends_its_ranks_one_small_command(reports: dict[str, ScaleReport]) -> None:
    for report in reports.values():
        assert 0 < report.engine_host_serial_seconds < 0.02 * ROOM
    assert 0 < reports["colocated"].engine_rank_sync_cpu_seconds < 0.05 * ROOM
