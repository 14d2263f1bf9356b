"""Stacks of processes on this node."""

import os
import signal
import subprocess
import sys

import psutil
import pytest

from megarl.cluster.process import stack_dump
from megarl.cluster.process.stack_dump import ProcessInfo, read_stacks
from tests.time_limits import HANG_SECONDS, UNREACHED_SECONDS, wait_until

SLEEPING = psutil.STATUS_SLEEPING

PROGRAM = """
import subprocess, sys, time
from megarl.cluster.process.stack_dump import register_stack_dump

def engine_scheduler():
    print(flush=True)
    time.sleep(6000)

def hang_here():
    print(dump_fd, child.pid, flush=True)
    time.sleep(6000)

if len(sys.argv) > 1:
    engine_scheduler()
dump_fd = register_stack_dump()
child = subprocess.Popen([sys.executable, __file__, "child"], stdout=subprocess.PIPE)
child.stdout.readline()
hang_here()
"""


@pytest.fixture
def hung_process(tmp_path):
    """Start a process that sleeps; yield its info and the pid of its child."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    process = subprocess.Popen(
        [sys.executable, str(program)], stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": os.getcwd()}
    )
    assert process.stdout is not None
    dump_fd, child = map(int, process.stdout.readline().split())
    assert wait_until(lambda: {psutil.Process(pid).status() for pid in (process.pid, child)} == {SLEEPING})
    yield ProcessInfo(node_id="", host="n1", pid=process.pid, dump_fd=dump_fd), child
    for pid in (child, process.pid):
        if psutil.pid_exists(pid):
            os.kill(pid, signal.SIGKILL)
    process.communicate()


@pytest.fixture(autouse=True)
def _patience(monkeypatch):
    for name in ("PER_PROCESS_SECONDS", "OWN_DUMP_SECONDS"):
        monkeypatch.setattr(stack_dump, name, UNREACHED_SECONDS)
    monkeypatch.setattr(stack_dump, "POLL_SECONDS", 0.2)  # a dump that pauses for longer is taken for complete


def require_ptrace(info):
    """Skip the test where this user may not read the process."""
    text, problem = stack_dump.run_py_spy(info.pid, HANG_SECONDS)
    if text is None and ("not installed" in problem or "ermission" in problem or "not permitted" in problem):
        pytest.skip(f"py-spy cannot read processes here: {problem}")


def deny_ptrace(monkeypatch, folder):
    """Replace py-spy by a script that fails as py-spy does if it may not read the process."""
    denied = folder / "py-spy"
    denied.write_text("#!/bin/sh\necho 'Permission Denied: Try running again with elevated permissions' >&2\nexit 1\n")
    denied.chmod(0o755)
    monkeypatch.setattr(stack_dump, "which", lambda *_, **__: str(denied))


def test_process_and_its_descendants_are_read(hung_process):
    info, child = hung_process
    require_ptrace(info)
    found = read_stacks({"trainer rank 1": info}, HANG_SECONDS)
    (line,) = found.summary_lines
    assert line.startswith(f"trainer rank 1 (pid {info.pid} on n1): sleeping, in hang_here (program.py:")
    own, descendant = found.text.split("\n== ")
    assert own.startswith(f"== trainer rank 1 (pid {info.pid} on n1, sleeping): ")
    assert "hang_here (program.py:" in own
    assert descendant.startswith(f"trainer rank 1, descendant (pid {child} on n1, sleeping): ")
    assert "engine_scheduler (program.py:" in descendant


def test_stopped_process_is_read(hung_process):
    info, _ = hung_process
    require_ptrace(info)
    os.kill(info.pid, signal.SIGSTOP)
    assert wait_until(lambda: psutil.Process(info.pid).status() == psutil.STATUS_STOPPED)
    found = read_stacks({"trainer rank 1": info}, HANG_SECONDS)
    assert f"(pid {info.pid} on n1): stopped, in hang_here " in found.summary_lines[0]
    assert f"(pid {info.pid} on n1, stopped)" in found.text
    assert "hang_here (program.py:" in found.text


def test_without_ptrace_a_process_dumps_its_own_stacks(hung_process, monkeypatch, tmp_path):
    info, child = hung_process
    deny_ptrace(monkeypatch, tmp_path)
    for _ in range(2):
        own, descendant = read_stacks({"trainer rank 1": info}, HANG_SECONDS).text.split("\n== ")
        assert "elevated permissions; dumped by the process itself:\n" in own
        assert own.count("in hang_here") == 1
        # the child does not handle the signal and would die from it
        assert "not read: py-spy: Permission Denied" in descendant
        assert psutil.Process(child).status() == SLEEPING
    os.kill(info.pid, signal.SIGSTOP)
    monkeypatch.setattr(stack_dump, "OWN_DUMP_SECONDS", 0.2)
    assert "and it does not answer SIGUSR2" in read_stacks({"trainer rank 1": info}, HANG_SECONDS).text


def test_ended_process_is_reported(hung_process):
    info, _ = hung_process
    os.kill(info.pid, signal.SIGKILL)
    assert wait_until(lambda: psutil.Process(info.pid).status() == psutil.STATUS_ZOMBIE)
    reused_pid = ProcessInfo(node_id="", host="n1", pid=os.getpid(), dump_fd=987_654)  # its pid was reused
    assert read_stacks({"trainer rank 0": info, "trainer rank 1": reused_pid}, HANG_SECONDS).summary_lines == (
        f"trainer rank 0 (pid {info.pid} on n1) has ended",
        f"trainer rank 1 (pid {os.getpid()} on n1) has ended",
    )


def test_processes_not_read_in_time_are_listed(hung_process):
    assert "not read: out of time" in read_stacks({"trainer rank 0": hung_process[0]}, 0.0).text
