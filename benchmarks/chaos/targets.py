"""Which of a run's processes is what: those that may be killed, by kind."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

CONTROLLER = "controller"
TRAINER = "trainer"
ENGINE = "engine"
SCHEDULER = "scheduler"
ROLLOUT_WORKER = "rollout_worker"
DRIVER = "driver"

USUAL = (CONTROLLER, TRAINER, ENGINE, SCHEDULER, ROLLOUT_WORKER)
"""What is killed unless asked otherwise; a scheduler is SGLang's process inside an engine."""

ALL = (*USUAL, DRIVER)

ENGINE_VARIABLE = "SGLANG_USE_CPU_ENGINE"
"""In the environment of engines on CPUs, also before they have a scheduler."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessRow:
    """One line of a process table."""

    pid: int
    parent: int
    title: str
    """As the process calls itself: Ray's are `ray::<class>`, and `ray::<class>.<method>` while a call runs."""
    has_engine_variable: bool = False


def by_target(table: Iterable[ProcessRow], *, driver: int) -> Mapping[str, list[int]]:
    """Target -> process ids, ascending; targets without a process are left out.

    Args:
        driver: process id of the command itself.
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
