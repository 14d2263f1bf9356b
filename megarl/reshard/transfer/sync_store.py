"""The TCP store in the controller's process, over which the processes of a sync find and watch each other."""

from __future__ import annotations

from datetime import timedelta

from torch._C._distributed_c10d import TCPStore

from megarl.errors import WeightSyncError

CONNECT_SECONDS = 30.0
"""Timeout of connecting to a store, and of a call to it."""


def open_store(host: str) -> TCPStore:
    """Open a store in this process, on any free port, for a rendezvous; it closes with the object."""
    return TCPStore(host, 0, is_master=True, wait_for_workers=False)


def connect_store(host: str, port: int) -> TCPStore:
    """Connect to a store, which takes longer than a call to it.

    Raises:
        WeightSyncError: the store does not answer.
    """
    try:
        return TCPStore(host, port, timeout=timedelta(seconds=CONNECT_SECONDS))
    except (RuntimeError, ValueError) as e:
        raise WeightSyncError(f"the store at {host}:{port} does not answer: {first_line(e)}") from e


def first_line(error: BaseException) -> str:
    """Return the first line of the error's message, or its type if it has none."""
    return (str(error).splitlines() or [type(error).__name__])[0]
