"""The heartbeat file."""

import json
import os
import socket
import threading
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from megarl.errors import LostLockError
from megarl.tracking import progress as module
from megarl.tracking.progress import Heartbeat
from tests.time_limits import HANG_SECONDS, UNREACHED_SECONDS, wait_until

OFTEN = 0.05
"""Intervals of writes in seconds."""


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file, in a folder that does not exist; nothing gives up waiting for the last write."""
    monkeypatch.setattr(module, "CLOSE_TIMEOUT_SECONDS", HANG_SECONDS)
    return tmp_path / "run" / "heartbeat.json"


def read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def test_file_has_the_state_of_the_run(path):
    messages: list[str] = []
    began = datetime.now(UTC)
    heartbeat = Heartbeat(path, steps=40, notify=messages.append, interval_seconds=UNREACHED_SECONDS)
    assert wait_until(path.exists)
    first = read(path)
    assert (first["pid"], first["host"], first["status"]) == (os.getpid(), socket.gethostname(), "starting")
    assert (first["step"], first["steps"], first["phase"], first["policy_version"]) == (0, 40, "", None)
    assert abs((datetime.fromisoformat(first["time"]) - began).total_seconds()) < HANG_SECONDS

    heartbeat.status("running")
    heartbeat.finished_step(8.25)
    heartbeat.saved(10)
    heartbeat.pushed(11)
    heartbeat.phase(12, "train")
    assert wait_until(lambda: read(path)["phase"] == "train")
    now = read(path)
    assert (now["status"], now["step"], now["last_step_seconds"]) == ("running", 12, 8.25)
    assert (now["last_checkpoint_step"], now["policy_version"]) == (10, 11)
    assert first["time"] <= now["phase_since"] <= now["time"]

    heartbeat.close("failed")
    assert (read(path)["status"], read(path)["step"]) == ("failed", 12)
    heartbeat.close("ended")
    assert read(path)["status"] == "failed"
    assert messages == []
    assert [file.name for file in path.parent.iterdir()] == ["heartbeat.json"]


def test_file_is_rewritten_while_nothing_changes(path):
    heartbeat = Heartbeat(path, steps=1, notify=print, interval_seconds=OFTEN)
    assert wait_until(path.exists)
    before = read(path)
    assert wait_until(lambda: read(path)["time"] > before["time"])
    assert read(path)["phase_since"] == before["phase_since"]
    heartbeat.close("ended")
    assert not heartbeat.is_writing


def test_writes_are_rate_limited(path, monkeypatch):
    monkeypatch.setattr(module, "MIN_HEARTBEAT_SECONDS", UNREACHED_SECONDS)
    writes: list[int] = []
    heartbeat = Heartbeat(
        path, steps=1, notify=print, interval_seconds=UNREACHED_SECONDS, require_lock=lambda: writes.append(1)
    )
    assert wait_until(path.exists)
    for step in range(500):
        heartbeat.phase(step, "short")
    heartbeat.close("ended")
    assert (len(writes), read(path)["step"]) == (2, 499)


def test_a_run_that_lost_its_folder_writes_no_heartbeat(path):
    lost, messages = threading.Event(), list[str]()

    def require_lock():
        if lost.is_set():
            raise LostLockError("run_dir no longer belongs to this run")

    heartbeat = Heartbeat(path, steps=1, notify=messages.append, interval_seconds=OFTEN, require_lock=require_lock)
    assert wait_until(path.exists)
    lost.set()
    assert wait_until(lambda: not heartbeat.is_writing)
    path.write_text("of the other run")
    heartbeat.phase(1, "train")
    heartbeat.close("failed")
    assert (path.read_text(), messages) == ("of the other run", [])


def test_write_failure_is_reported_once(path):
    path.parent.write_text("not a folder")
    attempts: list[int] = []
    messages: list[str] = []
    options = {"interval_seconds": OFTEN, "require_lock": lambda: attempts.append(1)}
    heartbeat = Heartbeat(path, steps=1, notify=messages.append, **options)
    heartbeat.phase(1, "train")
    assert wait_until(lambda: len(attempts) > 3)
    path.parent.unlink()
    assert wait_until(path.exists), "does not recover"
    heartbeat.close("ended")
    assert len(messages) == 1
    assert "heartbeat.json cannot be written" in messages[0]
