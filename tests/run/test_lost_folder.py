"""A run whose folder another run has taken over writes no more metrics."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megarl.checkpoint.run_lock import RunLock
from megarl.config import SftConfig
from megarl.config.load import make_config
from megarl.data.sampler import PromptOrder
from megarl.errors import LostLockError
from megarl.run.events import EventLog
from megarl.run.run_state import RunState
from megarl.run.stage_run import StageRun
from megarl.tracking.phases import PhaseTimer
from tests.checkpoint.run_folder import take_over


def make_run(run_dir: Path, resumed: RunState | None = None) -> StageRun:
    tree: dict[str, Any] = {"run_dir": str(run_dir), "model": {"path": "m"}, "data": {"path": "d"}}
    config = make_config(SftConfig, tree)
    return StageRun(config, EventLog(), PhaseTimer(), order=PromptOrder(8, 0, shuffle=False), resumed=resumed)


def test_a_run_that_lost_its_folder_logs_no_metrics(tmp_path: Path) -> None:
    with RunLock(tmp_path):
        run = make_run(tmp_path)
        run.log({"loss": 1.0})
        written = (tmp_path / "metrics.jsonl").read_text()
        take_over(tmp_path)
        with pytest.raises(LostLockError, match=f"run_dir {tmp_path} .*pid 123 on host n2"):
            run.log({"loss": 2.0})
        assert (tmp_path / "metrics.jsonl").read_text() == written


def test_a_run_that_lost_its_folder_does_not_truncate_metrics_when_it_recovers(tmp_path: Path) -> None:
    with RunLock(tmp_path):
        run = make_run(tmp_path)
        run.log({"loss": 1.0})
        written = (tmp_path / "metrics.jsonl").read_text()
        take_over(tmp_path)
        with pytest.raises(LostLockError):
            make_run(tmp_path, RunState())
        assert (tmp_path / "metrics.jsonl").read_text() == written
