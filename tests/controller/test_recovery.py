"""Which failures restart a run, from which checkpoint, and which end it; with fake processes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megarl.controller import recovery
from megarl.controller.recovery import train_with_recovery
from megarl.errors import (
    HungWorkerError,
    LimitError,
    LostEngineError,
    LostRankError,
    LostWorkerError,
    MegarlError,
    RestartLimitError,
    WeightSyncError,
    WorkerError,
)
from megarl.run.events import EventLog, MessageEvent
from megarl.tracking.startup import Startup
from tests.run.finished_groups import run_config


def do_nothing(*_: Any) -> None:
    """Stand in for a method of the run."""


class World:
    """A run of three steps; `failures`: step -> errors that it raises there in turn, with 0 for the assembly."""

    def __init__(self, tmp_path: Path, patch: pytest.MonkeyPatch, failures: dict[int, list[MegarlError]]) -> None:
        self.failures, self.log = failures, list[Any]()
        self.saved: Path | None = None
        self.dead: MegarlError | None = None
        """The loss of a trainer process that the controller finds when it looks."""
        self.config = run_config(
            {"type": "grpo"},
            run_dir=str(tmp_path),
            recovery={"max_restarts": 5, "backoff_seconds": 0.0},
            trainer={"steps": 3},
        )
        world = self

        class RunAssembly:
            def __init__(self, *_: Any, restart_budget: Any, monitor: Any) -> None:
                world.restart_budget = restart_budget

            def assemble(self, start: Path | None, *, restarted: bool) -> Any:
                world.log.append((start.name if start else None, restarted))
                world.fail(0)
                return SimpleNamespace(
                    step=0, save=do_nothing, export=do_nothing, finish=do_nothing, abort=do_nothing, trainer=None
                )

            def find_lost_process(self, error: MegarlError) -> MegarlError | None:
                return world.dead

            def stop_trainer(self) -> None:
                world.log.append("ended")

            def replace_nodes(self) -> None:
                pass

        patch.setattr(recovery, "RunAssembly", RunAssembly)
        patch.setattr(recovery, "train", self.train)
        patch.setattr(recovery, "latest_valid", lambda *_: self.saved and SimpleNamespace(folder=self.saved))

    restart_budget: Any

    def fail(self, step: int) -> None:
        if self.failures.get(step):
            raise self.failures[step].pop(0)

    def train(self, run: Any) -> None:
        for step in range(1, 4):
            run.step = step
            self.fail(step)
            self.restart_budget.mark_step_done(step)
            self.saved = Path(f"step-{step}")

    def run(self, resume: Path | None = None, *, restarted: bool = False) -> list[str]:
        events = EventLog()
        with ExitStack() as closing:
            train_with_recovery(self.config, events, closing, Startup(0.0), resume=resume, restarted=restarted)
        return [event.text for event in events.since(0)[0] if isinstance(event, MessageEvent)]

    def assert_fails(self, error: MegarlError) -> None:
        """Check that the error ends the run without a restart."""
        with pytest.raises(type(error), match=f"^{error}$"):
            self.run()
        assert self.log == [(None, False)]


MakeWorld = Callable[[dict[int, list[MegarlError]]], World]


@pytest.fixture
def make_world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MakeWorld:
    return partial(World, tmp_path, monkeypatch)


def lost_worker(what: str = "rank 1 died") -> WorkerError:
    return LostWorkerError(what)


def test_a_lost_trainer_restarts_from_the_newest_checkpoint(make_world: MakeWorld) -> None:
    world = make_world({1: [lost_worker()], 3: [lost_worker("rank 0 died")]})
    messages = world.run()
    assert world.log == [(None, False), "ended", (None, True), "ended", ("step-2", True)]
    assert [text.partition(" was lost")[0] for text in messages] == ["the trainer", "the trainer"]


def test_a_restarted_controller_resumes_from_the_newest_checkpoint(make_world: MakeWorld) -> None:
    world = make_world({})
    world.saved = Path("step-2")
    world.run(Path("step-1"), restarted=True)
    assert world.log == [("step-2", True)]
    world.saved, world.log = None, []
    world.run(Path("of-another-run"), restarted=True)
    assert world.log == [("of-another-run", True)]


def test_processes_that_die_during_startup_are_restarted(make_world: MakeWorld) -> None:
    # the second time, a rank that lost contact with a peer reports first
    world = make_world({0: [lost_worker(), WorkerError("connection closed by peer")]})
    world.dead = lost_worker()
    world.run()
    assert world.log == [(None, False), "ended", (None, True), "ended", (None, True)]


def test_an_assembly_error_is_raised_without_a_restart(make_world: MakeWorld) -> None:
    error = WorkerError("out of memory")
    make_world({0: [error]}).assert_fails(error)


def test_three_identical_failures_end_the_run(make_world: MakeWorld) -> None:
    world = make_world({2: [lost_worker(f"rank 1 died (pid {n})") for n in range(3)]})
    with pytest.raises(
        RestartLimitError, match=r"lost 3 times for the same reason.*recovery\.max_identical_failures: 3.*rank 1 died"
    ):
        world.run()
    assert world.log.count("ended") == 2


@pytest.mark.parametrize(
    "error",
    [
        LostEngineError("the nodes of all engines are lost"),
        LostRankError("lost the connection to rank 1"),
        HungWorkerError("train of step 2 took longer than 3600 s; no answer from trainer rank 1"),
    ],
)
def test_a_loss_that_no_death_explains_restarts_the_run(error: MegarlError, make_world: MakeWorld) -> None:
    world = make_world({2: [error]})
    world.run()
    assert world.log == [(None, False), "ended", ("step-1", True)]


@pytest.mark.parametrize("error", [HungWorkerError("start: no answer"), LostRankError("NCCL error")])
def test_a_first_start_without_a_death_is_not_repeated(error: MegarlError, make_world: MakeWorld) -> None:
    world = make_world({0: [error]})
    world.assert_fails(error)
    world.failures[0] = [error]
    world.dead = lost_worker()
    world.run()
    assert world.log[1:] == [(None, False), "ended", (None, True)]


@pytest.mark.parametrize(
    "error",
    [
        WorkerError("trainer.train_step failed on trainer rank 1: TypeError"),
        WorkerError("a request took longer than rollout.request_timeout_seconds"),
        WeightSyncError("a box has another dtype"),
    ],
)
def test_an_error_restarts_the_run_only_if_a_trainer_process_has_died(
    error: MegarlError, make_world: MakeWorld
) -> None:
    world = make_world({2: [error]})
    world.assert_fails(error)
    world = make_world({2: [error]})
    world.dead = lost_worker()
    messages = world.run()
    assert world.log == [(None, False), "ended", ("step-1", True)]
    assert messages == ["the trainer was lost (rank 1 died); restarting it (restart 1 of 5)"]


@pytest.mark.parametrize("error", [LimitError("passed"), RestartLimitError("engine 0 was lost 3 times")])
def test_errors_that_restarts_cannot_fix_end_the_run(error: MegarlError, make_world: MakeWorld) -> None:
    make_world({2: [error]}).assert_fails(error)
