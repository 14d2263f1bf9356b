"""SGLang's message queues in shared memory: a process that is killed while it starts leaves its own behind."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable
from pathlib import Path

import psutil

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 -- where SGLang makes them

YOUNG_SECONDS = 10.0
"""A queue may belong to a process that cannot be seen from here, in another container; it soon needs no name."""

_NAME = re.compile(r"sgl_shm_mq_(\d+)_[0-9a-f]+")


def remove_abandoned(folder: Path = SHARED_MEMORY) -> None:
    """Remove the queues of processes that are gone."""
    for pid, path in _queues(folder):
        if not psutil.pid_exists(pid) and _age(path) > YOUNG_SECONDS:
            path.unlink(missing_ok=True)


def remove_of(pids: Iterable[int], folder: Path = SHARED_MEMORY) -> None:
    """Remove the queues that these processes, which have ended, have left."""
    ended = set(pids)
    for pid, path in _queues(folder):
        if pid in ended:
            path.unlink(missing_ok=True)


def _queues(folder: Path) -> list[tuple[int, Path]]:
    names = ((_NAME.fullmatch(path.name), path) for path in folder.glob("sgl_shm_mq_*"))
    return [(int(match[1]), path) for match, path in names if match]


def _age(path: Path) -> float:
    try:
        return time.time() - path.stat().st_mtime
    except FileNotFoundError:
        return 0.0
