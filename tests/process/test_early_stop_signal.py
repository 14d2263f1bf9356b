from __future__ import annotations

import subprocess
import sys

# in a process of its own: one with threads that were made before would be ended
PROGRAM = """
import os, signal, subprocess, threading
from megarl.process.early_stop_signal import SIGNAL, is_asked, signal_held

def seen(handler):
    signal.signal(SIGNAL, handler)
    with signal_held():
        before = is_asked()
        thread = threading.Thread(target=threading.Event().wait, daemon=True)
        thread.start()
        child = subprocess.Popen(["sleep", "60"])
        for pid in (os.getpid(), os.getpid(), child.pid):
            os.kill(pid, SIGNAL)
        after, again = is_asked(), is_asked()
        child_lives = child.poll() is None
        child.kill()
    assert (before, after, again, child_lives) == (False, True, True, True)
    assert signal.getsignal(SIGNAL) == handler
    assert SIGNAL not in signal.pthread_sigmask(signal.SIG_BLOCK, ())

seen(signal.SIG_DFL)
seen(signal.SIG_IGN)
"""


def test_the_signal_is_seen_and_ends_neither_process_nor_child() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, done.stderr) == (0, "")
