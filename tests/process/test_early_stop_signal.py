"""The early-stop signal."""

from __future__ import annotations

import subprocess
import sys

from tests.time_limits import HANG_SECONDS

# in a separate process: threads that exist already do not block the signal, which would end the process
PROGRAM = """
import os, signal, subprocess, threading
from megarl.process.early_stop_signal import SIGNAL, stop_requested, stop_signal_blocked

def check_signal_is_noticed(handler):
    signal.signal(SIGNAL, handler)
    with stop_signal_blocked():
        before = stop_requested()
        thread = threading.Thread(target=threading.Event().wait, daemon=True)
        thread.start()
        child = subprocess.Popen(["sleep", "6000"])
        for pid in (os.getpid(), os.getpid(), child.pid):
            os.kill(pid, SIGNAL)
        after, again = stop_requested(), stop_requested()
        child_lives = child.poll() is None
        child.kill()
    assert (before, after, again, child_lives) == (False, True, True, True)
    assert signal.getsignal(SIGNAL) == handler
    assert SIGNAL not in signal.pthread_sigmask(signal.SIG_BLOCK, ())

check_signal_is_noticed(signal.SIG_DFL)
check_signal_is_noticed(signal.SIG_IGN)
"""


def test_signal_is_noticed_and_ends_neither_process_nor_child() -> None:
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=HANG_SECONDS, check=False
    )
    assert (result.returncode, result.stderr) == (0, "")
