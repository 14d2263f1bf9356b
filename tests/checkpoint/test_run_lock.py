from __future__ import annotations

import json
import multiprocessing
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megarl.checkpoint import run_lock
from megarl.checkpoint.run_lock import HEARTBEAT, SILENT_SECONDS, RunLock, live_holder
from megarl.errors import ConfigError

RACERS = 8
FORK = multiprocessing.get_context("fork")


def listing(folder: Path) -> dict[str, tuple[int, int]]:
    """Inode and time of each file."""
    return {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in folder.iterdir()}


def race(run_dir: Path, results: Any, ready: Any, done: Any) -> None:
    ready.wait()
    lock = RunLock(run_dir)
    try:
        lock.acquire()
    except ConfigError:
        results.put(False)
    else:
        results.put(lock.is_held())
    done.wait()


def winners(run_dir: Path) -> int:
    """Of processes that all try at once, and live until all have tried."""
    results, ready, done = FORK.Queue(), FORK.Barrier(RACERS), FORK.Barrier(RACERS + 1)
    processes = [FORK.Process(target=race, args=(run_dir, results, ready, done)) for _ in range(RACERS)]
    for process in processes:
        process.start()
    won = [results.get(timeout=60) for _ in processes]
    done.wait(timeout=60)
    for process in processes:
        process.join()
    return sum(won)


