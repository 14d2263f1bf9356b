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

from megarl.cluster.process.ports import find_unused_port
from tests.time_limits import END_SECONDS, HANG_SECONDS, UNREACHED_SECONDS, wait_until

PREPARATIONS = {
    "ends on SIGTERM": "signal.signal(signal.SIGTERM, lambda *_: time.sleep(0.3) or sys.exit(7))",
    "ignores SIGTERM": "signal.signal(signal.SIGTERM, lambda *_: print('SIGTERM ignored', flush=True))",
}
WAITING_COMMAND = """
import os, signal, sys, time
{prepare}
print("command runs", os.environ["RAY_AUTH_MODE"], os.environ["RAY_AUTH_TOKEN"], flush=True)
print("secret:", os.environ.get("MEGARL_LAUNCH_SECRET"), flush=True)
for _ in range(6000):
    if signal.SIGUSR1 in signal.sigpending():
        sys.exit(75)
    time.sleep(0.1)
"""

MARK = "MEGARL_TEST_LAUNCH"
SECRET = "the secret of all nodes of these tests"
NEVER = str(UNREACHED_SECONDS)


class Nodes:
    """Two nodes, or as many as `size`, and all processes that descend from them."""

    def __init__(self, folder, code, *, ray="fake", size=2, secret=SECRET, **environment):
        """`environment`: further variables of the nodes."""
        self.mark = f"{os.getpid()}-{time.monotonic_ns()}"
        self.jump_file = folder / "jump"
        self.files = [folder / f"node{rank}" for rank in range(size)]
        # `ray.init` of other tests sets some of these
        excluded = ("RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN")
        environment |= {name: value for name, value in os.environ.items() if name not in excluded}
        environment |= {MARK: self.mark, "MEGARL_LAUNCH_SECRET": secret}
        common = [str(size), str(find_unused_port()), self.jump_file, ray, sys.executable, "-c", textwrap.dedent(code)]
        self.processes = []
        for rank, file in enumerate(self.files):
            command = [sys.executable, "-m", "tests.cluster.launch.node", str(rank), *common]
            with file.open("w") as out:
                self.processes.append(
                    subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=environment, process_group=0)
                )

    def child(self, rank):
        """Return the child process that runs the node, for which the launcher waits."""
        (process,) = psutil.Process(self.processes[rank].pid).children()
        return process

    def output(self, rank):
        return self.files[rank].read_text()

    def wait_for(self, text):
        """Block until node 0 prints `text`."""
        wait_until(lambda: text in self.output(0) or self.processes[0].poll() is not None)
        assert text in self.output(0), "".join(map(self.output, range(len(self.files))))

    def send(self, number, *ranks):
        for rank in ranks:
            self.processes[rank].send_signal(number)

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

    def assert_end(self, codes, within=0.0):
        """Assert that the nodes end with these exit codes and leave no process."""
        assert self.codes() == codes
        assert wait_until(lambda: not self.find_remaining(), within), [p.cmdline() for p in self.find_remaining()]

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


@pytest.fixture
def run_command(nodes):
    """Start two nodes whose command waits; return when it does."""

    def start(kind="ends on SIGTERM", **environment):
        both = nodes(WAITING_COMMAND.format(prepare=PREPARATIONS[kind]), **environment)
        both.wait_for("secret: ")
        return both

    return start


def test_all_nodes_exit_with_the_code_of_the_command(nodes):
    # processes that the command leaves behind are terminated too
    both = nodes("""
        import os, subprocess, sys
        subprocess.Popen(["sleep", "6000"], start_new_session=True)
        print("at", os.environ["RAY_ADDRESS"])
        sys.exit(7)
    """)
    both.assert_end([7, 7])
    assert "\nat 127.0.0.1:" in both.output(0)
    phases = [line[:19].strip() for line in both.output(0).splitlines() if " s  " in line]
    assert phases == ["nodes connected", "Ray head started", "Ray nodes joined"]


@pytest.mark.parametrize(
    ("rank", "repeated_seconds"),
    [
        pytest.param(0, NEVER, id="head"),  # the second signal comes too early for a second request
        pytest.param(1, "0", id="worker"),  # a worker node's signals are never a second request
    ],
)
def test_sigterm_to_any_node_ends_the_run_gracefully(run_command, rank, repeated_seconds):
    both = run_command(REPEATED_SIGNAL_SECONDS=repeated_seconds)
    if rank == 1:
        both.send(signal.SIGUSR1, rank)  # which reaches the command only from the head
    both.send(signal.SIGTERM, rank, rank)
    both.assert_end([7, 7])


@pytest.mark.parametrize("rank", [0, 1])
def test_sigint_before_the_command_runs(nodes, rank):
    both = nodes(WAITING_COMMAND.format(prepare=""), FAKE_RAY="slow0")
    both.wait_for("nodes connected")
    both.send(signal.SIGINT, rank)
    # the worker node has no answer from the head yet
    both.assert_end([130, 130] if rank == 0 else [1, 130])
    assert "command runs" not in both.output(0)


@pytest.mark.parametrize(("grace_seconds", "num_signals"), [("1", 1), (NEVER, 2)])
def test_command_that_ignores_sigterm_is_killed_after_a_while_or_by_a_second_signal(
    run_command, grace_seconds, num_signals
):
    both = run_command("ignores SIGTERM", COMMAND_GRACE_SECONDS=grace_seconds, REPEATED_SIGNAL_SECONDS="0")
    for _ in range(num_signals):
        both.send(signal.SIGTERM, 0)
        both.wait_for("SIGTERM ignored")
    both.assert_end([128 + 9, 128 + 9])


