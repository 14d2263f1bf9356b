"""What hosts leave behind, killed or not: private folders, queues in shared memory, the server of schedulers."""

import asyncio
import fcntl
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil
import pytest

from megarl.engines.engine_spec import EngineSpec
from megarl.engines.sglang import engine_host
from megarl.engines.sglang.engine_host import (
    MIN_AGE_SECONDS,
    EngineHost,
    PrivateFolder,
    remove_abandoned_queues,
    remove_queues_of,
)
from megarl.errors import WorkerError
from tests.errors import expect_error
from tests.rollout.clock import iterate
from tests.time_limits import HANG_SECONDS

CREATE_AND_WAIT = """import sys, tempfile; tempfile.tempdir = sys.argv[1]
from megarl.engines.sglang.engine_host import PrivateFolder
folder = PrivateFolder('engine-'); print(folder.path, flush=True); sys.stdin.read()
"""


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_only_folders_of_dead_processes_are_removed(temporary):
    unrelated = temporary / "engine-of-somebody-else"
    unrelated.mkdir()
    command = [sys.executable, "-c", CREATE_AND_WAIT, str(temporary)]
    other = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        theirs = Path(other.stdout.readline().strip())
        (theirs / "socket").touch()
        first = PrivateFolder("engine-")
        assert theirs.exists()
        other.kill()
        other.wait()
        second = PrivateFolder("engine-")
        assert not theirs.exists()
        assert set(temporary.iterdir()) == {unrelated, Path(first.path), Path(second.path)}
    finally:
        other.kill()
        other.communicate()
    for folder in (first, second, first):
        folder.remove()
    assert list(temporary.iterdir()) == [unrelated]


def test_folder_that_is_removed_before_it_is_locked_is_created_again(temporary, monkeypatch):
    removed = []

    def flock(file, operation):
        if operation == fcntl.LOCK_EX and not removed:
            (folder,) = temporary.iterdir()
            removed.append(folder)
            engine_host.remove_abandoned(folder)
            assert not folder.exists()
        return before(file, operation)

    before = fcntl.flock
    monkeypatch.setattr(fcntl, "flock", flock)
    folder = PrivateFolder("engine-")
    assert Path(folder.path).is_dir()
    assert list(temporary.iterdir()) == [Path(folder.path)]
    engine_host.remove_abandoned(Path(folder.path))
    assert Path(folder.path).is_dir()
    folder.remove()


def test_engine_that_is_stopped_before_it_has_a_folder_removes_it_before_it_imports(temporary, monkeypatch):
    """The process may be killed while it imports SGLang, which takes seconds."""
    is_stopped = threading.Event()

    def create_late(prefix: str) -> PrivateFolder:
        assert is_stopped.wait(HANG_SECONDS)
        return PrivateFolder(prefix)

    def continue_startup(model_path: str) -> None:
        raise AssertionError("the engine continues its startup")

    monkeypatch.setattr(engine_host, "PrivateFolder", create_late)
    monkeypatch.setattr(engine_host, "skip_other_models", continue_startup)

    async def stop_while_it_starts() -> None:
        host = EngineHost(EngineSpec(model_path=""))
        start = asyncio.ensure_future(host.start())
        await iterate()
        stop = asyncio.ensure_future(host.shutdown())
        await iterate()
        is_stopped.set()
        await stop
        with expect_error(WorkerError, "stopped", "startup"):
            await start

    asyncio.run(stop_while_it_starts())
    assert list(temporary.iterdir()) == []


def make_queue(folder: Path, pid: int, *, age: float = 2 * MIN_AGE_SECONDS) -> Path:
    path = folder / f"sgl_shm_mq_{pid}_{pid:08x}"
    path.write_text("queue")
    then = time.time() - age
    os.utime(path, (then, then))
    return path


def test_queues_of_dead_processes_are_removed_unless_they_are_young(tmp_path: Path) -> None:
    processes = [subprocess.Popen([sys.executable, "-c", ""]) for _ in range(2)]
    gone, gone_too = (process.pid for process in processes if process.wait() == 0)
    abandoned, ours = make_queue(tmp_path, gone), make_queue(tmp_path, os.getpid())
    other, young = tmp_path / f"another_{gone}_0", make_queue(tmp_path, gone_too, age=-HANG_SECONDS)
    other.write_text("")
    remove_abandoned_queues(tmp_path)
    assert [path.exists() for path in (abandoned, ours, other, young)] == [False, True, True, True]


def test_queues_of_an_engine_are_removed(tmp_path: Path) -> None:
    mine, other = make_queue(tmp_path, 11, age=0.0), make_queue(tmp_path, 12, age=0.0)
    remove_queues_of([11], tmp_path)
    assert (mine.exists(), other.exists()) == (False, True)


HOST = """
import json, os, signal, sys
from multiprocessing import forkserver
from megarl.engines.sglang import scheduler_process

scheduler_process.FORK_SERVER_MODULES.clear()  # SGLang, which takes seconds to import
started = [scheduler_process.start_fork_server(folder) for folder in sys.argv[1:]]
server = forkserver._forkserver
print(json.dumps([started, server._forkserver_pid, server._forkserver_address]), flush=True)
if os.environ["END"] == "stop":
    scheduler_process.stop_fork_server()
    started = scheduler_process.start_fork_server(sys.argv[2])
    print(json.dumps([started, server._forkserver_pid, server._forkserver_address]), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def run_host(end, tmp_path):
    """Start the server for two engines in one process, which is then killed; return the lines that it printed."""
    folders = [tmp_path / name for name in ("first", "second", "temporary")]
    for folder in folders:
        folder.mkdir()
    command = [sys.executable, "-c", HOST, *map(str, folders[:2])]
    variables = os.environ | {"TMPDIR": str(folders[2]), "END": end}
    run = subprocess.run(command, env=variables, stdout=subprocess.PIPE, timeout=HANG_SECONDS)
    return [json.loads(line) for line in run.stdout.splitlines()]


def test_engines_of_a_process_share_a_server_that_the_first_one_started(tmp_path):
    ((started, _, socket),) = run_host("kill", tmp_path)
    assert started == [True, False]
    assert os.path.dirname(socket) == str(tmp_path / "first")
    assert list((tmp_path / "temporary").iterdir()) == []


def test_stopped_server_is_gone_and_can_be_started_again(tmp_path):
    (_, first, first_socket), (started, second, second_socket) = run_host("stop", tmp_path)
    assert started
    assert second != first
    assert not psutil.pid_exists(first)
    assert not os.path.exists(first_socket)
    assert os.path.dirname(second_socket) == str(tmp_path / "second")
