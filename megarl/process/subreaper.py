"""Runs work in a child process and leaves no process behind, even if parent or child is killed.

process    what it does                                   if it is killed
parent     waits and forwards signals                     the child gets SIGTERM and ends gracefully
child      runs the work, terminates what it started      the parent adopts its processes and terminates them
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable

from megarl.process.descendants import make_preexec, terminate_descendants
from megarl.process.prctl import become_subreaper

FORWARDED_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)

GRACE_SECONDS = 2.0
"""Grace period for processes that are left when the work is done."""


def run_as_subreaper(work: Callable[[], bytes]) -> tuple[bytes, int]:
    """Run `work` in a child process; forward termination signals to it and leave no descendant behind.

    Returns:
        The bytes that `work` returned, and the exit code of the child; empty and not 0 if it failed.
    """
    forwarded = {number for number in FORWARDED_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN}  # nohup
    awaited = forwarded | {signal.SIGCHLD}
    become_subreaper()
    preexec = make_preexec(signal.SIGTERM)
    read_fd, write_fd = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, awaited)
    try:
        child = os.fork()
        if child == 0:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            preexec()
            _run_in_child(work, write_fd)
        os.close(write_fd)
        code = _wait_for_child(child, awaited)
    finally:
        terminate_descendants(GRACE_SECONDS)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    with os.fdopen(read_fd, "rb") as reader:
        return reader.read(), code


def _run_in_child(work: Callable[[], bytes], write_fd: int) -> None:
    """Run `work` in the child and write its result to the file descriptor `write_fd`; does not return."""
    code = 1
    try:
        os.setpgid(0, 0)  # the parent forwards what its group receives
        become_subreaper()
        try:
            result = work()
        finally:
            terminate_descendants(GRACE_SECONDS)
        with os.fdopen(write_fd, "wb") as writer:
            writer.write(result)
        code = 0
    except BaseException:  # noqa: BLE001 -- the parent's code must not continue in the child
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _wait_for_child(child: int, awaited: set[signal.Signals]) -> int:
    while True:
        number = signal.sigwait(awaited)
        if number != signal.SIGCHLD:
            os.kill(child, number)
            continue
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
