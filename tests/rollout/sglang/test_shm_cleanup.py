"""What killed engines leave in shared memory goes; what is in use stays."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from megarl.rollout.sglang.shm_cleanup import YOUNG_SECONDS, remove_abandoned, remove_of


def make(folder: Path, pid: int, *, age: float = 2 * YOUNG_SECONDS) -> Path:
    path = folder / f"sgl_shm_mq_{pid}_{pid:08x}"
    path.write_text("queue")
    then = time.time() - age
    os.utime(path, (then, then))
    return path


def ended_process() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_queues_of_processes_that_are_gone_are_removed(tmp_path: Path) -> None:
    gone = ended_process()
    abandoned, ours = make(tmp_path, gone), make(tmp_path, os.getpid())
    other = tmp_path / f"another_{gone}_0"
    other.write_text("")
    remove_abandoned(tmp_path)
    assert (abandoned.exists(), ours.exists(), other.exists()) == (False, True, True)


def test_a_young_one_may_be_of_a_process_that_cannot_be_seen(tmp_path: Path) -> None:
    young = make(tmp_path, ended_process(), age=0.0)
    remove_abandoned(tmp_path)
    assert young.exists()


def test_those_of_an_engine_go_with_it(tmp_path: Path) -> None:
    mine, other = make(tmp_path, 11, age=0.0), make(tmp_path, 12, age=0.0)
    remove_of([11], tmp_path)
    assert (mine.exists(), other.exists()) == (False, True)
