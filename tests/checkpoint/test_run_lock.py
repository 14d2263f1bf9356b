"""The run lock: races, dead and remote holders, and file system errors."""

import json
import multiprocessing
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megarl.checkpoint import run_lock
from megarl.checkpoint.run_lock import RunLock, require_lock
from megarl.errors import ConfigError, DataError, LostLockError
from tests.checkpoint.run_folder import take_over
from tests.errors import expect_error
from tests.time_limits import HANG_SECONDS, UNREACHED_SECONDS, wait_until

RACERS = 8
TIMEOUT = 10 * HANG_SECONDS
ALIVE, DEAD = TIMEOUT - UNREACHED_SECONDS, TIMEOUT + 10
"""Seconds since a lock of another host was touched."""
FORK = multiprocessing.get_context("fork")


@pytest.fixture(autouse=True)
def _long_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_lock, "LOCK_TIMEOUT_SECONDS", TIMEOUT)


def listing(folder: Path) -> dict[str, tuple[int, int]]:
    """Return inode and modification time of each file."""
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


def count_winners(run_dir: Path) -> int:
    """Start processes that all try to acquire the lock at once and live until all have tried; return the winners."""
    results, ready, done = FORK.Queue(), FORK.Barrier(RACERS), FORK.Barrier(RACERS + 1)
    processes = [FORK.Process(target=race, args=(run_dir, results, ready, done)) for _ in range(RACERS)]
    for process in processes:
        process.start()
    won = [results.get(timeout=HANG_SECONDS) for _ in processes]
    done.wait(timeout=HANG_SECONDS)
    for process in processes:
        process.join()
    return sum(won)


