"""The controller's CPU and memory on a small case, with room in every budget."""

from __future__ import annotations

import pytest

from benchmarks.controller.measure import ControllerReport, Workload, measure

RANKS, TRAJECTORIES, REPLICAS = 128, 1024, 16
ROOM = 4
"""Factor by which the machine may be slower than when the budgets were set."""


@pytest.fixture(scope="module")
def report(cluster: None, tmp_path_factory: pytest.TempPathFactory) -> ControllerReport:
    work = Workload(ranks=RANKS, trajectories=TRAJECTORIES, replicas=REPLICAS, rollout_workers=8, steps=2)
    return measure(work, tmp_path_factory.mktemp("controller"), prompt_bytes=0.0)


def test_cpu_of_a_step_is_within_its_budget(report: ControllerReport) -> None:
    assert report.train_call_cpu_seconds < 0.06 * ROOM
    assert report.step_cpu_seconds < 0.15 * ROOM
    assert report.rank_calls_cpu_seconds < 0.1 * ROOM


def test_memory_of_a_step_is_within_its_budget(report: ControllerReport) -> None:
    assert report.rss_mb < 60


def test_a_replica_fetches_little_more_than_its_own_samples(report: ControllerReport) -> None:
    assert 1 <= report.fetched_per_used <= 1.3


def test_each_rank_holds_its_samples(report: ControllerReport) -> None:
    """The benchmark counts them."""
    assert report.dispatch_seconds > 0
