"""The Ray cluster of a command, its shutdown on SIGTERM, and controllers that outlive their command.

The folder of a detached run records where to find its controller.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import ray
from ray.exceptions import RayError

from megarl.checkpoint.run_lock import LOCK_TIMEOUT_SECONDS, RunLock
from megarl.cluster.placement.pool import SlotPool, reserve, start_cluster
from megarl.cluster.process.atomic_files import atomic_write
from megarl.cluster.workers.failures import to_megarl_error
from megarl.config import StageConfig
from megarl.config.placement import PlacementConfig
from megarl.controller.preflight.cluster_check import RequiredPaths, check_nodes_or_raise
from megarl.errors import ConfigError, DataError, WorkerError
from megarl.tracking.progress import HEARTBEAT_FILE


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


CONTROLLER_FILE = "controller.json"

NAMESPACE = "megarl"

START_TIMEOUT_SECONDS = 60.0
"""Timeout for the first reply of the controller actor."""


def detached_options(config: StageConfig) -> dict[str, str]:
    """Return the Ray actor options that make the controller outlive its command and findable by name."""
    return {"name": _controller_name(config.run_dir), "namespace": NAMESPACE, "lifetime": "detached"}


def detach_run(config: StageConfig, controller: ray.actor.ActorHandle) -> None:
    """Wait until the controller responds, then write its address to CONTROLLER_FILE in the run folder.

    Raises:
        WorkerError: the controller does not respond in time; it is killed.
    """
    try:
        ray.get(controller.events.remote(0), timeout=START_TIMEOUT_SECONDS)
    except RayError as error:
        ray.kill(controller)
        raise WorkerError(f"the controller did not start: {error}") from error
    where = {"ray_address": ray.get_runtime_context().gcs_address, "actor": _controller_name(config.run_dir)}
    with atomic_write(Path(config.run_dir) / CONTROLLER_FILE) as draft:
        draft.write_text(json.dumps(where) + "\n")


@contextmanager
def acquire_when_free(lock: RunLock) -> Iterator[None]:
    """Hold the run folder's lock within the block, waiting until its current holder releases it.

    The holder is the command that started the run and is about to exit, or this run's previous controller on a lost
    node. Its lock expires after `LOCK_TIMEOUT_SECONDS` without a refresh.

    Raises:
        ConfigError: another run still holds the lock at the deadline.
    """
    deadline = time.monotonic() + LOCK_TIMEOUT_SECONDS + START_TIMEOUT_SECONDS
    while True:
        try:
            lock.acquire()
        except ConfigError:
            if time.monotonic() > deadline:
                raise
            time.sleep(1.0)
        else:
            break
    try:
        yield
    finally:
        lock.release()


def find_controller(run_dir: str | Path) -> ray.actor.ActorHandle:
    """Connect to the Ray cluster of the folder's detached run and return its controller actor.

    Raises:
        DataError: the run is not detached, or its controller no longer exists.
    """
    folder = Path(run_dir)
    try:
        where = json.loads((folder / CONTROLLER_FILE).read_text())
    except OSError as error:
        raise DataError(
            f"{folder} has no {CONTROLLER_FILE}: its run was not started with `megarl train --detach` and ends with "
            "its command"
        ) from error
    try:
        ray.init(address=where["ray_address"], namespace=NAMESPACE, logging_level="error", log_to_driver=False)
        return ray.get_actor(where["actor"], NAMESPACE)
    except (ConnectionError, ValueError, RayError) as error:
        raise DataError(
            f"{folder}: no controller is running in the Ray cluster at {where['ray_address']}; "
            f"{_last_heartbeat(folder)}"
        ) from error


def _controller_name(run_dir: str) -> str:
    return f"controller-{hashlib.sha256(run_dir.encode()).hexdigest()[:16]}"


def _last_heartbeat(folder: Path) -> str:
    """Describe the run's last heartbeat for an error message."""
    try:
        beat = json.loads((folder / HEARTBEAT_FILE).read_text())
    except OSError:
        return f"{HEARTBEAT_FILE} cannot be read"
    return f"last heartbeat at {beat['time']}: {beat['status']}, step {beat['step']} of {beat['steps']}"
