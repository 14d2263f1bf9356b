"""What is tried again, from where, and what ends a run; the processes are stood in for."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megarl.controller import recovery
from megarl.controller.recovery import train_through
from megarl.errors import GivenUpError, LimitError, LostWorkerError, MegarlError, WorkerError
from megarl.run.events import EventLog, Note
from megarl.tracking.startup import Startup
from tests.run.finished_groups import run_config


def done(*_: Any) -> None:
    """Nothing is to do."""


class World:
    """A run of so many steps, which fails as it is told: step -> errors, one after another; 0 is the building."""

    def __init__(self, tmp_path: Path, patch: pytest.MonkeyPatch, failures: dict[int, list[MegarlError]]) -> None:
        self.failures, self.log = failures, list[Any]()
        self.saved: Path | None = None
        self.config = run_config(
            {"type": "grpo"},
            run_dir=str(tmp_path),
            recovery={"max_restarts": 5, "backoff_seconds": 0.0},
            trainer={"steps": 3},
        )
        world = self

        class Fleet:
            def __init__(self, *_: Any, restarts: Any, vigil: Any) -> None:
                world.restarts = restarts

            def assemble(self, start: Path | None, *, again: bool) -> Any:
                world.log.append((start.name if start else None, again))
                world.fail(0)
                return SimpleNamespace(step=0, save=done, export=done, finish=done, give_up=done, trainer=None)

            def end_trainer(self) -> None:
                world.log.append("ended")

            def replace_nodes(self) -> None:
                pass

        patch.setattr(recovery, "Fleet", Fleet)
        patch.setattr(recovery, "train", self.train)
        patch.setattr(recovery, "newest_whole", lambda *_: self.saved and SimpleNamespace(folder=self.saved))

    restarts: Any

    def fail(self, step: int) -> None:
        if self.failures.get(step):
            raise self.failures[step].pop(0)

    def train(self, run: Any) -> None:
        for step in range(1, 4):
            run.step = step
            self.fail(step)
            self.restarts.step_done(step)
            self.saved = Path(f"step-{step}")

    def run(self, resume: Path | None = None, *, again: bool = False) -> list[str]:
        events = EventLog()
        with ExitStack() as closing:
            train_through(self.config, events, closing, Startup(0.0), resume=resume, again=again)
        return [event.text for event in events.since(0)[0] if isinstance(event, Note)]


def died(what: str = "rank 1 died") -> WorkerError:
    return LostWorkerError(what)


def test_a_lost_trainer_starts_from_the_newest_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(tmp_path, monkeypatch, {1: [died()], 3: [died("rank 0 died")]})
    said = world.run()
    assert world.log == [(None, False), "ended", (None, True), "ended", ("step-2", True)]
    assert [text.partition(" was lost")[0] for text in said] == ["the trainer", "the trainer"]


def test_a_controller_that_was_restarted_starts_from_there_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(tmp_path, monkeypatch, {})
    world.saved = Path("step-2")
    world.run(Path("step-1"), again=True)
    assert world.log == [("step-2", True)]
    world.saved, world.log = None, []
    world.run(Path("of-another-run"), again=True)
    assert world.log == [("of-another-run", True)]


def test_processes_that_die_while_they_start_are_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # the second time, a rank that has lost its neighbour is heard first
    world = World(tmp_path, monkeypatch, {0: [died(), WorkerError("connection closed by peer")]})
    world.run()
    assert world.log == [(None, False), "ended", (None, True), "ended", (None, True)]


def test_what_cannot_be_built_is_told_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(tmp_path, monkeypatch, {0: [WorkerError("out of memory")]})
    with pytest.raises(WorkerError, match=r"^out of memory$"):
        world.run()
    assert world.log == [(None, False)]


def test_the_same_failure_three_times_is_told_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(tmp_path, monkeypatch, {2: [died(f"rank 1 died (pid {n})") for n in range(3)]})
    with pytest.raises(GivenUpError, match=r"lost 3 times for the same reason.*recovery\.same_failure: 3.*rank 1 died"):
        world.run()
    assert world.log.count("ended") == 2


@pytest.mark.parametrize("error", [LimitError("passed"), GivenUpError("engine 0 was lost 3 times")])
def test_what_restarts_do_not_mend_ends_the_run(
    error: MegarlError, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path, monkeypatch, {2: [error]})
    with pytest.raises(type(error), match=str(error)):
        world.run()
    assert world.log == [(None, False)]
