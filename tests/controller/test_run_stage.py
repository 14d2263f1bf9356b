"""What a command shows of a run, and tells it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from megarl.controller import run_stage
from megarl.controller.run_stage import follow
from megarl.run.events import EventLog, Note


class Controller:
    """Of a run that ends after so many questions; an actor, whose calls all end at once."""

    def __init__(self, questions: int) -> None:
        self.left, self.log, self.asked = questions, EventLog(), list[str]()
        self.events = SimpleNamespace(remote=self.log.since)
        self.finish_early = SimpleNamespace(remote=self.asked.append)

    def has_ended(self) -> bool:
        self.left -= 1
        self.log.add(Note(f"{self.left} left"))
        return self.left == 0


def test_all_that_happens_until_the_end_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_stage, "ray", SimpleNamespace(get=lambda answer: answer))
    controller, said = Controller(4), list[str]()
    signals = iter(["", "", "SIGUSR1", ""])
    progress: Any = SimpleNamespace(say=said.append)
    asked: Any = SimpleNamespace(by=lambda: next(signals))
    follow(controller, controller.has_ended, progress, asked)
    told = "asked to end early: the step under way will be the last"
    assert said == ["3 left", "2 left", told, "1 left", "0 left"]
    assert controller.asked == ["SIGUSR1", "SIGUSR1"]