def hold(run_dir: Path) -> subprocess.Popen[str]:
    """A process that has the lock."""
    code = (
        "import sys, time; from megarl.checkpoint.run_lock import RunLock\n"
        "with RunLock(sys.argv[1]): print('held', flush=True); time.sleep(600)"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(run_dir)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def kill(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()


def of_another_host(run_dir: Path, age: float) -> None:
    """Leaves a lock that gave its last sign so long ago."""
    run_dir.mkdir(exist_ok=True)
    with RunLock(run_dir):
        content = json.loads((run_dir / "lock").read_bytes())
    content |= {"host": "n2", "machine": "another boot", "since": "2026-01-02T03:04:05+00:00", "pid": 123}
    (run_dir / "lock").write_text(json.dumps(content))
    os.utime(run_dir / "lock", (time.time() - age,) * 2)


def test_one_of_many_wins_a_free_lock(tmp_path: Path) -> None:
    for trial in range(5):
        assert winners(tmp_path / str(trial)) == 1


def test_one_of_many_takes_over_from_the_dead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The winners of the round before are dead by then. Whoever has judged them waits a moment before it acts."""
    judge = RunLock._require_free

    def judge_and_wait(lock: RunLock, now: float) -> bytes | None:
        judged = judge(lock, now)
        time.sleep(random.Random(os.getpid()).random() * 0.02)
        return judged

    monkeypatch.setattr(RunLock, "_require_free", judge_and_wait)
    for trial in range(10):
        assert winners(tmp_path) == 1, trial
        assert listing(tmp_path).keys() == {"lock"}


def test_a_live_holder_is_named_and_nothing_changes(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    holder = hold(run_dir)
    try:
        before = listing(tmp_path) | listing(run_dir)
        who = re.escape(f"run_dir {run_dir} is in use by pid {holder.pid} on host {socket.gethostname()} since 2")
        message = rf"^{who}\S+: wait for it, end it, or choose another run_dir$"
        with pytest.raises(ConfigError, match=message):
            RunLock(run_dir).acquire()
        assert listing(tmp_path) | listing(run_dir) == before
        seen = live_holder(run_dir)
        assert seen is not None
        assert seen.pid == holder.pid
    finally:
        kill(holder)
    assert live_holder(run_dir) is None
    with RunLock(run_dir) as lock:
        assert lock.is_held()
    assert list(run_dir.iterdir()) == []


def test_a_zombie_is_dead(tmp_path: Path) -> None:
    holder = hold(tmp_path)
    holder.send_signal(signal.SIGKILL)
    os.waitid(os.P_PID, holder.pid, os.WEXITED | os.WNOWAIT)  # ended, and still listed
    with RunLock(tmp_path) as lock:
        assert lock.is_held()
    holder.wait()


def test_a_process_id_that_is_used_again_is_another_process(tmp_path: Path) -> None:
    holder = hold(tmp_path)
    try:
        content = json.loads((tmp_path / "lock").read_bytes())
        (tmp_path / "lock").write_text(json.dumps(content | {"started": content["started"] - 1}))
        with RunLock(tmp_path) as lock:
            assert lock.is_held()
    finally:
        kill(holder)


def test_a_process_holds_a_folder_once(tmp_path: Path) -> None:
    with RunLock(tmp_path), pytest.raises(ConfigError, match=f"in use by pid {os.getpid()} "):
        RunLock(tmp_path).acquire()
    assert list(tmp_path.iterdir()) == []


def test_a_holder_on_another_host_lives_while_it_gives_signs(tmp_path: Path) -> None:
    of_another_host(tmp_path, age=SILENT_SECONDS - 10)
    message = "in use by pid 123 on host n2 since 2026-01-02"
    with pytest.raises(ConfigError, match=message):
        RunLock(tmp_path).acquire()
    of_another_host(tmp_path / "b", age=SILENT_SECONDS + 10)
    (tmp_path / "b" / HEARTBEAT).write_text("{}")
    before = listing(tmp_path / "b")
    with pytest.raises(ConfigError, match=message):
        RunLock(tmp_path / "b").acquire()
    assert listing(tmp_path / "b") == before
    os.utime(tmp_path / "b" / HEARTBEAT, (time.time() - SILENT_SECONDS - 1,) * 2)
    with RunLock(tmp_path / "b") as lock:
        assert lock.is_held()


def test_the_time_of_the_file_system_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    of_another_host(tmp_path, age=10)
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 1000)  # a clock that is ahead
    with pytest.raises(ConfigError, match="in use by pid 123 on host n2"):
        RunLock(tmp_path).acquire()
    assert listing(tmp_path).keys() == {"lock"}


def test_a_lock_that_cannot_be_read_is_believed_for_a_while(tmp_path: Path) -> None:
    (tmp_path / "lock").write_text("")
    with pytest.raises(ConfigError, match="in use by another process: "):
        RunLock(tmp_path).acquire()
    os.utime(tmp_path / "lock", (time.time() - SILENT_SECONDS - 1,) * 2)
    with RunLock(tmp_path) as lock:
        assert lock.is_held()


def test_the_holder_gives_signs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_lock, "TOUCH_SECONDS", 0.01)
    with RunLock(tmp_path):
        os.utime(tmp_path / "lock", (0, 0))
        deadline = time.monotonic() + 10
        while (tmp_path / "lock").stat().st_mtime == 0 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert time.time() - (tmp_path / "lock").stat().st_mtime < 10


def test_one_that_lost_it_neither_touches_nor_removes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_lock, "TOUCH_SECONDS", 0.01)
    lock = RunLock(tmp_path)
    lock.acquire()
    of_another = json.loads((tmp_path / "lock").read_bytes()) | {"host": "n2", "token": "another"}
    (tmp_path / "new").write_text(json.dumps(of_another))
    os.utime(tmp_path / "new", (0, 0))
    (tmp_path / "new").replace(tmp_path / "lock")
    time.sleep(0.1)
    assert not lock.is_held()
    lock.release()
    assert (tmp_path / "lock").stat().st_mtime == 0


def test_a_folder_that_cannot_be_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="file cannot be locked: Not a directory"):
        RunLock(tmp_path / "file").acquire()

    def link(*_: Any) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(os, "link", link)
    with pytest.raises(ConfigError, match="cannot be locked: its file system needs hard links and flock"):
        RunLock(tmp_path).acquire()
    assert listing(tmp_path).keys() == {"file"}


def test_a_disk_that_is_away_for_a_while_does_not_end_the_signs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_lock, "TOUCH_SECONDS", 0.01)
    real, away = os.utime, iter([True, True, True])

    def utime(path: Any, *args: Any, **options: Any) -> None:
        if next(away, False):
            raise OSError(116, "Stale file handle")
        real(path, *args, **options)

    with RunLock(tmp_path):
        os.utime(tmp_path / "lock", (0, 0))
        with monkeypatch.context() as patch:
            patch.setattr(os, "utime", utime)
            deadline = time.monotonic() + 10
            while (tmp_path / "lock").stat().st_mtime == 0 and time.monotonic() < deadline:
                time.sleep(0.01)
        assert (tmp_path / "lock").stat().st_mtime > 0


def test_a_lock_that_is_none_is_told(tmp_path: Path) -> None:
    (tmp_path / "lock").mkdir()
    looks: tuple[Callable[[], object], ...] = (RunLock(tmp_path).acquire, lambda: live_holder(tmp_path))
    for look in looks:
        with pytest.raises(ConfigError, match=r"cannot be locked: Is a directory$"):
            look()
    assert listing(tmp_path).keys() == {"lock"}
