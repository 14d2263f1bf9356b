"""Message queues of killed engines are removed from shared memory; those in use are kept."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from megarl.rollout.sglang.shm_cleanup import MIN_AGE_SECONDS, remove_abandoned_queues, remove_queues_of
from tests.time_limits import HANG_SECONDS


def make_queue(folder: Path, pid: int, *, age: float = 2 * MIN_AGE_SECONDS) -> Path:
    path = folder / f"sgl_shm_mq_{pid}_{pid:08x}"
    path.write_text("queue")
    then = time.time() - age
    os.utime(path, (then, then))
    return path


def find_dead_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_queues_of_dead_processes_are_removed(tmp_path: Path) -> None:
    gone = find_dead_pid()
    abandoned, ours = make_queue(tmp_path, gone), make_queue(tmp_path, os.getpid())
    other = tmp_path / f"another_{gone}_0"
    other.write_text("")
    remove_abandoned_queues(tmp_path)
    assert (abandoned.exists(), ours.exists(), other.exists()) == (False, True, True)


def test_young_queues_are_kept(tmp_path: Path) -> None:
    young = make_queue(tmp_path, find_dead_pid(), age=-HANG_SECONDS)
    remove_abandoned_queues(tmp_path)
    assert young.exists()


def test_queues_of_an_engine_are_removed(tmp_path: Path) -> None:
    mine, other = make_queue(tmp_path, 11, age=0.0), make_queue(tmp_path, 12, age=0.0)
    remove_queues_of([11], tmp_path)
    assert (mine.exists(), other.exists()) == (False, True)
