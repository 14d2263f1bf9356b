"""Processes that shall not outlive this one: its children, their children, and those who lost their parent."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Callable

import psutil

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36

POLL_SECONDS = 0.02

_prctl = ctypes.CDLL(None, use_errno=True).prctl


def adopt_orphans() -> None:
    """From now on, a descendant whose parent ends becomes this process's child: none is out of reach."""
    _call_prctl(PR_SET_CHILD_SUBREAPER, 1)


def at_start_of_child(when_parent_dies: signal.Signals) -> Callable[[], None]:
    """What a child process calls before it becomes its program, so that it gets a signal when this process dies."""
    parent = os.getpid()

    def prepare() -> None:
        _call_prctl(PR_SET_PDEATHSIG, when_parent_dies)
        # a notice, of which nobody is to die who has not asked for it: it stays pending until somebody looks
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
        if os.getppid() != parent:  # who died before the first line
            os._exit(1)

    return prepare


def end_descendants(grace_seconds: float) -> list[str]:
    """End every descendant: SIGTERM, and SIGKILL to what is left after `grace_seconds`; returns who needed it.

    Only at the very end: it waits for children that were started elsewhere.
    """
    deadline = time.monotonic() + grace_seconds
    asked: set[int] = set()
    killed: dict[int, str] = {}
    while descendants := _living():
        late = time.monotonic() > deadline
        for process in descendants:
            try:
                if late:
                    killed.setdefault(process.pid, f"{process.name()} ({process.pid})")
                    process.kill()
                elif process.pid not in asked:
                    asked.add(process.pid)
                    process.terminate()
            except psutil.NoSuchProcess:
                continue
        time.sleep(POLL_SECONDS)
    return list(killed.values())


def _living() -> list[psutil.Process]:
    """Descendants that run; those that have ended are let go."""
    living = []
    for process in psutil.Process().children(recursive=True):
        try:
            if process.status() != psutil.STATUS_ZOMBIE:
                living.append(process)
            elif process.ppid() == os.getpid():
                os.waitpid(process.pid, os.WNOHANG)
        except (psutil.NoSuchProcess, ChildProcessError):
            continue
    return living


def _call_prctl(option: int, value: int) -> None:
    if _prctl(option, value, 0, 0, 0):
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
