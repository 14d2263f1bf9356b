"""Turns what Ray raises into megarl's errors, with the worker's name and last words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from megarl.errors import MegarlError, WorkerError


def wait_all(refs: Sequence[Any], *, what: str, names: Mapping[Any, str], timeout: float | None = None) -> list[Any]:
    """Results in order; the first failure is raised at once, since the other ranks may wait for the failed one.

    Raises:
        MegarlError: as a worker raised it; WorkerError for a death, another exception or a timeout.
    """
    waiting = list(refs)
    while waiting:
        done, waiting = ray.wait(waiting, num_returns=1, timeout=timeout)
        if not done:
            late = ", ".join(names.get(ref, "?") for ref in waiting)
            raise WorkerError(f"{what}: no answer within {timeout:g} s from {late}")
        for ref in done:
            raise_failure(ref, what=what, name=names.get(ref, "?"))
    return list(ray.get(list(refs)))


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
        return WorkerError(f"{what}: {name} died. {_first_lines(str(error))}")
    return WorkerError(f"{what} failed on {name}: {type(error).__name__}: {error}")


def _first_lines(text: str, count: int = 12) -> str:
    return "\n".join(text.strip().splitlines()[:count])
