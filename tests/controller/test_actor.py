"""How a stage of the controller is interrupted."""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack
from typing import Any

import pytest

from megarl.controller.actor import Controller
from megarl.errors import MegarlError
from megarl.tracking.startup import Startup
from megarl.workers.failures import run_abort_check
from tests.run.finished_groups import run_config
from tests.time_limits import HANG_SECONDS


def test_stop_lets_the_thread_of_the_stage_close_what_it_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    closed_by: list[threading.Thread] = []
    errors: list[MegarlError] = []
    kinds: list[Any] = []
    is_running = threading.Event()

    def wait_for_engines(config: Any, closing: ExitStack) -> Any:
        closing.push(lambda kind, *_: kinds.append(kind))
        closing.callback(lambda: closed_by.append(threading.current_thread()))
        is_running.set()
        ends = time.monotonic() + HANG_SECONDS
        while time.monotonic() < ends:
            assert not closed_by, "closed while the stage uses it"
            run_abort_check(["engine 0"])
            time.sleep(0.01)
        raise AssertionError("the stage was not interrupted")

    def evaluate() -> None:
        try:
            controller.evaluate(run_config({"type": "grpo"}))
        except MegarlError as error:
            errors.append(error)

    monkeypatch.setattr("megarl.groups.build.build_evaluation", wait_for_engines)
    controller = Controller(Startup(0.0), 0.0)
    stage = threading.Thread(target=evaluate)
    stage.start()
    assert is_running.wait(HANG_SECONDS)
    controller.stop()
    assert closed_by == [stage]
    assert kinds == [KeyboardInterrupt], "the last heartbeat must not report a completed run"
    stage.join(HANG_SECONDS)
    assert [str(error) for error in errors] == ["the run was interrupted"]


def test_stop_of_an_idle_controller_returns() -> None:
    Controller(Startup(0.0), 0.0).stop()
