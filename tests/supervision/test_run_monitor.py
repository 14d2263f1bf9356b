"""Which processes' stacks are collected, and the timeout of a run's start."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megarl.errors import WorkerError
from megarl.supervision import run_monitor
from megarl.supervision.phase_watchdog import STACKS_FOLDER
from megarl.supervision.run_monitor import RunMonitor
from megarl.workers.failures import run_abort_check
from tests.run.finished_groups import run_config
from tests.time_limits import HANG_SECONDS


@pytest.fixture
def monitor(tmp_path: Path) -> Iterator[RunMonitor]:
    config = run_config(
        {"type": "grpo"},
        run_dir=str(tmp_path),
        recovery={"phase_timeout_seconds": 0.1},
        placement={"start_timeout_seconds": 0.1},
        rollout={"engine": {"start_timeout_seconds": 0.2}},
    )
    monitor_instance = RunMonitor(config, lambda _: None)
    yield monitor_instance
    monitor_instance.close(None)


def test_stacks_are_collected_from_replaced_processes(monitor: RunMonitor, monkeypatch: pytest.MonkeyPatch) -> None:
    queried: list[str] = []

    def query(actors: Mapping[str, str], timeout: float) -> dict[str, str]:
        queried.extend(actors.values())
        if "starts" in actors.values():
            raise WorkerError("no answer")
        return {name: f"info of {actor}" for name, actor in actors.items()}

    monkeypatch.setattr(run_monitor, "query_processes", query)
    monkeypatch.setattr(run_monitor, "collect_stacks", lambda processes: str(sorted(processes.items())))
    engines = {"engine 0": "first", "engine 1": "second"}
    trainer: Any = SimpleNamespace(processes=lambda: {"trainer rank 0": SimpleNamespace(host="n")})
    monitor.watch(trainer, lambda: engines)
    trainer_info = str(next(iter(trainer.processes().items())))
    assert monitor._stacks() == f"[('engine 0', 'info of first'), ('engine 1', 'info of second'), {trainer_info}]"
    engines |= {"engine 0": "starts", "engine 1": "third"}
    assert monitor._stacks() == monitor._stacks() == f"[('engine 1', 'info of third'), {trainer_info}]"
    assert queried == ["first", "second", "starts", "third", "starts"]


def test_hung_start_fails_after_start_timeouts_plus_phase_timeout(monitor: RunMonitor, tmp_path: Path) -> None:
    started_at = time.monotonic()

    def start() -> None:
        with monitor.start(13):
            while time.monotonic() < started_at + HANG_SECONDS:
                run_abort_check(["rank 1"])
                time.sleep(0.01)

    with pytest.raises(
        WorkerError, match=r"^start of step 13 took longer than 0\.4 s; no answer from rank 1; stacks: "
    ):
        start()
    assert time.monotonic() - started_at >= 0.4
    assert (tmp_path / STACKS_FOLDER / "step-000013-start.txt").exists()
