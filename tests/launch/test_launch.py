"""Whole runs of two nodes on this machine: real processes, sockets and signals; Ray, or its stand-in."""

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time

import psutil
import pytest

from megarl.launch.ray_node import free_port

WAITS = """
import signal, sys, time
{prepare}
print("command runs", flush=True)
for _ in range(600):
    if signal.SIGUSR1 in signal.sigpending():
        sys.exit(75)
    time.sleep(0.1)
"""
SEES_TO_ITS_END = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))"
HAS_NO_END = "signal.signal(signal.SIGTERM, signal.SIG_IGN)"

MARK = "MEGARL_TEST_LAUNCH"


class Nodes:
    """Two nodes, and every process that came of them, wherever it went."""

    def __init__(self, folder, code, *, ray="fake", node_timeout=20.0, environment=None):
        self.mark = f"{os.getpid()}-{time.monotonic_ns()}"
        self.files = [folder / f"node{rank}" for rank in range(2)]
        port = str(free_port())
        environment = os.environ | {MARK: self.mark} | (environment or {})
        environment.pop("RAY_ADDRESS", None)
        self.processes = []
        for rank, file in enumerate(self.files):
            words = [str(rank), "2", port, str(node_timeout), ray, sys.executable, "-c", textwrap.dedent(code)]
            command = [sys.executable, "-m", "tests.launch.node", *words]
            with file.open("w") as out:
                self.processes.append(
                    subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=environment, process_group=0)
                )

    def work(self, rank):
        """The process that does what the launcher waits for."""
        (process,) = psutil.Process(self.processes[rank].pid).children()
        return process

    def said(self, rank):
        return self.files[rank].read_text()

    def wait_for(self, text, seconds=60.0):
        """Until node 0 says it."""
        deadline = time.monotonic() + seconds
        while text not in self.said(0):
            assert time.monotonic() < deadline, self.said(0) + self.said(1)
            assert self.processes[0].poll() is None, self.said(0) + self.said(1)
            time.sleep(0.02)

    def codes(self, seconds=30.0):
        return [process.wait(seconds) for process in self.processes]

    def left(self):
        """Processes that still run, by the mark that all inherit."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
                if process.environ().get(MARK) == self.mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def assert_nothing_is_left(self, within=0.0):
        deadline = time.monotonic() + within
        while (left := self.left()) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not left, [process.cmdline() for process in left]

    def end(self):
        for process in self.left():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


@pytest.fixture
def nodes(tmp_path):
    with contextlib.ExitStack() as stack:

        def start(code, **kwargs):
            both = Nodes(tmp_path, code, **kwargs)
            stack.callback(both.end)
            return both

        yield start


def waits(prepare=SEES_TO_ITS_END):
    return WAITS.format(prepare=prepare)


def test_exit_code_is_the_commands_on_all_nodes(nodes):
    # and what the command leaves behind ends too
    both = nodes("""
        import os, subprocess, sys
        subprocess.Popen(["sleep", "60"], start_new_session=True)
        print("at", os.environ["RAY_ADDRESS"])
        sys.exit(7)
    """)
    assert both.codes() == [7, 7]
    both.assert_nothing_is_left()
    assert "\nat 127.0.0.1:" in both.said(0)
    phases = [line[:19].strip() for line in both.said(0).splitlines() if " s  " in line]
    assert phases == ["nodes met", "Ray up", "Ray joined by all"]


@pytest.mark.parametrize("rank", [0, 1])
def test_told_to_end_any_node_ends_the_run_in_order(nodes, rank):
    both = nodes(waits())
    both.wait_for("command runs")
    both.processes[rank].send_signal(signal.SIGTERM)
    assert both.codes() == [7, 7]
    both.assert_nothing_is_left()


@pytest.mark.parametrize("rank", [0, 1])
def test_told_to_end_before_the_command_runs(nodes, rank):
    both = nodes(waits(), environment={"FAKE_RAY": "slow0"})
    both.wait_for("nodes met")
    both.processes[rank].send_signal(signal.SIGINT)
    # the follower does not know of the head yet
    assert both.codes() == ([130, 130] if rank == 0 else [1, 130])
    assert "command runs" not in both.said(0)
    both.assert_nothing_is_left()


def test_second_request_is_impatience(nodes):
    both = nodes(waits(HAS_NO_END), environment={"COMMAND_END_SECONDS": "60"})
    both.wait_for("command runs")
    for rank in (0, 1, 0, 1):  # one request, which reaches all that runs
        both.processes[rank].send_signal(signal.SIGTERM)
    time.sleep(0.8)
    assert both.processes[0].poll() is None
    both.processes[0].send_signal(signal.SIGTERM)
    assert both.codes() == [128 + 9, 128 + 9]


def test_command_that_does_not_end_is_killed(nodes):
    both = nodes(waits(HAS_NO_END))
    both.wait_for("command runs")
    started = time.monotonic()
    both.processes[0].send_signal(signal.SIGTERM)
    assert both.codes() == [128 + 9, 128 + 9]
    assert 1.0 <= time.monotonic() - started < 10
    both.assert_nothing_is_left()


def test_notice_of_the_time_limit_reaches_the_command_once_from_the_head(nodes):
    both = nodes(waits())
    both.wait_for("command runs")
    both.processes[1].send_signal(signal.SIGUSR1)
    time.sleep(0.5)
    assert both.processes[0].poll() is None
    both.processes[0].send_signal(signal.SIGUSR1)
    assert both.codes() == [75, 75]


@pytest.mark.parametrize("rank", [0, 1])
def test_killed_launch_ends_the_run_in_order(nodes, rank):
    both = nodes(waits())
    both.wait_for("command runs")
    both.processes[rank].kill()
    codes = both.codes()
    assert (codes[rank], codes[1 - rank]) == (-signal.SIGKILL, 7)
    both.assert_nothing_is_left(10)


@pytest.mark.parametrize("rank", [0, 1])
def test_killed_work_is_noticed(nodes, rank):
    both = nodes(waits())
    both.wait_for("command runs")
    both.work(rank).kill()
    assert both.codes() == [1, 1]
    assert f"(rank {rank}): its launcher ended with exit code -9" in both.said(rank)
    lost = (
        "(rank 1): the head, 127.0.0.1: it ended without a word; this node has ended its part",
        "(127.0.0.1, rank 1): it ended without a word; the run has been ended",
    )
    assert lost[rank] in both.said(1 - rank)
    both.assert_nothing_is_left()


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_silent_node_is_lost(nodes, rank):
    both = nodes(waits(), node_timeout=2.0)
    both.wait_for("command runs")
    both.work(rank).suspend()
    other = 1 - rank
    assert both.processes[other].wait(20) == 1
    assert "127.0.0.1" in both.said(other)
    assert "not heard of for 2 s; " in both.said(other)
    both.work(rank).resume()
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
def test_ray_that_fails_ends_the_run(nodes, rank, mode, message):
    both = nodes(waits(), environment={"FAKE_RAY": f"{mode}{rank}"})
    assert both.codes() == [1, 1]
    assert message in both.said(0)
    assert f"rank {rank})" in both.said(0)
    both.assert_nothing_is_left()


USES_RAY = """
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


def test_ray_on_two_nodes_leaves_nothing(nodes):
    both = nodes("import signal, sys\n" + SEES_TO_ITS_END + USES_RAY, ray="real")
    both.wait_for("command runs", 120)
    both.processes[1].send_signal(signal.SIGTERM)
    assert len(set(both.codes())) == 1
    both.assert_nothing_is_left()
    assert "command ends" in both.said(0)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("whom", ["launch", "work"])
def test_killed_launch_leaves_nothing_of_ray(nodes, rank, whom):
    both = nodes("import signal, sys\n" + SEES_TO_ITS_END + USES_RAY, ray="real")
    both.wait_for("command runs", 120)
    (both.processes[rank] if whom == "launch" else both.work(rank)).kill()
    both.codes()
    both.assert_nothing_is_left(30)
