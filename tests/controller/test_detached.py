"""How the controller of a detached run acquires the lock of the run folder."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from megarl.checkpoint.run_lock import LOCK_TIMEOUT_SECONDS, RunLock
from megarl.controller import detached
from megarl.controller.detached import acquire_when_free


def test_the_lock_of_a_controller_on_a_lost_node_is_acquired_once_it_expires(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with RunLock(tmp_path):
        content = json.loads((tmp_path / "lock").read_bytes())
    (tmp_path / "lock").write_text(json.dumps(content | {"host": "n2", "machine": "another boot"}))
    os.utime(tmp_path / "lock", (time.time() - LOCK_TIMEOUT_SECONDS + 1,) * 2)
    monkeypatch.setattr(detached, "START_TIMEOUT_SECONDS", 0.0)
    lock = RunLock(tmp_path)
    with acquire_when_free(lock):
        assert lock.is_held()
