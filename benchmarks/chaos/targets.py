"""Classifies the processes of a run by the kinds that may be killed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

CONTROLLER = "controller"
TRAINER = "trainer"
ENGINE = "engine"
SCHEDULER = "scheduler"
ROLLOUT_WORKER = "rollout_worker"
DRIVER = "driver"

DEFAULT_TARGETS = (CONTROLLER, TRAINER, ENGINE, SCHEDULER, ROLLOUT_WORKER)
"""Targets by default; a scheduler is the SGLang process inside an engine."""

ALL_TARGETS = (*DEFAULT_TARGETS, DRIVER)

ENGINE_VARIABLE = "SGLANG_USE_CPU_ENGINE"
"""Environment variable that engines on CPUs have even before their scheduler starts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessRow:
    """One row of a process table."""

    pid: int
    parent: int
    title: str
    """Process title: `ray::<class>` for Ray actors, `ray::<class>.<method>` while a call runs."""
    has_engine_variable: bool = False


def pids_by_target(table: Iterable[ProcessRow], *, driver: int) -> Mapping[str, list[int]]:
    """Return target -> ascending process ids, for the targets that have a process.

    Args:
        driver: process id of the command.
    """
    rows = sorted(table, key=lambda row: row.pid)
    with_scheduler = {row.parent for row in rows if _is_scheduler(row)}
    found: dict[str, list[int]] = {}
    for row in rows:
        target = DRIVER if row.pid == driver else _target(row, with_scheduler)
        if target is not None:
            found.setdefault(target, []).append(row.pid)
    return found


def _target(row: ProcessRow, with_scheduler: set[int]) -> str | None:
    if _is_scheduler(row):
        return SCHEDULER
    match row.title.split(".")[0]:
        case "ray::Controller":
            return CONTROLLER
        case "ray::WorkerHost":
            return TRAINER
        case "ray::AsyncWorkerHost":
            return ENGINE if row.has_engine_variable or row.pid in with_scheduler else ROLLOUT_WORKER
    return None


def _is_scheduler(row: ProcessRow) -> bool:
    return row.title.startswith("sglang::scheduler")
