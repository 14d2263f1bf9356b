"""The Ray cluster of a command, and how signals end what runs on it."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import ray
from ray.exceptions import RayError

from megarl.config.placement import PlacementConfig
from megarl.controller.node_checks import Places, require_sound_nodes
from megarl.placement.pool import SlotPool, reserve, start_cluster
from megarl.workers.failure import translate


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
