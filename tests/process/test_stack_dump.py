"""Stacks of processes of this machine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from megarl.process import stack_dump
from megarl.process.stack_dump import ProcessPlace, read_stacks
from tests.end_to_end.launched import wait_until

PROGRAM = """
import subprocess, sys, time
from megarl.process.stack_dump import give_account

def stuck_in_here():
    time.sleep(600)

def scheduler_of_an_engine():
    time.sleep(600)

if len(sys.argv) > 1:
    scheduler_of_an_engine()
account = give_account()
child = subprocess.Popen([sys.executable, __file__, "child"])
print(account, child.pid, flush=True)
stuck_in_here()
"""


@pytest.fixture
def stuck(tmp_path: Path) -> Iterator[tuple[ProcessPlace, int]]:
    """A process that sleeps, and its child's pid."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    process = subprocess.Popen(
        [sys.executable, str(program)], stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": os.getcwd()}
    )
    assert process.stdout is not None
    account, child = map(int, process.stdout.readline().split())
    assert wait_until(lambda: psutil.Process(child).status() == psutil.STATUS_SLEEPING, 10)
    time.sleep(0.3)
    yield ProcessPlace(node_id="", host="n1", pid=process.pid, account=account), child
    for pid in (child, process.pid):
        if psutil.pid_exists(pid):
            os.kill(pid, signal.SIGKILL)
    process.wait()


def without_ptrace(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """py-spy as it answers where it may not read the process."""
    denied = folder / "py-spy"
    denied.write_text("#!/bin/sh\necho 'Permission Denied: Try running again with elevated permissions' >&2\nexit 1\n")
    denied.chmod(0o755)
    monkeypatch.setattr(stack_dump, "which", lambda *_, **__: str(denied))


def test_a_process_and_those_below_it_are_read(stuck: tuple[ProcessPlace, int]) -> None:
    place, child = stuck
    found = read_stacks({"trainer rank 1": place}, 20)
    (line,) = found.brief
    assert line.startswith(f"trainer rank 1 (pid {place.pid} on n1): sleeping, in stuck_in_here (program.py:")
    own, below = found.text.split("\n== ")
    assert own.startswith(f"== trainer rank 1 (pid {place.pid} on n1, sleeping): ")
    assert "stuck_in_here (program.py:" in own
    assert below.startswith(f"trainer rank 1, below it (pid {child} on n1, sleeping): ")
    assert "scheduler_of_an_engine (program.py:" in below


def test_a_stopped_process_is_read(stuck: tuple[ProcessPlace, int]) -> None:
    place, _ = stuck
    os.kill(place.pid, signal.SIGSTOP)
    found = read_stacks({"trainer rank 1": place}, 20)
    assert f"(pid {place.pid} on n1): stopped, in stuck_in_here " in found.brief[0]
    assert f"(pid {place.pid} on n1, stopped)" in found.text
    assert "stuck_in_here (program.py:" in found.text


def test_without_ptrace_a_process_gives_its_own_account(
    stuck: tuple[ProcessPlace, int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    place, child = stuck
    without_ptrace(monkeypatch, tmp_path)
    for _ in range(2):
        own, below = read_stacks({"trainer rank 1": place}, 20).text.split("\n== ")
        assert "py-spy: Permission Denied: Try running again with elevated permissions; its own account:\n" in own
        assert own.count("in stuck_in_here") == 1
        # it has made no arrangement, and would die of the signal
        assert "not read: py-spy: Permission Denied" in below
        assert psutil.Process(child).status() == psutil.STATUS_SLEEPING
    os.kill(place.pid, signal.SIGSTOP)
    assert "and it does not answer SIGUSR2" in read_stacks({"trainer rank 1": place}, 20).text


def test_a_process_that_is_gone_is_said_to_be(stuck: tuple[ProcessPlace, int]) -> None:
    place, _ = stuck
    os.kill(place.pid, signal.SIGKILL)
    assert wait_until(lambda: psutil.Process(place.pid).status() == psutil.STATUS_ZOMBIE, 5)
    another = ProcessPlace(node_id="", host="n1", pid=os.getpid(), account=987_654)  # has the pid of one that is gone
    assert read_stacks({"trainer rank 0": place, "trainer rank 1": another}, 20).brief == (
        f"trainer rank 0 (pid {place.pid} on n1) is gone",
        f"trainer rank 1 (pid {os.getpid()} on n1) is gone",
    )


def test_what_time_does_not_allow_is_left_out(stuck: tuple[ProcessPlace, int]) -> None:
    assert "not read: out of time" in read_stacks({"trainer rank 0": stuck[0]}, 0.0).text
