"""The Ray cluster of a command, and how signals end what runs on it."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import ray
from ray.exceptions import RayError

from megarl.config.placement import PlacementConfig
from megarl.placement.pool import SlotPool, reserve, start_cluster
from megarl.preflight.cluster.cluster_check import Places, require_sound_nodes
from megarl.workers.failures import translate


@contextmanager
def reserved_slots(placement: PlacementConfig, places: Places, *, what: str, name: str) -> Iterator[SlotPool]:
    """Slots on the cluster, which ends with the block if it was started here; errors of Ray become megarl's.

    Args:
        places: that every node must find, where nodes are checked.
        what: is being done, for errors.
        name: of a worker, for errors.
    """
    # twice, because connecting to a cluster puts Ray's own handler of SIGTERM in the place of the first
    with terminated_is_interrupted():
        try:
            start_cluster(placement)
            with terminated_is_interrupted():
                require_sound_nodes(placement, places)
                yield reserve(placement)
        except RayError as error:
            raise translate(error, what=what, name=name) from error
        finally:
            ray.shutdown()


class Terminated:
    """Whether SIGTERM has come, and when."""

    def __init__(self) -> None:
        self.since: float | None = None
        """By `time.monotonic`; None: it has not."""


@contextmanager
def terminated_is_noted() -> Iterator[Terminated]:
    """The first SIGTERM is only noted; the second interrupts, as Ctrl-C does."""
    noted = Terminated()

    def note(signum: int, frame: FrameType | None) -> None:
        if noted.since is not None:
            raise KeyboardInterrupt
        noted.since = time.monotonic()

    before = signal.signal(signal.SIGTERM, note)
    try:
        yield noted
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def terminated_is_interrupted() -> Iterator[None]:
    """SIGTERM ends the run as Ctrl-C does: in order, with nothing left behind."""

    def interrupt(signum: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
