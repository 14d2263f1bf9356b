"""Events of a run: what its driver receives, also across a controller restart, and requests to stop early."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megarl.config import SftConfig
from megarl.config.load import make_config
from megarl.errors import EarlyStop
from megarl.megatron.requests import TrainStats
from megarl.stages import SupervisedRun
from megarl.tracking import progress
from megarl.tracking.progress import Event, EventLog, MessageEvent
from tests.algorithms.scripted_run import FinishedRun, run_script
from tests.config.runs import REQUIRED
from tests.errors import expect_error


def add(log: EventLog, *texts: str) -> list[Event]:
    messages: list[Event] = [MessageEvent(text) for text in texts]
    for message in messages:
        log.add(message)
    return messages


def test_the_first_events_of_a_restarted_controller_are_received() -> None:
    before = EventLog()
    add(before, *"abcdef")
    _, cursor = before.since(0)
    after = EventLog()
    first = add(after, "the controller was lost", "resuming")
    received, cursor = after.since(cursor)
    assert received == first
    later = add(after, "step 3")
    assert after.since(cursor)[0] == later


def test_each_reader_receives_each_event_once_and_can_repeat_a_request() -> None:
    log = EventLog()
    first = add(log, *"abcde")
    received, cursor = log.since(0)
    assert received == first
    assert log.since(cursor) == ([], cursor)
    later = add(log, "f")
    assert log.since(cursor) == log.since(cursor)
    assert log.since(cursor)[0] == later
    assert log.since(0)[0] == first + later  # a second reader, after the first one has read everything


def test_the_log_keeps_the_newest_events_and_reports_how_many_it_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "MAX_EVENTS", 3)
    log = EventLog()
    _, cursor = log.since(0)
    newest = add(log, *"abcde")[2:]
    dropped = MessageEvent("2 earlier events are no longer available: the log keeps the newest 3")
    assert log.since(0)[0] == log.since(cursor)[0] == [dropped, *newest]
    _, cursor = log.since(cursor)
    later = add(log, "f")
    assert log.since(cursor)[0] == later
    for text in "abcdefghij":
        add(log, text)
        received, cursor = log.since(cursor)
    assert received == [MessageEvent("j")]


def test_a_reader_of_a_restarted_controller_is_told_what_the_new_log_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "MAX_EVENTS", 2)
    _, cursor = EventLog().since(0)
    after = EventLog()
    newest = add(after, *"abc")[1:]
    dropped = MessageEvent("1 earlier event is no longer available: the log keeps the newest 2")
    assert after.since(cursor)[0] == [dropped, *newest]


def run_until(label: str, folder: Path, **algorithm: Any) -> FinishedRun:
    """Run up to four steps; request a stop while sampling `label`, or before the start if it is empty."""
    events = EventLog()
    if not label:
        events.request_stop()

    def script(now: str, number: int, sample: int) -> float:
        if now == label:
            events.request_stop()
        return float(sample == number)

    return run_script(folder, {"type": "grpo", "kl_loss": None, **algorithm}, script, steps=4, events=events)


def summary(folder: Path) -> Any:
    return json.loads((folder / "summary.json").read_text())


def test_a_stop_request_ends_the_run_after_the_current_step(tmp_path: Path) -> None:
    done = run_until("step-2", tmp_path)
    assert done.call_order == ["engines sample", "policy train", "weights push"] * 2
    assert len(done.metrics) == 2
    assert (summary(tmp_path)["steps"], summary(tmp_path)["steps_planned"]) == (2, 4)
    with expect_error(EarlyStop, "step 2 of 4", str(done.run.config.export_path)):
        done.run.raise_if_stopped_early()


def test_a_stop_request_in_the_last_step_is_no_early_stop(tmp_path: Path) -> None:
    done = run_until("step-4", tmp_path)
    assert len(done.metrics) == 4
    done.run.raise_if_stopped_early()


def test_a_stop_request_at_startup_runs_no_step_and_exports_nothing(tmp_path: Path) -> None:
    done = run_until("", tmp_path)
    assert [call.method for call in done.log] == ["push"]
    trainer: Any = FakeTrainer()
    done.run.export(trainer)
    assert trainer.log == []
    assert summary(tmp_path)["steps"] == 0
    with expect_error(EarlyStop, "4", "SIGUSR1", "stopped", "before"):
        done.run.raise_if_stopped_early()


def test_a_stop_request_ends_critic_pretraining(tmp_path: Path) -> None:
    pretraining = {"max_steps": 5}
    done = run_until("step-0-2", tmp_path, type="vapo", kl_reward=None, pretraining=pretraining)
    assert (len(done.pretraining), done.metrics) == (2, [])
    with expect_error(EarlyStop, "before", "first"):
        done.run.raise_if_stopped_early()


class StoppingRun(SupervisedRun):
    """Requests a stop of itself while step `last` is started."""

    def __init__(self, config: SftConfig, events: EventLog, trainer: Any, last: int) -> None:
        super().__init__(config, events, trainer, num_rows=8)
        self._last, self.started, self.evaluated = last, 0, list[int]()

    def make_train_request(self, rows: Sequence[int]) -> Any:
        self.started += 1
        if self.started == self._last:
            self._events.request_stop()
        return self.started

    def evaluate(self) -> None:
        self.evaluated.append(self.step)


class FakeTrainer:
    def __init__(self) -> None:
        self.log: list[str] = []

    def begin_train_step(self, work: int) -> Any:
        def result() -> TrainStats:
            self.log.append(f"step {work}")
            return TrainStats(metrics={"loss": 1.0}, num_tokens=1)

        return SimpleNamespace(result=result)

    def save_hf(self, folder: str) -> None:
        self.log.append(f"export {folder}")


def test_started_steps_are_finished_before_the_export(tmp_path: Path) -> None:
    sections = {"tracking": {"tensorboard": False}, "trainer": {"steps": 9, "eval_every": 2}}
    config, trainer = make_config(SftConfig, REQUIRED | {"run_dir": str(tmp_path)} | sections), FakeTrainer()
    run = StoppingRun(config, EventLog(), trainer, last=3)
    run.train()
    assert trainer.log == ["step 1", "step 2", "step 3", f"export {config.export_path}"]
    assert run.evaluated == [0, 2]
    with expect_error(EarlyStop, "3", "9", "stopped", "after"):
        run.raise_if_stopped_early()
