"""What a command shows of a run, and the requests it forwards."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from megarl.controller import run_stage
from megarl.controller.run_stage import follow
from megarl.run.events import EventLog, MessageEvent


class Controller:
    """Fake controller actor of a run that ends after `num_polls` polls; its calls return at once."""

    def __init__(self, num_polls: int) -> None:
        self.left, self.log, self.stop_requests = num_polls, EventLog(), list[str]()
        self.events = SimpleNamespace(remote=self.log.since)
        self.request_stop = SimpleNamespace(remote=self.stop_requests.append)

    def has_ended(self) -> bool:
        self.left -= 1
        self.log.add(MessageEvent(f"{self.left} left"))
        return self.left == 0


def test_all_events_until_the_end_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_stage, "ray", SimpleNamespace(get=lambda answer: answer))
    controller, messages = Controller(4), list[str]()
    signals = iter(["", "", "SIGUSR1", ""])
    progress: Any = SimpleNamespace(notify=messages.append)
    stop_request: Any = SimpleNamespace(signal_name=lambda: next(signals))
    follow(controller, controller.has_ended, progress, stop_request)
    notice = "early end requested: the run stops after the current step"
    assert messages == ["3 left", "2 left", notice, "1 left", "0 left"]
    assert controller.stop_requests == ["SIGUSR1", "SIGUSR1"]
