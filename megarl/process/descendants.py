"""Termination of all descendants of this process, including orphans of its children."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import psutil

from megarl.process.prctl import set_parent_death_signal

POLL_SECONDS = 0.02


def make_preexec(parent_death_signal: signal.Signals) -> Callable[[], None]:
    """Return a `preexec_fn` for a child process that gets `parent_death_signal` when this process dies."""
    parent = os.getpid()

    def prepare() -> None:
        # SIGUSR1 is only a notice: a program that does not handle it must not die, so it stays pending
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
        set_parent_death_signal(parent_death_signal, parent=parent)

    return prepare


def terminate_descendants(grace_seconds: float) -> list[str]:
    """Terminate every descendant: SIGTERM, and SIGKILL to those left after `grace_seconds`.

    To be called last: it also reaps children that other code has started and may wait for.

    Returns:
        "name (pid)" of the processes that needed SIGKILL.
    """
    deadline = time.monotonic() + grace_seconds
    signaled: set[int] = set()
    killed: dict[int, str] = {}
    while descendants := _live_descendants():
        late = time.monotonic() > deadline
        for process in descendants:
            try:
                if late:
                    killed.setdefault(process.pid, f"{process.name()} ({process.pid})")
                    process.kill()
                elif process.pid not in signaled:
                    signaled.add(process.pid)
                    process.terminate()
            except psutil.NoSuchProcess:
                continue
        time.sleep(POLL_SECONDS)
    return list(killed.values())


def _live_descendants() -> list[psutil.Process]:
    """Return the running descendants; reap the children that have ended."""
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
