"""Termination of descendants, including orphans."""

import subprocess
import sys
import textwrap
import time

import psutil
import pytest

from tests.time_limits import HANG_SECONDS

PRELUDE = """
import os, signal, subprocess, sys, time
from megarl.process.descendants import make_preexec, terminate_descendants
from megarl.process.prctl import become_subreaper
"""


def start_python(code, **kwargs):
    """Start a separate process, since the tested functions affect all descendants of a process."""
    command = [sys.executable, "-c", PRELUDE + textwrap.dedent(code)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, **kwargs)


def read_pids(process, count):
    return [int(process.stdout.readline()) for _ in range(count)]


def has_ended(pid, within=HANG_SECONDS):
    deadline = time.monotonic() + within
    while time.monotonic() < deadline:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.02)
    return False


def test_all_generations_end_even_those_that_ignore_sigterm():
    process = start_python(
        """
        become_subreaper()
        script = '''
        sh -c 'trap "" TERM; echo $$; while :; do sleep 0.1; done' &
        setsid sh -c 'echo $$; exec sleep 6000' &
        '''
        shell = subprocess.run(["sh", "-c", script])
        time.sleep(0.5)
        killed = terminate_descendants(0.5)
        print(len(killed), flush=True)
        print(sys.stdin.read())
    """,
        stdin=subprocess.PIPE,
    )
    orphans = read_pids(process, 2)
    stubborn = int(process.stdout.readline())
    # still running, so the orphans have not ended because this process did
    assert process.poll() is None
    assert stubborn >= 1
    assert all(has_ended(pid) for pid in orphans)
    process.communicate("")


def test_child_ends_when_its_parent_is_killed():
    process = start_python("""
        child = subprocess.Popen(
            ["sh", "-c", "echo $$; exec sleep 6000"], preexec_fn=make_preexec(signal.SIGTERM), process_group=0
        )
        child.wait()
    """)
    (child,) = read_pids(process, 1)
    time.sleep(0.2)
    assert not has_ended(child, 0.1)
    process.kill()
    process.wait()
    assert has_ended(child)


def test_sigusr1_stays_pending_until_a_child_checks():
    process = start_python("""
        code = "import signal, time; time.sleep(0.5); print(signal.SIGUSR1 in signal.sigpending())"
        child = subprocess.Popen([sys.executable, "-c", code], preexec_fn=make_preexec(signal.SIGKILL))
        child.send_signal(signal.SIGUSR1)
        print(child.wait())
    """)
    output, _ = process.communicate(timeout=HANG_SECONDS)
    assert output.split() == ["True", "0"]


@pytest.mark.parametrize("count", [40])
def test_many_children_end_quickly(count):
    process = start_python(f"""
        become_subreaper()
        children = [subprocess.Popen(["sleep", "6000"]) for _ in range({count})]
        started = time.monotonic()
        assert terminate_descendants(1200.0) == []
        print(time.monotonic() - started)
    """)
    output, _ = process.communicate(timeout=HANG_SECONDS)
    assert float(output) < HANG_SECONDS
