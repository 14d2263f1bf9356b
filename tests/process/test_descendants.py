import subprocess
import sys
import textwrap
import time

import psutil
import pytest

PRELUDE = """
import os, signal, subprocess, sys, time
from megarl.process.descendants import adopt_orphans, at_start_of_child, end_descendants
"""


def python(code, **kwargs):
    """A process of its own, since what is tested concerns all descendants of one."""
    command = [sys.executable, "-c", PRELUDE + textwrap.dedent(code)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, **kwargs)


def pids(process, count):
    return [int(process.stdout.readline()) for _ in range(count)]


def gone(pid, within=5.0):
    deadline = time.monotonic() + within
    while time.monotonic() < deadline:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.02)
    return False


def test_all_generations_end_also_those_that_will_not():
    process = python(
        """
        adopt_orphans()
        script = '''
        sh -c 'trap "" TERM; echo $$; while :; do sleep 0.1; done' &
        setsid sh -c 'echo $$; exec sleep 60' &
        '''
        shell = subprocess.run(["sh", "-c", script])
        time.sleep(0.5)
        killed = end_descendants(0.5)
        print(len(killed), flush=True)
        print(sys.stdin.read())
    """,
        stdin=subprocess.PIPE,
    )
    orphans = pids(process, 2)
    stubborn = int(process.stdout.readline())
    # still running, so that it is not its own end that ended them
    assert process.poll() is None
    assert stubborn >= 1
    assert all(gone(pid, 1.0) for pid in orphans)
    process.communicate("")


def test_child_of_a_killed_process_ends():
    process = python("""
        child = subprocess.Popen(
            ["sh", "-c", "echo $$; exec sleep 60"], preexec_fn=at_start_of_child(signal.SIGTERM), process_group=0
        )
        child.wait()
    """)
    (child,) = pids(process, 1)
    time.sleep(0.2)
    assert not gone(child, 0.1)
    process.kill()
    process.wait()
    assert gone(child)


def test_notice_stays_pending_until_a_child_looks():
    process = python("""
        code = "import signal, time; time.sleep(0.5); print(signal.SIGUSR1 in signal.sigpending())"
        child = subprocess.Popen([sys.executable, "-c", code], preexec_fn=at_start_of_child(signal.SIGKILL))
        child.send_signal(signal.SIGUSR1)
        print(child.wait())
    """)
    answer, _ = process.communicate(timeout=20)
    assert answer.split() == ["True", "0"]


@pytest.mark.parametrize("count", [40])
def test_many_end_soon(count):
    process = python(f"""
        adopt_orphans()
        children = [subprocess.Popen(["sleep", "60"]) for _ in range({count})]
        started = time.monotonic()
        assert end_descendants(5.0) == []
        print(time.monotonic() - started)
    """)
    answer, _ = process.communicate(timeout=20)
    assert float(answer) < 3
