"""The server from which schedulers are forked: whose it is, and that a killed host leaves no file of it behind."""

import json
import os
import subprocess
import sys

import psutil

from tests.time_limits import HANG_SECONDS

HOST = """
import json, os, signal, sys
from multiprocessing import forkserver
from megarl.rollout.sglang import scheduler_process

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
    variables = os.environ | {"TMPDIR": str(folders[2]), "END": end}
    run = subprocess.run(
        [sys.executable, "-c", HOST, *map(str, folders[:2])],
        env=variables,
        stdout=subprocess.PIPE,
        timeout=HANG_SECONDS,
    )
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
