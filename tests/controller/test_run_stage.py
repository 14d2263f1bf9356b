"""What a command shows of a run, and the requests it forwards."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megarl.checkpoint import run_lock
from megarl.checkpoint.run_lock import RunLock, require_lock
from megarl.config import SftConfig
from megarl.config.load import make_config
from megarl.controller import actor, run_stage
from megarl.controller.run_stage import _start_controller, begin_run, follow
from megarl.errors import LostLockError
from megarl.run.events import EventLog, MessageEvent
from megarl.tracking.startup import Startup
from tests.checkpoint.run_folder import take_over


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


def sft_config(folder: Path) -> SftConfig:
    return make_config(SftConfig, {"run_dir": str(folder), "model": {"path": "m"}, "data": {"path": "d"}})


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


def test_the_controller_checks_the_lock_that_its_driver_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    created = list[tuple[Any, ...]]()
    hosted = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=lambda *arguments: created.append(arguments)))
    node = SimpleNamespace(get_node_id=lambda: "0" * 56)
    fake = SimpleNamespace(get_runtime_context=lambda: node, remote=lambda _: hosted)
    monkeypatch.setattr(run_stage, "ray", fake)
    with RunLock(tmp_path):
        _start_controller(sft_config(tmp_path), Startup(0.0))
        monkeypatch.setattr(run_lock, "_tokens", {})  # as in another process
        actor.Controller(*created[0])
        require_lock(tmp_path)
        take_over(tmp_path)
        with pytest.raises(LostLockError, match="pid 123 on host n2"):
            require_lock(tmp_path)


def test_a_new_run_renames_the_artifacts_of_earlier_ones(tmp_path: Path) -> None:
    for number in range(3):
        with ExitStack() as closing:
            assert begin_run(sft_config(tmp_path), "sft", None, closing) is None
        (tmp_path / "metrics.jsonl").write_text(f"{number}")
    written = {path.name: path.read_text() for path in tmp_path.glob("metrics*")}
    assert written == {"metrics.jsonl": "2", "metrics.jsonl.1": "0", "metrics.jsonl.2": "1"}
    assert (tmp_path / "sft.yaml").exists()
