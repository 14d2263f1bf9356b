"""Removes SGLang's message queues in shared memory, which a process that is killed during startup leaves behind."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable
from pathlib import Path

import psutil

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 -- where SGLang creates them

MIN_AGE_SECONDS = 10.0
"""Younger queues are kept: they may belong to a process in another container, which is not visible here. Older queues
no longer need their name, because all processes have opened them."""

_NAME = re.compile(r"sgl_shm_mq_(\d+)_[0-9a-f]+")


def remove_abandoned_queues(folder: Path = SHARED_MEMORY) -> None:
    """Remove the queues whose processes no longer exist."""
    for pid, path in _queues(folder):
        if not psutil.pid_exists(pid) and _age(path) > MIN_AGE_SECONDS:
            path.unlink(missing_ok=True)


def remove_queues_of(pids: Iterable[int], folder: Path = SHARED_MEMORY) -> None:
    """Remove the queues of the given processes, which must have exited."""
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
