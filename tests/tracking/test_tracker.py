"""Metrics in all sinks, and the rollout log."""

import itertools
import json
import math
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from megarl.batch.trajectory import Trajectory
from megarl.config.run import TrackingConfig
from megarl.errors import ConfigError, DataError
from megarl.tracking.tracker import ResumedMetrics, Tracker, write_rollouts
from tests.errors import expect_error


def read_lines(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def read_scalars(run_dir: Path) -> dict[str, list[tuple[int, float]]]:
    """Read the scalars with TensorBoard itself: tag -> (step, value) pairs."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run_dir / "tensorboard"))
    events.Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_jsonl_and_tensorboard_hold_the_same_metrics(tmp_path):
    run = tmp_path / "new" / "run"
    with Tracker(TrackingConfig(), run, notify=print) as tracker:
        tracker.log({"reward/mean": 0.25, "loss": np.float32(2.0)}, step=1)
        assert len(read_lines(run)) == len(read_scalars(run)["loss"]) == 1, "not on disk before the next step"
        tracker.log({"reward/mean": 0.5}, step=2)
    tracker.close()
    assert read_lines(run) == [{"step": 1, "reward/mean": 0.25, "loss": 2.0}, {"step": 2, "reward/mean": 0.5}]
    assert read_scalars(run) == {"reward/mean": [(1, 0.25), (2, 0.5)], "loss": [(1, 2.0)]}


def test_json_stays_valid_with_numbers_that_are_not_finite(tmp_path):
    with Tracker(TrackingConfig(), tmp_path, notify=print) as tracker:
        tracker.log({"a": math.nan, "b": math.inf, "c": -math.inf, "d": 1.0}, step=1)
    text = (tmp_path / "metrics.jsonl").read_text()

    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    assert json.loads(text, parse_constant=refuse) == {"step": 1, "a": None, "b": None, "c": None, "d": 1.0}
    assert math.isnan(read_scalars(tmp_path)["a"][0][1])


def test_metrics_after_the_resumed_step_are_dropped(tmp_path, monkeypatch):
    # TensorBoard orders event files by their names, which have the second in which they were created
    seconds = types.SimpleNamespace(time=itertools.count(2 * 10**9).__next__)
    monkeypatch.setattr("tensorboard.summary.writer.event_file_writer.time", seconds)
    with Tracker(TrackingConfig(), tmp_path, notify=print) as tracker:
        tracker.log({"a": 1.0}, step=1)
        position = tracker.num_bytes
        tracker.log({"a": 2.0}, step=2)
        tracker.log({"a": 3.0}, step=3)
    with Tracker(
        TrackingConfig(), tmp_path, notify=print, resumed=ResumedMetrics(step=1, num_bytes=position)
    ) as tracker:
        tracker.log({"a": 20.0}, step=2)
    assert read_lines(tmp_path) == [{"step": 1, "a": 1.0}, {"step": 2, "a": 20.0}]
    assert read_scalars(tmp_path) == {"a": [(1, 1.0), (2, 20.0)]}


def test_nothing_is_written_if_no_sink_is_configured(tmp_path):
    with Tracker(TrackingConfig(tensorboard=False, jsonl=False), tmp_path, notify=print) as tracker:
        tracker.log({"a": 1.0}, step=1)
    assert list(tmp_path.iterdir()) == []


def test_wandb_gets_project_name_and_metrics(tmp_path, monkeypatch):
    calls: list[Any] = []

    class Run:
        id = "abc"

        def log(self, metrics, step):
            calls.append((metrics, step))

        def finish(self):
            calls.append("finish")

    def init(**kwargs):
        calls.append(kwargs)
        return Run()

    fake = types.ModuleType("wandb")
    fake.init = init  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", fake)
    config = TrackingConfig.model_validate({"wandb": {"project": "p", "name": "n"}, "tensorboard": False})
    with Tracker(config, tmp_path, notify=print) as tracker:
        tracker.log({"a": 1.0}, step=3)
    init_arguments = {"project": "p", "name": "n", "dir": str(tmp_path)}
    assert calls == [init_arguments, ({"a": 1.0}, 3), "finish"]
    calls.clear()
    Tracker(config, tmp_path, notify=print, resumed=ResumedMetrics(step=3, num_bytes=0)).close()
    assert calls == [init_arguments | {"id": "abc", "resume": "allow"}, "finish"]


def test_wandb_without_the_package_is_a_configuration_error(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    config = TrackingConfig.model_validate({"wandb": {"project": "p"}})
    with expect_error(ConfigError, "tracking.wandb"):
        Tracker(config, tmp_path, notify=print)
    assert list(tmp_path.iterdir()) == []


def test_tracking_loads_neither_torch_nor_tensorflow():
    code = (
        "import sys, megarl.tracking.tracker, megarl.tracking.progress\n"
        "assert not {'torch', 'tensorflow', 'ray'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_truncated_file_keeps_only_complete_lines(tmp_path):
    file = tmp_path / "metrics.jsonl"
    for torn, left in (('{"step": 1}\n{"step": 2}\n{"st', 2), ('{"st', 0), ('{"step": 1}\n', 1), ("", 0)):
        file.write_text(torn)
        with Tracker(
            TrackingConfig(tensorboard=False), tmp_path, notify=print, resumed=ResumedMetrics(step=4, num_bytes=100)
        ) as t:
            t.log({"a": 1.0}, step=5)
        assert [line["step"] for line in read_lines(tmp_path)] == [*range(1, left + 1), 5]


def test_full_disk_is_a_data_error(tmp_path):
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    tracker = Tracker(TrackingConfig(tensorboard=False), tmp_path, notify=print)
    with expect_error(DataError, "1", "No", "metrics", "written"):
        tracker.log({"a": 1.0}, step=1)
    assert tracker.num_bytes == 0


def decode(token_ids: list[int]) -> str:
    return "".join(map(chr, token_ids))


def trajectory(prompt: str, spans: list[tuple[str, int]], **fields: object) -> Trajectory:
    """Return a trajectory; `spans`: texts after the prompt with their policy versions (-1: tool output)."""
    text = prompt + "".join(t for t, _ in spans)
    versions = [-1] * len(prompt) + [v for t, v in spans for _ in t]
    return Trajectory(
        prompt_id="train.jsonl:3",
        token_ids=np.array([ord(c) for c in text], dtype=np.int32),
        loss_mask=np.array(versions) >= 0,
        logprobs=np.array([0.0 if v < 0 else -0.5 for v in versions], dtype=np.float32),
        policy_versions=np.array(versions, dtype=np.int32),
        **fields,  # type: ignore[arg-type]
    )


def test_rows_hold_the_trajectories(tmp_path):
    rows = [
        trajectory(
            "Q?", [("ab", 4), ("[tool]", -1), ("c", 6)], group_id=0, rewards={"acc": 1.0, "fmt": 0.5}, reward=1.5
        ),
        trajectory("Why?", [("no", 5)], group_id=1, finish_reason="length"),
        trajectory("Mute", [], group_id=2),
        trajectory("Odd", [("!", 5)], group_id=2, rewards={"acc": 1.0}, reward_errors={"fmt": "took too long"}),
    ]
    path = tmp_path / "rollouts" / "step_7.parquet"
    write_rollouts(path, rows, [0.7, -0.7, np.float32(np.nan), None], step=7, decode=decode)
    first, second, third, dropped = pq.read_table(path).to_pylist()
    assert first == {
        "step": 7,
        "prompt_id": "train.jsonl:3",
        "group_id": 0,
        "prompt": "Q?",
        "response": "ab[tool]c",
        "reward": 1.5,
        "rewards": [("acc", 1.0), ("fmt", 0.5)],
        "reward_errors": [],
        "advantage": pytest.approx(0.7),
        "policy_version_min": 4,
        "policy_version_max": 6,
        "num_tokens": 11,
        "finish_reason": "stop",
        "segment": 0,
        "token_ids": [ord(c) for c in "Q?ab[tool]c"],
        "loss_mask": [False] * 2 + [True] * 2 + [False] * 6 + [True],
        "logprobs": [0.0] * 2 + [-0.5] * 2 + [0.0] * 6 + [-0.5],
    }
    assert (second["group_id"], second["finish_reason"], second["rewards"]) == (1, "length", [])
    assert (third["prompt"], third["response"], third["policy_version_min"]) == ("Mute", "", None)
    assert (dropped["reward"], dropped["advantage"], dropped["rewards"]) == (None, None, [("acc", 1.0)])
    assert dropped["reward_errors"] == [("fmt", "took too long")]


def test_file_is_written_atomically(tmp_path):
    path = tmp_path / "a.parquet"
    write_rollouts(path, [trajectory("Q", [("a", 0)], group_id=0)], [1.0], step=1, decode=decode)
    before = path.read_bytes()

    def fails(token_ids):
        raise KeyError

    with pytest.raises(KeyError):
        write_rollouts(path, [trajectory("Q", [("b", 0)], group_id=0)], [1.0], step=2, decode=fails)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["a.parquet"]
    with expect_error(AssertionError, "1", "2", "trajectories", "advantages"):
        write_rollouts(path, [trajectory("Q", [], group_id=0)], [1.0, 2.0], step=2, decode=decode)


def test_no_trajectories_give_an_empty_table(tmp_path):
    write_rollouts(tmp_path / "a.parquet", [], [], step=1, decode=decode)
    assert pq.read_table(tmp_path / "a.parquet").num_rows == 0


class Lines:
    """A sink that writes to a file, and fails at a step."""

    def __init__(self, run_dir: Path, step: int | None, *, name: str = "lines", fails_at: int = 0) -> None:
        self.file, self.fails_at = run_dir / name, fails_at
        self.file.write_text(f"from {step}\n")

    def log(self, metrics: dict[str, float], *, step: int) -> None:
        if step == self.fails_at:
            raise ConnectionError("no network")
        self.file.write_text(f"{self.file.read_text()}{step} {metrics}\n")

    def close(self) -> None:
        raise SystemExit("closed twice")


class WithoutClose:
    def log(self, metrics: dict[str, float], *, step: int) -> None: ...


def with_sinks(*sinks: dict[str, Any]) -> TrackingConfig:
    return TrackingConfig.model_validate({"tensorboard": False, "sinks": sinks})


def test_a_sink_of_the_user_gets_all_metrics_and_cannot_end_the_run(tmp_path):
    messages: list[str] = []
    path = f"{__name__}:Lines"
    config = with_sinks({"path": path, "kwargs": {"fails_at": 2}}, {"path": path, "kwargs": {"name": "others"}})
    resumed = ResumedMetrics(step=0, num_bytes=0)
    with Tracker(config, tmp_path, notify=messages.append, resumed=resumed) as tracker:
        for step in (1, 2, 3):
            tracker.log({"a": float(step)}, step=step)
    assert (tmp_path / "lines").read_text() == "from 0\n1 {'a': 1.0}\n3 {'a': 3.0}\n"
    assert (tmp_path / "others").read_text().count("\n") == 4
    assert [line["step"] for line in read_lines(tmp_path)] == [1, 2, 3]
    lost, *closed = messages
    assert lost.startswith("step 2: tracking.sinks.0 has lost the metrics: log raised ConnectionError: no network")
    assert [text.split(":")[0] for text in closed] == ["tracking.sinks.0", "tracking.sinks.1"]


@pytest.mark.parametrize(
    ("sink", "problem"),
    [
        ({"path": "absent_module:Sink"}, r"tracking\.sinks\.0\.path: cannot import absent_module"),
        ({"path": f"{__name__}:WithoutClose"}, "WithoutClose has no close"),
        ({"path": f"{__name__}:Lines", "kwargs": {"color": 1}}, "needs to take .* 'color'"),
        ({"path": f"{__name__}:Lines", "kwargs": {"name": "absent/file"}}, "creating .*Lines raised FileNotFoundError"),
    ],
)
def test_wrong_sinks_are_configuration_errors(sink, problem, tmp_path):
    with pytest.raises(ConfigError, match=problem):
        Tracker(with_sinks(sink), tmp_path, notify=print)
    assert list(tmp_path.iterdir()) == []
