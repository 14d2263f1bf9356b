"""A run that needs no command: its controller belongs to the Ray cluster, and its folder says where that is."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError

from megarl.checkpoint.run_lock import SILENT_SECONDS, RunLock
from megarl.config import StageConfig
from megarl.errors import ConfigError, DataError, WorkerError
from megarl.process.atomic_files import replaced
from megarl.tracking.heartbeat import HEARTBEAT_FILE

FILE = "controller.json"

NAMESPACE = "megarl"

BEGIN_SECONDS = 60.0
"""How long the controller may take to begin."""


def detached_options(config: StageConfig) -> dict[str, str]:
    """Of the controller's actor."""
    return {"name": _name(config.run_dir), "namespace": NAMESPACE, "lifetime": "detached"}


def leave(config: StageConfig, controller: Any) -> None:
    """Write down where the controller is, once it has begun.

    Raises:
        WorkerError: it does not.
    """
    try:
        ray.get(controller.events.remote(0), timeout=BEGIN_SECONDS)
    except RayError as error:
        ray.kill(controller)
        raise WorkerError(f"the controller did not begin: {error}") from error
    where = {"ray_address": ray.get_runtime_context().gcs_address, "actor": _name(config.run_dir)}
    with replaced(Path(config.run_dir) / FILE) as draft:
        draft.write_text(json.dumps(where) + "\n")


@contextmanager
def waited_for(lock: RunLock) -> Iterator[None]:
    """The block has the lock, which the command that has begun the run is about to release.

    Or which this run's controller had on a machine that is lost, and whose silence has to be long enough.

    Raises:
        ConfigError: another run got it.
    """
    deadline = time.monotonic() + SILENT_SECONDS + BEGIN_SECONDS
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


def find_controller(run_dir: str | Path) -> Any:
    """The actor that runs the run of this folder; connects with its cluster.

    Raises:
        DataError: there is none.
    """
    folder = Path(run_dir)
    try:
        where = json.loads((folder / FILE).read_text())
    except OSError as error:
        raise DataError(
            f"{folder} has no {FILE}: its run was not started with `megarl train --detach`, and ends with its command"
        ) from error
    try:
        ray.init(address=where["ray_address"], namespace=NAMESPACE, logging_level="error", log_to_driver=False)
        return ray.get_actor(where["actor"], NAMESPACE)
    except (ConnectionError, ValueError, RayError) as error:
        raise DataError(
            f"{folder}: no controller is at work in the Ray cluster at {where['ray_address']}; {_last_sign(folder)}"
        ) from error


def _name(run_dir: str) -> str:
    return f"controller-{hashlib.sha256(run_dir.encode()).hexdigest()[:16]}"


def _last_sign(folder: Path) -> str:
    """What the run said last of how it is."""
    try:
        beat = json.loads((folder / HEARTBEAT_FILE).read_text())
    except OSError:
        return f"{HEARTBEAT_FILE} cannot be read"
    return f"its last sign of life, at {beat['time']}: {beat['status']}, step {beat['step']} of {beat['steps']}"