def test_secret_reaches_neither_the_command_nor_ray_and_all_have_the_same_token(run_command):
    both = run_command()
    mode, token = both.output(0).partition("command runs ")[2].split()[:2]
    assert mode == "token"
    assert len(token) == 64
    assert "secret: None\n" in both.output(0)
    num_ray_workers = 0
    for process in both.find_remaining():
        try:
            environment, name, command = process.environ(), process.name(), " ".join(process.cmdline())
        except psutil.NoSuchProcess:  # it has just ended
            continue
        if name in ("sh", "sleep"):  # a worker of fake_ray
            num_ray_workers += 1
            assert environment["RAY_AUTH_TOKEN"] == token
            assert "MEGARL_LAUNCH_SECRET" not in environment
        assert SECRET not in command
        assert token not in command
    assert num_ray_workers == 2
    assert SECRET not in both.output(0) + both.output(1)
    both.send(signal.SIGUSR1, 0)  # the time limit is near
    both.assert_end([75, 75])


@pytest.mark.parametrize("rank", [0, 1])
def test_killed_launcher_ends_the_run_gracefully(run_command, rank):
    both = run_command()
    both.processes[rank].kill()
    both.assert_end([-signal.SIGKILL, 7] if rank == 0 else [7, -signal.SIGKILL], END_SECONDS)


@pytest.mark.parametrize("rank", [0, 1])
def test_killed_child_is_reported(run_command, rank):
    both = run_command()
    both.child(rank).kill()
    both.assert_end([1, 1])
    assert f"(rank {rank}): its launcher exited with code -9" in both.output(rank)
    lost = (
        "(rank 1): lost the head 127.0.0.1: the connection was closed unexpectedly; this node was stopped",
        "(127.0.0.1, rank 1): the connection was closed unexpectedly; the run was aborted",
    )
    assert lost[rank] in both.output(1 - rank)


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_silent_node_is_lost(run_command, rank):
    both = run_command()
    both.child(rank).suspend()
    both.jump_file.touch()
    other = 1 - rank
    assert both.processes[other].wait(HANG_SECONDS) == 1
    assert "127.0.0.1" in both.output(other)
    assert f"no message for {HANG_SECONDS:g} s; " in both.output(other)
    both.child(rank).resume()
    both.assert_end([1, 1])


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
    both = nodes(WAITING_COMMAND.format(prepare=PREPARATIONS["ends on SIGTERM"]), FAKE_RAY=f"{mode}{rank}")
    both.assert_end([1, 1])
    assert message in both.output(0)
    assert f"rank {rank})" in both.output(0)


RAY_PRELUDE = f"import json, os, signal, subprocess, sys, time\n{PREPARATIONS['ends on SIGTERM']}\n"

SINGLE_NODE_COMMAND = """
print("command runs", os.environ["RAY_AUTH_MODE"], os.environ.pop("RAY_AUTH_TOKEN"), flush=True)
os.environ["HOME"] = "/nonexistent"
import ray
try:
    ray.init(logging_level="error", log_to_driver=False)
except ray.exceptions.AuthenticationError as error:
    print("refused", flush=True)
    time.sleep(6000)
"""


def test_single_node_without_a_secret_admits_nobody(nodes):
    """Ray listens on all interfaces, with a token that launch draws; launch itself listens nowhere."""
    one = nodes(RAY_PRELUDE + SINGLE_NODE_COMMAND, ray="real", size=1, secret="")
    one.wait_for("refused")
    token = one.output(0).partition("command runs token ")[2].split()[0]
    assert all(token not in " ".join(process.cmdline()) for process in one.find_remaining())
    listening = {
        process.name(): process.cmdline()
        for process in one.find_remaining()
        if any(connection.status == psutil.CONN_LISTEN for connection in process.net_connections("inet"))
    }
    assert "gcs_server" in listening
    assert not any("tests.cluster.launch.node" in words for words in listening.values()), listening
    assert not any("ray.util.client" in " ".join(words) for words in listening.values()), listening
    one.send(signal.SIGTERM, 0)
    one.assert_end(one.codes())


RAY_COMMAND = """
import ray

ray.init(logging_level="error", log_to_driver=False)

@ray.remote(num_cpus=2)
class Worker:
    def look(self):
        subprocess.Popen(["sleep", "6000"])
        subprocess.Popen(["sh", "-c", "trap '' TERM; sleep 6000"])
        return ray.get_runtime_context().get_node_id()

workers = [Worker.options(label_selector={"megarl.node-rank": str(rank)}).remote() for rank in range(2)]
nodes = ray.get([worker.look.remote() for worker in workers])
assert len(set(nodes)) == 2, nodes
print("command runs", flush=True)
try:
    time.sleep(6000)
finally:
    print("command ends", flush=True)
"""


KILLS = [(signal.SIGKILL, target, rank) for target in ("launcher", "child") for rank in (0, 1)]


@pytest.mark.parametrize(
    ("number", "target", "rank"),
    [(signal.SIGTERM, "launcher", 1), *(pytest.param(*kill, marks=pytest.mark.slow) for kill in KILLS)],
)
def test_ray_on_two_nodes_leaves_no_process(nodes, number, target, rank):
    both = nodes(RAY_PRELUDE + RAY_COMMAND, ray="real")
    both.wait_for("command runs")
    (both.processes[rank] if target == "launcher" else both.child(rank)).send_signal(number)
    codes = both.codes()
    if number == signal.SIGTERM:
        assert len(set(codes)) == 1
        assert "command ends" in both.output(0)
    both.assert_end(codes, END_SECONDS if number == signal.SIGKILL else 0.0)
