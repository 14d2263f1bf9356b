"""Turns what Ray raises into megarl's errors, with the worker's name and last words."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from megarl.errors import LostRankError, LostWorkerError, MegarlError, WeightSyncError, WorkerError
from megarl.process.log_tail import end_of

GRACE_SECONDS = 2.0
"""How long the cause is looked for after a failure that may come of another rank's: a death fails all collectives."""

LOG_TAIL_LINES = 15

POLL_SECONDS = 1.0
"""How often a wait under a `deadline` asks whether it goes on."""

Judge = Callable[[Sequence[str]], MegarlError | None]
"""What a wait for the workers of these names is to end with; None: it goes on."""

_judge: ContextVar[Judge | None] = ContextVar("judge", default=None)

RAY_MARKS = (":job_id:", ":actor_name:", ":task_name:")
"""How lines begin that Ray itself writes between a worker's."""


@contextmanager
def deadline(judge: Judge) -> Iterator[None]:
    """The block's waits on this thread ask `judge`; inside another deadline, in that one's place."""
    token = _judge.set(judge)
    try:
        yield
    finally:
        _judge.reset(token)


def check_deadline(late: Sequence[str]) -> None:
    """Raise as the judge of the `deadline` here has it, for workers of these names that have not answered."""
    judge = _judge.get()
    if judge is not None and (verdict := judge(late)) is not None:
        raise verdict


def wait_all(refs: Sequence[Any], *, what: str, names: Mapping[Any, str], timeout: float | None = None) -> list[Any]:
    """Results in order; a failure does not wait for the other ranks, since they may wait for the failed one.

    Raises:
        MegarlError: as a worker raised it; WorkerError for a death, another exception, a timeout or a `deadline`.
    """
    waiting = list(refs)
    while waiting:
        done, waiting = wait_any(waiting, what=what, names=names, timeout=timeout)
        for ref in done:
            try:
                ray.get(ref)
            except RayError as error:
                raise _root_cause(error, ref, waiting, what=what, names=names) from error
    return list(ray.get(list(refs)))


def wait_any(
    refs: Sequence[Any], *, what: str, names: Mapping[Any, str], timeout: float | None = None
) -> tuple[list[Any], list[Any]]:
    """The first of them that is over, well or not, and all others.

    Raises:
        MegarlError: none was over within `timeout` seconds, or as the judge of the `deadline` here has it.
    """
    began = time.monotonic()
    left, pause = timeout, timeout
    while True:
        if _judge.get() is not None:
            pause = POLL_SECONDS if left is None else min(left, POLL_SECONDS)
        done, waiting = ray.wait(list(refs), num_returns=1, timeout=pause)
        if done:
            return done, waiting
        late = list(dict.fromkeys(names.get(ref, "?") for ref in waiting))
        check_deadline(late)
        if timeout is not None:
            left = max(0.0, began + timeout - time.monotonic())
            if left == 0.0:
                raise WorkerError(f"{what}: no answer within {timeout:g} s from {', '.join(late)}")


def _root_cause(
    error: RayError, failed: Any, waiting: Sequence[Any], *, what: str, names: Mapping[Any, str]
) -> MegarlError:
    """What to raise for `error`, or for another rank's failure behind it."""
    silent: Sequence[Any] = ()
    if waiting and _doubt(error) > OWN:
        done, silent = ray.wait(list(waiting), num_returns=len(waiting), timeout=GRACE_SECONDS)
        for ref in done:
            try:
                ray.get(ref)
            except RayError as other:
                if _doubt(other) < _doubt(error):
                    error, failed = other, ref
    cause = translate(error, what=what, name=names.get(failed, "?"))
    if silent and isinstance(cause, WeightSyncError):  # whoever waits in vain is late in the eyes of others
        return type(cause)(f"{cause}; nothing was heard of {', '.join(names.get(ref, '?') for ref in silent)}")
    return cause


OWN = 1
"""`_doubt` of what a rank says of itself."""


def _doubt(error: RayError) -> int:
    """How much there is to say that an error comes of another rank's: nothing, of a death."""
    if isinstance(error, RayActorError):
        return 0
    match error.cause if isinstance(error, RayTaskError) else None:
        case LostRankError():
            return 4
        case WeightSyncError():
            return 3
        case MegarlError():
            return OWN
        case _:
            return 2


def raise_failure(ref: Any, *, what: str, name: str) -> None:
    """Raise if the finished `ref` failed."""
    try:
        ray.get(ref)
    except RayError as error:
        raise translate(error, what=what, name=name) from error


def translate(error: RayError, *, what: str, name: str) -> MegarlError:
    """The error to show for a failed call `what` on worker `name`."""
    if isinstance(error, RayTaskError):
        cause = error.cause
        if isinstance(cause, MegarlError):
            return cause
        if isinstance(cause, RayError):
            return translate(cause, what=what, name=name)
        return WorkerError(f"{what} failed on {name}:\n{error}")
    if isinstance(error, RayActorError):
        return LostWorkerError(f"{what}: {name} died. {_first_lines(str(error))}{_last_words(str(error))}")
    return WorkerError(f"{what} failed on {name}: {type(error).__name__}: {error}")


def _first_lines(text: str, count: int = 12) -> str:
    return "\n".join(text.strip().splitlines()[:count])


def _last_words(report: str) -> str:
    """The end of the dead process's stderr, where this machine has it; `report`: Ray's, which names pid and address."""
    facts = dict(re.findall(r"^\s*(pid|ip): (\S+)$", report, re.MULTILINE))
    folder = _log_folder()
    if "pid" not in facts or folder is None or facts.get("ip") != ray.util.get_node_ip_address():
        return ""
    for log in folder.glob(f"worker-*-{facts['pid']}.err"):
        lines = [line for line in end_of(log).splitlines() if not line.startswith(RAY_MARKS)]
        if any(lines):
            return f"\nthe end of {log}:\n" + "\n".join(lines[-LOG_TAIL_LINES:])
    return ""


def _log_folder() -> Path | None:
    """Where Ray puts this machine's logs; asked of its internals, so a version that moved them costs the last words."""
    node = getattr(ray._private.worker, "_global_node", None)
    find = getattr(node, "get_logs_dir_path", None)
    return Path(find()) if find else None
