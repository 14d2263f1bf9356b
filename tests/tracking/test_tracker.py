"""Metrics in all sinks."""

from __future__ import annotations

import itertools
import json
import math
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megarl.config.tracking import TrackingConfig
from megarl.errors import ConfigError, DataError
from megarl.tracking.tracker import ResumedMetrics, Tracker


def read_lines(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def read_scalars(run_dir: Path) -> dict[str, list[tuple[int, float]]]:
    """Read the scalars with TensorBoard itself: tag -> (step, value) pairs."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run_dir / "tensorboard"))
    events.Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_jsonl_and_tensorboard_hold_the_same_metrics(tmp_path: Path) -> None:
    run = tmp_path / "new" / "run"
    with Tracker(TrackingConfig(), run) as tracker:
        tracker.log({"reward/mean": 0.25, "loss": np.float32(2.0)}, step=1)
        assert len(read_lines(run)) == len(read_scalars(run)["loss"]) == 1, "not on disk before the next step"
        tracker.log({"reward/mean": 0.5}, step=2)
    tracker.close()
    assert read_lines(run) == [{"step": 1, "reward/mean": 0.25, "loss": 2.0}, {"step": 2, "reward/mean": 0.5}]
    assert read_scalars(run) == {"reward/mean": [(1, 0.25), (2, 0.5)], "loss": [(1, 2.0)]}


def test_json_stays_valid_with_numbers_that_are_not_finite(tmp_path: Path) -> None:
    with Tracker(TrackingConfig(), tmp_path) as tracker:
        tracker.log({"a": math.nan, "b": math.inf, "c": -math.inf, "d": 1.0}, step=1)
    text = (tmp_path / "metrics.jsonl").read_text()

    def refuse(name: str) -> Any:
        raise AssertionError(f"{name} is not JSON")

    assert json.loads(text, parse_constant=refuse) == {"step": 1, "a": None, "b": None, "c": None, "d": 1.0}
    assert math.isnan(read_scalars(tmp_path)["a"][0][1])


def test_metrics_after_the_resumed_step_are_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # TensorBoard orders event files by their names, which have the second in which they were created
    seconds = types.SimpleNamespace(time=itertools.count(2 * 10**9).__next__)
    monkeypatch.setattr("tensorboard.summary.writer.event_file_writer.time", seconds)
    with Tracker(TrackingConfig(), tmp_path) as tracker:
        tracker.log({"a": 1.0}, step=1)
        position = tracker.num_bytes
        tracker.log({"a": 2.0}, step=2)
        tracker.log({"a": 3.0}, step=3)
    with Tracker(TrackingConfig(), tmp_path, resumed=ResumedMetrics(step=1, num_bytes=position)) as tracker:
        tracker.log({"a": 20.0}, step=2)
    assert read_lines(tmp_path) == [{"step": 1, "a": 1.0}, {"step": 2, "a": 20.0}]
    assert read_scalars(tmp_path) == {"a": [(1, 1.0), (2, 20.0)]}


def test_nothing_is_written_if_no_sink_is_configured(tmp_path: Path) -> None:
    with Tracker(TrackingConfig(tensorboard=False, jsonl=False), tmp_path) as tracker:
        tracker.log({"a": 1.0}, step=1)
    assert list(tmp_path.iterdir()) == []


def test_wandb_gets_project_name_and_metrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    class Run:
        id = "abc"

        def log(self, metrics: dict[str, float], step: int) -> None:
            calls.append((metrics, step))

        def finish(self) -> None:
            calls.append("finish")

    def init(**kwargs: Any) -> Run:
        calls.append(kwargs)
        return Run()

    fake = types.ModuleType("wandb")
    fake.init = init  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", fake)
    config = TrackingConfig.model_validate({"wandb": {"project": "p", "name": "n"}, "tensorboard": False})
    with Tracker(config, tmp_path) as tracker:
        tracker.log({"a": 1.0}, step=3)
    init_arguments = {"project": "p", "name": "n", "dir": str(tmp_path)}
    assert calls == [init_arguments, ({"a": 1.0}, 3), "finish"]
    calls.clear()
    Tracker(config, tmp_path, resumed=ResumedMetrics(step=3, num_bytes=0)).close()
    assert calls == [init_arguments | {"id": "abc", "resume": "allow"}, "finish"]


def test_wandb_without_the_package_is_a_configuration_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    config = TrackingConfig.model_validate({"wandb": {"project": "p"}})
    with pytest.raises(ConfigError, match=r"tracking\.wandb needs the wandb package"):
        Tracker(config, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_tracking_loads_neither_torch_nor_tensorflow() -> None:
    code = (
        "import sys, megarl.tracking.tracker, megarl.tracking.rollout_log, megarl.tracking.progress\n"
        "assert not {'torch', 'tensorflow', 'ray'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_truncated_file_keeps_only_complete_lines(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    for torn, left in (('{"step": 1}\n{"step": 2}\n{"st', 2), ('{"st', 0), ('{"step": 1}\n', 1), ("", 0)):
        file.write_text(torn)
        with Tracker(TrackingConfig(tensorboard=False), tmp_path, resumed=ResumedMetrics(step=4, num_bytes=100)) as t:
            t.log({"a": 1.0}, step=5)
        assert [line["step"] for line in read_lines(tmp_path)] == [*range(1, left + 1), 5]


def test_full_disk_is_a_data_error(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    tracker = Tracker(TrackingConfig(tensorboard=False), tmp_path)
    with pytest.raises(DataError, match=r"^the metrics of step 1 cannot be written to .*: .* No space left on device$"):
        tracker.log({"a": 1.0}, step=1)
    assert tracker.num_bytes == 0
