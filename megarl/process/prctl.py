"""Linux's prctl: what happens to a process when its parent or its child dies. Imports nothing that takes time."""

from __future__ import annotations

import ctypes
import os
import signal

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36

_prctl = ctypes.CDLL(None, use_errno=True).prctl


def become_subreaper() -> None:
    """Make this process the subreaper: a descendant whose parent ends becomes its child."""
    _call_prctl(PR_SET_CHILD_SUBREAPER, 1)


def set_parent_death_signal(number: signal.Signals, *, parent: int) -> None:
    """Make this process get signal `number` when its parent dies; exit if it has died already.

    Args:
        parent: pid of the parent at the time it created this process.
    """
    _call_prctl(PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:  # the parent died before the line above
        os._exit(1)


def _call_prctl(option: int, value: int) -> None:
    if _prctl(option, value, 0, 0, 0):
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
