"""Launches of two nodes on this machine with real processes, sockets and signals; with Ray or `fake_ray`."""

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time

import psutil
import pytest

from megarl.process.ports import find_unused_port
from tests.time_limits import END_SECONDS, HANG_SECONDS

WAITING_COMMAND = """
import signal, sys, time
{prepare}
print("command runs", flush=True)
for _ in range(6000):
    if signal.SIGUSR1 in signal.sigpending():
        sys.exit(75)
    time.sleep(0.1)
"""
EXITS_ON_SIGTERM = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))"
IGNORES_SIGTERM = "signal.signal(signal.SIGTERM, signal.SIG_IGN)"

MARK = "MEGARL_TEST_LAUNCH"

SECRET = "the secret of all nodes of these tests"


class Nodes:
    """Two nodes, or as many as `size`, and all processes that descend from them."""

    def __init__(
        self,
        folder,
        code,
        *,
        ray="fake",
        size=2,
        secrets=(SECRET, SECRET),
        join_timeout=HANG_SECONDS,
        node_timeout=HANG_SECONDS,
        environment=None,
    ):
        self.mark = f"{os.getpid()}-{time.monotonic_ns()}"
        self.files = [folder / f"node{rank}" for rank in range(size)]
        port = str(find_unused_port())
        environment = os.environ | {MARK: self.mark, "JOIN_TIMEOUT": str(join_timeout)} | (environment or {})
        for name in ("RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN"):  # `ray.init` of other tests sets some of them
            environment.pop(name, None)
        self.processes = []
        for rank, file in enumerate(self.files):
            words = [str(rank), str(size), port, str(node_timeout), ray, sys.executable, "-c", textwrap.dedent(code)]
            command = [sys.executable, "-m", "tests.launch.node", *words]
            with file.open("w") as out:
                self.processes.append(
                    subprocess.Popen(
                        command,
                        stdout=out,
                        stderr=subprocess.STDOUT,
                        env=environment | {"MEGARL_LAUNCH_SECRET": secrets[rank]},
                        process_group=0,
                    )
                )

    def child(self, rank):
        """Return the child process that runs the node, for which the launcher waits."""
        (process,) = psutil.Process(self.processes[rank].pid).children()
        return process

    def output(self, rank):
        return self.files[rank].read_text()

    def wait_for(self, text):
        """Block until node 0 prints `text`."""
        deadline = time.monotonic() + HANG_SECONDS
        while text not in self.output(0):
            assert time.monotonic() < deadline, self.output(0) + self.output(1)
            assert self.processes[0].poll() is None, self.output(0) + self.output(1)
            time.sleep(0.02)

    def codes(self):
        return [process.wait(HANG_SECONDS) for process in self.processes]

    def find_remaining(self):
        """Return processes that still run, recognized by an inherited environment variable."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
                if process.environ().get(MARK) == self.mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def assert_nothing_is_left(self, within=0.0):
        deadline = time.monotonic() + within
        while (remaining := self.find_remaining()) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not remaining, [process.cmdline() for process in remaining]

    def kill_remaining(self):
        for process in self.find_remaining():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


@pytest.fixture
def nodes(tmp_path):
    with contextlib.ExitStack() as stack:

        def start(code, **kwargs):
            both = Nodes(tmp_path, code, **kwargs)
            stack.callback(both.kill_remaining)
            return both

        yield start


def make_waiting_command(prepare=EXITS_ON_SIGTERM):
    return WAITING_COMMAND.format(prepare=prepare)


def test_all_nodes_exit_with_the_code_of_the_command(nodes):
    # processes that the command leaves behind are terminated too
    both = nodes("""
        import os, subprocess, sys
        subprocess.Popen(["sleep", "60"], start_new_session=True)
        print("at", os.environ["RAY_ADDRESS"])
        sys.exit(7)
    """)
    assert both.codes() == [7, 7]
    both.assert_nothing_is_left()
    assert "\nat 127.0.0.1:" in both.output(0)
    phases = [line[:19].strip() for line in both.output(0).splitlines() if " s  " in line]
    assert phases == ["nodes connected", "Ray head started", "Ray nodes joined"]


@pytest.mark.parametrize("rank", [0, 1])
def test_sigterm_to_any_node_ends_the_run_gracefully(nodes, rank):
    both = nodes(make_waiting_command())
    both.wait_for("command runs")
    both.processes[rank].send_signal(signal.SIGTERM)
    assert both.codes() == [7, 7]
    both.assert_nothing_is_left()


@pytest.mark.parametrize("rank", [0, 1])
def test_sigint_before_the_command_runs(nodes, rank):
    both = nodes(make_waiting_command(), environment={"FAKE_RAY": "slow0"})
    both.wait_for("nodes connected")
    both.processes[rank].send_signal(signal.SIGINT)
    # the worker node has no answer from the head yet
    assert both.codes() == ([130, 130] if rank == 0 else [1, 130])
    assert "command runs" not in both.output(0)
    both.assert_nothing_is_left()


def test_second_signal_kills_the_command(nodes):
    both = nodes(make_waiting_command(IGNORES_SIGTERM), environment={"COMMAND_GRACE_SECONDS": "1200"})
    both.wait_for("command runs")
    for rank in (0, 1, 0, 1):  # one request that reaches all nodes, twice
        both.processes[rank].send_signal(signal.SIGTERM)
    time.sleep(0.8)
    assert both.processes[0].poll() is None
    both.processes[0].send_signal(signal.SIGTERM)
    assert both.codes() == [128 + 9, 128 + 9]


def test_command_that_ignores_sigterm_is_killed(nodes):
    both = nodes(make_waiting_command(IGNORES_SIGTERM))
    both.wait_for("command runs")
    started = time.monotonic()
    both.processes[0].send_signal(signal.SIGTERM)
    assert both.codes() == [128 + 9, 128 + 9]
    assert time.monotonic() - started >= 1.0
    both.assert_nothing_is_left()


def test_time_limit_signal_reaches_the_command_only_from_the_head(nodes):
    both = nodes(make_waiting_command())
    both.wait_for("command runs")
    both.processes[1].send_signal(signal.SIGUSR1)
    time.sleep(0.5)
    assert both.processes[0].poll() is None
    both.processes[0].send_signal(signal.SIGUSR1)
    assert both.codes() == [75, 75]


@pytest.mark.parametrize("rank", [0, 1])
def test_killed_launcher_ends_the_run_gracefully(nodes, rank):
    both = nodes(make_waiting_command())
    both.wait_for("command runs")
    both.processes[rank].kill()
    codes = both.codes()
    assert (codes[rank], codes[1 - rank]) == (-signal.SIGKILL, 7)
    both.assert_nothing_is_left(END_SECONDS)


@pytest.mark.parametrize("rank", [0, 1])
def test_killed_child_is_reported(nodes, rank):
    both = nodes(make_waiting_command())
    both.wait_for("command runs")
    both.child(rank).kill()
    assert both.codes() == [1, 1]
    assert f"(rank {rank}): its launcher exited with code -9" in both.output(rank)
    lost = (
        "(rank 1): lost the head 127.0.0.1: the connection was closed unexpectedly; this node was stopped",
        "(127.0.0.1, rank 1): the connection was closed unexpectedly; the run was aborted",
    )
    assert lost[rank] in both.output(1 - rank)
    both.assert_nothing_is_left()


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_silent_node_is_lost(nodes, rank):
    both = nodes(make_waiting_command(), node_timeout=5.0)
    both.wait_for("command runs")
    both.child(rank).suspend()
    other = 1 - rank
    assert both.processes[other].wait(HANG_SECONDS) == 1
    assert "127.0.0.1" in both.output(other)
    assert "no message for 5 s; " in both.output(other)
    both.child(rank).resume()
    assert both.codes()[rank] == 1
    both.assert_nothing_is_left()


@pytest.mark.parametrize(
    ("rank", "mode", "message"),
    [
        (0, "refuse", "Ray did not start:\n  no room for the object store"),
        (1, "die", "Ray ended:\n"),
        pytest.param(1, "refuse", "Ray did not start:\n  no room for the object store", marks=pytest.mark.slow),
        pytest.param(0, "die", "Ray ended:\n", marks=pytest.mark.slow),
    ],
)
def test_ray_failure_ends_the_run(nodes, rank, mode, message):
    both = nodes(make_waiting_command(), environment={"FAKE_RAY": f"{mode}{rank}"})
    assert both.codes() == [1, 1]
    assert message in both.output(0)
    assert f"rank {rank})" in both.output(0)
    both.assert_nothing_is_left()


def test_nodes_with_different_secrets_name_each_other(nodes):
    both = nodes(make_waiting_command(), secrets=(SECRET, "the secret of another run"), join_timeout=8.0)
    assert both.codes() == [1, 1]
    assert "; 127.0.0.1 did not prove that it knows MEGARL_LAUNCH_SECRET" in both.output(0)
    assert "the head there does not know this node's MEGARL_LAUNCH_SECRET" in both.output(1)
    both.assert_nothing_is_left()


def test_secret_reaches_neither_the_command_nor_ray_and_all_have_the_same_token(nodes):
    both = nodes("""
        import os, psutil, sys
        print("command runs", os.environ["RAY_AUTH_MODE"], os.environ["RAY_AUTH_TOKEN"], flush=True)
        print("secret:", os.environ.get("MEGARL_LAUNCH_SECRET"), flush=True)
        sys.stdin.read(), __import__("time").sleep(600)
    """)
    both.wait_for("secret: ")
    mode, token = both.output(0).partition("command runs ")[2].split()[:2]
    assert mode == "token"
    assert len(token) == 64
    assert "secret: None\n" in both.output(0)
    for process in both.find_remaining():
        try:
            environment, name, command = process.environ(), process.name(), " ".join(process.cmdline())
        except psutil.NoSuchProcess:  # it has just ended
            continue
        if name == "sh":  # a worker of fake_ray
            assert environment["RAY_AUTH_TOKEN"] == token
            assert "MEGARL_LAUNCH_SECRET" not in environment
        assert SECRET not in command
        assert token not in command
    assert sum(process.name() == "sh" for process in both.find_remaining()) == 2
    assert SECRET not in both.output(0) + both.output(1)
    both.processes[0].send_signal(signal.SIGTERM)
    both.codes()
    both.assert_nothing_is_left()


SINGLE_NODE_COMMAND = """
import os, sys
print("command runs", os.environ["RAY_AUTH_MODE"], os.environ.pop("RAY_AUTH_TOKEN"), flush=True)
os.environ["HOME"] = "/nonexistent"
import ray
try:
    ray.init(logging_level="error", log_to_driver=False)
