"""Signals to a process and its descendants, including orphans."""

import subprocess
import sys
import textwrap

import psutil

from tests.time_limits import HANG_SECONDS, UNREACHED_SECONDS, wait_until

PRELUDE = """
import os, signal, subprocess, sys, time
from megarl.cluster.process.child_processes import make_preexec, terminate_descendants
from megarl.cluster.process.child_processes import become_subreaper
"""


def start_python(code, **kwargs):
    """Start a separate process, since the tested functions affect all descendants of a process."""
    command = [sys.executable, "-c", PRELUDE + textwrap.dedent(code)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, **kwargs)


def is_running(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_all_generations_end_even_those_that_ignore_sigterm():
    process = start_python(
        """
        become_subreaper()
        read, write = os.pipe()
        script = '''
        sh -c 'trap "" TERM; echo $$; while :; do sleep 0.1; done' &
        setsid sh -c 'echo $$; exec sleep 6000' &
        '''
        subprocess.run(["sh", "-c", script], stdout=write)
        with open(read) as started:
            print(started.readline() + started.readline(), end="")
        print(len(terminate_descendants(0.5)), flush=True)
        print(sys.stdin.read())
    """,
        stdin=subprocess.PIPE,
    )
    *orphans, stubborn = (int(process.stdout.readline()) for _ in range(3))
    # still running, so the orphans have not ended because this process did
    assert process.poll() is None
    assert stubborn >= 1
    assert wait_until(lambda: not any(map(is_running, orphans)))
    process.communicate("")


def test_child_ends_when_its_parent_is_killed():
    process = start_python("""
        child = subprocess.Popen(
            ["sh", "-c", "echo $$; exec sleep 6000"], preexec_fn=make_preexec(signal.SIGTERM), process_group=0
        )
        child.wait()
    """)
    child = int(process.stdout.readline())
    assert is_running(child)
    process.kill()
    process.wait()
    assert wait_until(lambda: not is_running(child))


def test_sigusr1_stays_pending_until_a_child_checks():
    process = start_python("""
        code = "import signal; input(); print(signal.SIGUSR1 in signal.sigpending())"
        child = subprocess.Popen(
            [sys.executable, "-c", code], preexec_fn=make_preexec(signal.SIGKILL), stdin=subprocess.PIPE
        )
        child.send_signal(signal.SIGUSR1)
        child.communicate(b"\\n")
        print(child.returncode)
    """)
    output, _ = process.communicate(timeout=HANG_SECONDS)
    assert output.split() == ["True", "0"]


def test_many_children_end_before_the_time_limit():
    process = start_python(f"""
        become_subreaper()
        children = [subprocess.Popen(["sleep", "6000"]) for _ in range(40)]
        assert terminate_descendants({UNREACHED_SECONDS}) == []
    """)
    process.communicate(timeout=HANG_SECONDS)
    assert process.returncode == 0


def test_early_stop_signal_is_noticed_and_ends_neither_process_nor_child():
    """In a separate process: threads that exist already do not block the signal, which would end the process."""
    process = start_python(
        """
        import threading
        from megarl.cluster.process.launcher_env import EARLY_STOP, stop_requested, stop_signal_blocked

        def check_signal_is_noticed(handler):
            signal.signal(EARLY_STOP, handler)
            with stop_signal_blocked():
                before = stop_requested()
                thread = threading.Thread(target=threading.Event().wait, daemon=True)
                thread.start()
                child = subprocess.Popen(["sleep", "6000"])
                for pid in (os.getpid(), os.getpid(), child.pid):
                    os.kill(pid, EARLY_STOP)
                after, again = stop_requested(), stop_requested()
                child_lives = child.poll() is None
                child.kill()
            assert (before, after, again, child_lives) == (False, True, True, True)
            assert signal.getsignal(EARLY_STOP) == handler
            assert EARLY_STOP not in signal.pthread_sigmask(signal.SIG_BLOCK, ())

        check_signal_is_noticed(signal.SIG_DFL)
        check_signal_is_noticed(signal.SIG_IGN)
    """,
        stderr=subprocess.PIPE,
    )
    assert process.communicate(timeout=HANG_SECONDS) == ("", "")
    assert process.returncode == 0
