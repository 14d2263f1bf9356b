"""Work in a child process, with whatever comes of it ended even where one of the two is killed.

launch     waits, and passes signals on        killed: the child is told to end, and does so in order
work     starts processes, ends them all     killed: the parent adopts what it leaves, and ends that
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable

from megarl.process.descendants import adopt_orphans, at_start_of_child, end_descendants

PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)

GRACE_SECONDS = 2.0
"""For processes that are left when the work is done."""


def keep(work: Callable[[], bytes]) -> tuple[bytes, int]:
    """What `work` returns in a child process, and that process's exit code: not 0 where there is nothing.

    Signals that ask for an end are passed on to it; no descendant is left.
    """
    passed_on = {number for number in PASSED_ON if signal.getsignal(number) is not signal.SIG_IGN}  # nohup
    awaited = passed_on | {signal.SIGCHLD}
    adopt_orphans()
    prepare = at_start_of_child(signal.SIGTERM)
    result, answer = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, awaited)
    try:
        child = os.fork()
        if child == 0:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            prepare()
            _work(work, answer)
        os.close(answer)
        code = _wait(child, awaited)
    finally:
        end_descendants(GRACE_SECONDS)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    with os.fdopen(result, "rb") as reader:
        return reader.read(), code


def _work(work: Callable[[], bytes], answer: int) -> None:
    """In the child, which does not return."""
    code = 1
    try:
        os.setpgid(0, 0)  # what goes to the group is passed on already
        adopt_orphans()
        try:
            said = work()
        finally:
            end_descendants(GRACE_SECONDS)
        with os.fdopen(answer, "wb") as writer:
            writer.write(said)
        code = 0
    except BaseException:  # noqa: BLE001 -- nothing of the parent's is to run on in the child
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _wait(child: int, awaited: set[signal.Signals]) -> int:
    while True:
        number = signal.sigwait(awaited)
        if number != signal.SIGCHLD:
            os.kill(child, number)
            continue
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
