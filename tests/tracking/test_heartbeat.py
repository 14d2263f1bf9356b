"""The heartbeat file."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from megarl.errors import LostLockError
from megarl.tracking.heartbeat import MIN_INTERVAL_SECONDS, Heartbeat
from tests.end_to_end.launched import wait_until
from tests.time_limits import HANG_SECONDS


def read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def age(stamp: str) -> float:
    return (datetime.now(UTC) - datetime.fromisoformat(stamp)).total_seconds()


def test_file_has_the_state_of_the_run(tmp_path: Path) -> None:
    path = tmp_path / "run" / "heartbeat.json"
    messages: list[str] = []
    heartbeat = Heartbeat(path, steps=40, notify=messages.append, interval_seconds=2 * HANG_SECONDS)
    assert wait_until(path.exists)
    first = read(path)
    assert (first["pid"], first["host"], first["status"]) == (os.getpid(), socket.gethostname(), "starting")
    assert (first["step"], first["steps"], first["phase"], first["policy_version"]) == (0, 40, "", None)
    assert -1 < age(first["time"]) < HANG_SECONDS

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


def test_file_is_rewritten_while_nothing_changes(tmp_path: Path) -> None:
    path = tmp_path / "heartbeat.json"
    heartbeat = Heartbeat(path, steps=1, notify=print, interval_seconds=0.05)
    assert wait_until(path.exists)
    before = read(path)
    assert wait_until(lambda: read(path)["time"] > before["time"])
    assert read(path)["phase_since"] == before["phase_since"]
    heartbeat.close("ended")
    last = path.read_text()
    time.sleep(0.3)
    assert path.read_text() == last


def test_writes_are_rate_limited(tmp_path: Path) -> None:
    path, seen = tmp_path / "heartbeat.json", set()
    heartbeat = Heartbeat(path, steps=1, notify=print)
    assert wait_until(path.exists)
    began = time.monotonic()
    for step in range(500):
        heartbeat.phase(step, "short")
        time.sleep(0.002)
        seen.add(read(path)["step"])
    seconds = time.monotonic() - began
    heartbeat.close("ended")
    assert len(seen) <= 2 + seconds / MIN_INTERVAL_SECONDS
    assert read(path)["step"] == 499


def test_a_run_that_lost_its_folder_writes_no_heartbeat(tmp_path: Path) -> None:
    path, has_lock, messages = tmp_path / "heartbeat.json", threading.Event(), list[str]()
    has_lock.set()

    def require_lock() -> None:
        if not has_lock.is_set():
            raise LostLockError("run_dir no longer belongs to this run")

    heartbeat = Heartbeat(path, steps=1, notify=messages.append, interval_seconds=0.05, require_lock=require_lock)
    assert wait_until(path.exists)
    has_lock.clear()
    time.sleep(0.2)
    path.write_text("of the other run")
    heartbeat.phase(1, "train")
    time.sleep(0.2)
    heartbeat.close("failed")
    assert path.read_text() == "of the other run"
    assert messages == []


def test_write_failure_is_reported_once(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("not a folder")
    messages: list[str] = []
    heartbeat = Heartbeat(tmp_path / "run" / "heartbeat.json", steps=1, notify=messages.append, interval_seconds=0.05)
    assert wait_until(lambda: bool(messages))
    heartbeat.phase(1, "train")
    time.sleep(0.3)
    (tmp_path / "run").unlink()
    assert wait_until((tmp_path / "run" / "heartbeat.json").exists), "does not recover"
    heartbeat.close("ended")
    assert len(messages) == 1
    assert "heartbeat.json cannot be written" in messages[0]
