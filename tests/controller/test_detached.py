"""How a controller that its command has left takes the run's folder over."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from megarl.checkpoint.run_lock import SILENT_SECONDS, RunLock
from megarl.controller import detached
from megarl.controller.detached import waited_for


def test_a_machine_that_is_lost_with_the_controller_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with RunLock(tmp_path):
        content = json.loads((tmp_path / "lock").read_bytes())
    (tmp_path / "lock").write_text(json.dumps(content | {"host": "n2", "machine": "another boot"}))
    os.utime(tmp_path / "lock", (time.time() - SILENT_SECONDS + 1,) * 2)
    monkeypatch.setattr(detached, "BEGIN_SECONDS", 0.0)
    lock = RunLock(tmp_path)
    with waited_for(lock):
        assert lock.is_held()
