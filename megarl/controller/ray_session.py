"""The Ray cluster of a command, and the SIGTERM handlers that shut it down gracefully."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import ray
from ray.exceptions import RayError

from megarl.cluster.placement.pool import SlotPool, reserve, start_cluster
from megarl.cluster.workers.failures import to_megarl_error
from megarl.config.placement import PlacementConfig
from megarl.controller.preflight.cluster_check import RequiredPaths, check_nodes_or_raise


@contextmanager
def reserved_slots(placement: PlacementConfig, places: RequiredPaths, *, what: str, name: str) -> Iterator[SlotPool]:
    """Join or start the Ray cluster and reserve slots on it; a cluster started here is shut down with the block.

    Ray's errors within the block are raised as megarl's.

    Args:
        places: paths that every node must see, if nodes are checked.
        what: the command, for error messages.
        name: what to call a worker in error messages.
    """
    # installed twice: connecting to a cluster replaces the first handler by Ray's own
    with sigterm_as_interrupt():
        try:
            start_cluster(placement)
            with sigterm_as_interrupt():
                check_nodes_or_raise(placement, places)
                yield reserve(placement)
        except RayError as error:
            raise to_megarl_error(error, what=what, name=name) from error
        finally:
            leave_cluster()


def leave_cluster() -> None:
    """Disconnect from the Ray cluster, and end one that was started here."""
    with discarded_native_stderr():
        ray.shutdown()


@contextmanager
def discarded_native_stderr() -> Iterator[None]:
    """Discard what is written to file descriptor 2 within the block, also by native code.

    Ray's C++ threads report there that processes are gone which a shutdown has just ended.
    """
    sys.stderr.flush()
    before, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    os.close(null)
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(before, 2)
        os.close(before)


class SigtermFlag:
    """Records whether and when SIGTERM was received."""

    def __init__(self) -> None:
        self.received_at: float | None = None
        """Time of the first SIGTERM by `time.monotonic`; None: not received."""


@contextmanager
def defer_sigterm() -> Iterator[SigtermFlag]:
    """Record the first SIGTERM in the yielded flag; the second raises KeyboardInterrupt."""
    flag = SigtermFlag()

    def record(signum: int, frame: FrameType | None) -> None:
        if flag.received_at is not None:
            raise KeyboardInterrupt
        flag.received_at = time.monotonic()

    before = signal.signal(signal.SIGTERM, record)
    try:
        yield flag
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def sigterm_as_interrupt() -> Iterator[None]:
    """Raise KeyboardInterrupt on SIGTERM, so that the run shuts down gracefully as on Ctrl-C."""

    def interrupt(signum: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