def start_holder(run_dir: Path) -> subprocess.Popen[str]:
    code = (
        "import sys, time; from megarl.checkpoint.run_lock import RunLock\n"
        "with RunLock(sys.argv[1]): print('held', flush=True); time.sleep(6000)"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(run_dir)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def kill(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()


def write_lock_of_another_host(run_dir: Path, age: float) -> None:
    """Write a lock of another host, last touched `age` seconds ago."""
    run_dir.mkdir(exist_ok=True)
    with RunLock(run_dir):
        content = json.loads((run_dir / "lock").read_bytes())
    content |= {"host": "n2", "machine": "another boot", "since": "2026-01-02T03:04:05+00:00", "pid": 123}
    (run_dir / "lock").write_text(json.dumps(content))
    os.utime(run_dir / "lock", (time.time() - age,) * 2)


def wait_for_touch(path: Path) -> None:
    assert wait_until(lambda: path.stat().st_mtime != 0), "nobody touches the lock"


@pytest.mark.parametrize("trials", [3, pytest.param(20, marks=pytest.mark.slow)])
@pytest.mark.parametrize("free", [True, False])
def test_one_of_many_processes_acquires_the_lock(tmp_path, monkeypatch, free, trials):
    """Each lock is free, or held by the dead winner of the round before.

    Processes that take over wait a moment between the check and the takeover.
    """
    check = RunLock.require_free

    def check_and_wait(lock, now):
        dead = check(lock, now)
        time.sleep(random.Random(os.getpid()).random() * 0.02)
        return dead

    if not free:
        monkeypatch.setattr(RunLock, "require_free", check_and_wait)
    for trial in range(trials):
        run_dir = tmp_path / (str(trial) if free else "all")
        assert count_winners(run_dir) == 1, trial
        assert listing(run_dir).keys() == {"lock"}


def test_a_live_holder_is_reported_and_the_folder_is_unchanged(tmp_path):
    run_dir = tmp_path / "run"
    holder = start_holder(run_dir)
    try:
        before = listing(tmp_path) | listing(run_dir)
        who = re.escape(f"run_dir {run_dir} is in use by pid {holder.pid} on host {socket.gethostname()} since 2")
        message = rf"^{who}\S+: wait for it, end it, or choose another run_dir$"
        with pytest.raises(ConfigError, match=message):
            RunLock(run_dir).acquire()
        assert listing(tmp_path) | listing(run_dir) == before
        seen = run_lock.find_live_holder(run_dir)
        assert seen is not None
        assert seen.pid == holder.pid
    finally:
        kill(holder)
    assert run_lock.find_live_holder(run_dir) is None
    with RunLock(run_dir) as lock:
        assert lock.is_held()
    assert list(run_dir.iterdir()) == []


@pytest.mark.parametrize("how", ["zombie", "reused pid"])
def test_a_holder_that_has_ended_is_dead(tmp_path, how):
    holder = start_holder(tmp_path)
    try:
        if how == "zombie":
            holder.send_signal(signal.SIGKILL)
            os.waitid(os.P_PID, holder.pid, os.WEXITED | os.WNOWAIT)  # ended but not reaped
        else:
            content = json.loads((tmp_path / "lock").read_bytes())
            (tmp_path / "lock").write_text(json.dumps(content | {"started": content["started"] - 1}))
        with RunLock(tmp_path) as lock:
            assert lock.is_held()
    finally:
        kill(holder)


def test_a_process_cannot_acquire_the_same_lock_twice(tmp_path):
    with RunLock(tmp_path), expect_error(ConfigError, f"pid {os.getpid()} "):
        RunLock(tmp_path).acquire()
    assert list(tmp_path.iterdir()) == []


def test_a_holder_on_another_host_is_alive_while_it_touches_lock_or_heartbeat(tmp_path):
    write_lock_of_another_host(tmp_path, age=ALIVE)
    holder = ("pid 123", "host n2", "2026-01-02")
    with expect_error(ConfigError, *holder):
        RunLock(tmp_path).acquire()
    write_lock_of_another_host(tmp_path / "b", age=DEAD)
    (tmp_path / "b" / run_lock.HEARTBEAT).write_text("{}")
    before = listing(tmp_path / "b")
    with expect_error(ConfigError, *holder):
        RunLock(tmp_path / "b").acquire()
    assert listing(tmp_path / "b") == before
    os.utime(tmp_path / "b" / run_lock.HEARTBEAT, (time.time() - DEAD,) * 2)
    with RunLock(tmp_path / "b") as lock:
        assert lock.is_held()


def test_age_is_measured_by_the_file_system_clock(tmp_path, monkeypatch):
    write_lock_of_another_host(tmp_path, age=10)
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 2 * TIMEOUT)  # local clock ahead of the file system
    with expect_error(ConfigError, "123", "n2"):
        RunLock(tmp_path).acquire()
    assert listing(tmp_path).keys() == {"lock"}


def test_a_malformed_lock_is_respected_until_the_timeout(tmp_path):
    (tmp_path / "lock").write_text("")
    with expect_error(ConfigError, "another", "process"):
        RunLock(tmp_path).acquire()
    os.utime(tmp_path / "lock", (time.time() - DEAD,) * 2)
    with RunLock(tmp_path) as lock:
        assert lock.is_held()


def test_the_holder_touches_the_lock(tmp_path, monkeypatch):
    monkeypatch.setattr(run_lock, "TOUCH_SECONDS", 0.01)
    with RunLock(tmp_path):
        os.utime(tmp_path / "lock", (0, 0))
        wait_for_touch(tmp_path / "lock")


def test_a_holder_that_lost_the_lock_neither_touches_nor_removes_it(tmp_path, monkeypatch):
    monkeypatch.setattr(run_lock, "TOUCH_SECONDS", 0.01)
    lock, others = RunLock(tmp_path), set(threading.enumerate())
    lock.acquire()
    (toucher,) = set(threading.enumerate()) - others
    other_lock = json.loads((tmp_path / "lock").read_bytes()) | {"host": "n2", "token": "another"}
    (tmp_path / "new").write_text(json.dumps(other_lock))
    os.utime(tmp_path / "new", (0, 0))
    (tmp_path / "new").replace(tmp_path / "lock")
    toucher.join(HANG_SECONDS)
    assert not toucher.is_alive()
    assert not lock.is_held()
    lock.release()
    assert (tmp_path / "lock").stat().st_mtime == 0


def test_a_process_that_lost_the_lock_is_told_who_holds_it(tmp_path):
    require_lock(tmp_path)  # never acquired by this process: nothing to lose
    with RunLock(tmp_path):
        require_lock(tmp_path)
        take_over(tmp_path)
        message = rf"^run_dir {re.escape(str(tmp_path))} .* pid 123 on host n2 since 2026-01-02T\S+ holds it now"
        with pytest.raises(LostLockError, match=message):
            require_lock(tmp_path)
        (tmp_path / "lock").write_text("{")
        with expect_error(LostLockError, "another", "process"):
            require_lock(tmp_path)
        (tmp_path / "lock").unlink()
        with expect_error(LostLockError, "process", "holds"):
            require_lock(tmp_path)
    with RunLock(tmp_path):
        require_lock(tmp_path)
    with expect_error(LostLockError, "process", "holds"):
        require_lock(tmp_path)  # a thread that is still writing after the release


def test_a_process_that_writes_for_the_holder_adopts_its_claim(tmp_path, monkeypatch):
    assert run_lock.find_claim(tmp_path) is None
    with RunLock(tmp_path):
        claim = run_lock.find_claim(tmp_path)
        assert claim is not None
        monkeypatch.setattr(run_lock, "_tokens", {})  # as in another process
        run_lock.adopt_claim(claim)
        require_lock(tmp_path)
        take_over(tmp_path)
        with pytest.raises(LostLockError):
            require_lock(tmp_path)


def test_a_folder_that_cannot_be_locked_is_reported(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with expect_error(ConfigError, "Not", "directory", "cannot"):
        RunLock(tmp_path / "file").acquire()

    def link(*_):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(os, "link", link)
    with expect_error(ConfigError, "cannot", "locked"):
        RunLock(tmp_path).acquire()
    assert listing(tmp_path).keys() == {"file"}


def test_touching_continues_after_file_system_errors(tmp_path, monkeypatch):
    monkeypatch.setattr(run_lock, "TOUCH_SECONDS", 0.01)
    real, outages = os.utime, iter([True, True, True])

    def utime(path, *args, **options):
        if next(outages, False):
            raise OSError(116, "Stale file handle")
        real(path, *args, **options)

    with RunLock(tmp_path):
        os.utime(tmp_path / "lock", (0, 0))
        with monkeypatch.context() as patch:
            patch.setattr(os, "utime", utime)
            wait_for_touch(tmp_path / "lock")
        assert next(outages, None) is None


def test_a_folder_named_lock_is_reported(tmp_path):
    (tmp_path / "lock").mkdir()
    actions: tuple[Callable[[], object], ...] = (RunLock(tmp_path).acquire, lambda: run_lock.find_live_holder(tmp_path))
    for action in actions:
        with expect_error(ConfigError, "Is", "directory", "cannot"):
            action()
    assert listing(tmp_path).keys() == {"lock"}
    run_lock.adopt_claim(run_lock.LockClaim(run_dir=str(tmp_path), token="mine"))
    with expect_error(DataError, "Is", "directory", "cannot"):
        require_lock(tmp_path)