except ray.exceptions.AuthenticationError as error:
    print("refused", flush=True)
    __import__("time").sleep(600)
"""


def test_single_node_without_a_secret_admits_nobody(nodes):
    """Ray listens on all interfaces, with a token that launch draws; launch itself listens nowhere."""
    one = nodes("import signal, sys\n" + EXITS_ON_SIGTERM + SINGLE_NODE_COMMAND, ray="real", size=1, secrets=("",))
    one.wait_for("command runs token ")
    token = one.output(0).partition("command runs token ")[2].split()[0]
    assert all(token not in " ".join(process.cmdline()) for process in one.find_remaining())
    listening = {
        process.name(): process.cmdline()
        for process in one.find_remaining()
        if any(connection.status == psutil.CONN_LISTEN for connection in process.net_connections("inet"))
    }
    assert "gcs_server" in listening
    assert not any("tests.launch.node" in words for words in listening.values()), listening
    assert not any("ray.util.client" in " ".join(words) for words in listening.values()), listening
    one.wait_for("refused")
    one.processes[0].send_signal(signal.SIGTERM)
    one.codes()
    one.assert_nothing_is_left()


RAY_COMMAND = """
import json, os, ray, subprocess, sys, time

ray.init(logging_level="error", log_to_driver=False)

@ray.remote(num_cpus=2)
class Worker:
    def look(self):
        subprocess.Popen(["sleep", "600"])
        subprocess.Popen(["sh", "-c", "trap '' TERM; sleep 600"])
        return ray.get_runtime_context().get_node_id()

workers = [Worker.options(label_selector={"megarl.node-rank": str(rank)}).remote() for rank in range(2)]
nodes = ray.get([worker.look.remote() for worker in workers])
assert len(set(nodes)) == 2, nodes
print("command runs", flush=True)
try:
    time.sleep(600)
finally:
    print("command ends", flush=True)
"""


def test_ray_on_two_nodes_leaves_no_process(nodes):
    both = nodes("import signal, sys\n" + EXITS_ON_SIGTERM + RAY_COMMAND, ray="real")
    both.wait_for("command runs")
    both.processes[1].send_signal(signal.SIGTERM)
    assert len(set(both.codes())) == 1
    both.assert_nothing_is_left()
    assert "command ends" in both.output(0)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("target", ["launcher", "child"])
def test_killed_launcher_or_child_leaves_no_ray_process(nodes, rank, target):
    both = nodes("import signal, sys\n" + EXITS_ON_SIGTERM + RAY_COMMAND, ray="real")
    both.wait_for("command runs")
    (both.processes[rank] if target == "launcher" else both.child(rank)).kill()
    both.codes()
    both.assert_nothing_is_left(END_SECONDS)
