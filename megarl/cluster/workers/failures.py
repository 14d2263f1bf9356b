"""Waits for Ray calls and turns Ray's exceptions into megarl errors that name the worker and quote its log."""

from __future__ import annotations

import queue
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import (
    ActorUnschedulableError,
    NodeDiedError,
    ObjectLostError,
    RayActorError,
    RayError,
    RayTaskError,
    WorkerCrashedError,
)

from megarl.cluster.process.atomic_files import quote_tail
from megarl.errors import HungWorkerError, LostRankError, LostWorkerError, MegarlError, WeightSyncError, WorkerError


class Completions:
    """The calls of one waiter. Ray reports each as it ends; nothing is polled."""

    def __init__(self) -> None:
        self._ended: queue.SimpleQueue[tuple[Any, Future[Any]]] = queue.SimpleQueue()

    def add(self, ref: Any) -> None:
        """Watch the call of a Ray reference, whose value is fetched to this process."""
        ref.future().add_done_callback(lambda future: self._ended.put((ref, future)))

    def wait(self, timeout: float) -> list[tuple[Any, Future[Any]]]:
        """Return the calls that have ended since the last call of this, in their order, with their results or errors.

        Blocks until there is one, for at most `timeout` seconds.
        """
        try:
            ended = [self._ended.get(timeout=timeout)]
        except queue.Empty:
            return []
        while not self._ended.empty():
            ended.append(self._ended.get())
        return ended


class JointCompletion:
    """Calls of which all have to end: a thread that waits sleeps until the last one has ended, or one has failed."""

    def __init__(self, refs: Iterable[Any], watched: Iterable[Any] = ()) -> None:
        """`watched`: further calls, which need not end, but whose failure ends the wait as well."""
        self._required, self._watched = dict.fromkeys(refs), dict.fromkeys(watched)
        self._ended: dict[Any, Future[Any]] = {}
        self._num_left, self._is_over = len(self._required), threading.Event()
        self._lock = threading.Lock()
        for ref in (*self._required, *self._watched):
            ref.future().add_done_callback(lambda future, ref=ref: self._end(ref, future))

    def _end(self, ref: Any, future: Future[Any]) -> None:
        with self._lock:  # a call that has ended already is reported by the thread that asks for it
            self._ended[ref] = future
            self._num_left -= ref in self._required
            if not self._num_left or future.exception() is not None:
                self._is_over.set()

    def wait(self, timeout: float | None) -> bool:
        """Return whether all calls have ended or one has failed; waits for it for at most `timeout` seconds."""
        return self._is_over.wait(timeout)

    def separate(self) -> tuple[dict[Any, Future[Any]], list[Any]]:
        """Return the calls that have ended, by reference, with their results or errors, and those that have not."""
        with self._lock:
            ended = dict(self._ended)
        return ended, [ref for ref in (*self._required, *self._watched) if ref not in ended]


ROOT_CAUSE_SECONDS = 2.0
"""How long to look for the root cause of a failure that another rank may have caused.

When a rank dies, collectives fail on all other ranks too.
"""

POLL_SECONDS = 0.5
"""Interval at which a wait inside an `abort_check` or `interruptible` block runs the check."""

PROCESS_LOSSES = (RayActorError, ActorUnschedulableError, NodeDiedError, WorkerCrashedError, ObjectLostError)
"""Ray's errors for a process or node that has ended, or for an object that was lost with one."""

BATCH_SECONDS = 0.2
"""How long a wait for all of many calls lets results gather before it looks for failures among them.

Each look costs time in proportion to the calls waited for, so taking one result per look would take the square of it.
"""

NUM_LOOKS = 5
"""After so many looks, Ray reports the calls that are left as they end. For a call that ends soon, looks cost less."""

LATE_SECONDS = 2.0
"""Time limit of `Workers.query_late`."""


@dataclass(frozen=True, slots=True)
class Workers:
    """Workers that answer a call together: stands for their names."""

    names: tuple[str, ...]
    query_late: Callable[[], Any]
    """Begins a call that returns the names of those that have not answered."""

    def __str__(self) -> str:
        return self.names[0] if len(self.names) == 1 else f"{self.names[0]} to {self.names[-1]}"


LateNames = Callable[[], Sequence[str]]
"""Returns the names of the workers that have not answered; may take `LATE_SECONDS`."""

AbortCheck = Callable[[LateNames], MegarlError | None]
"""Returns the error that a wait must raise, or None to keep waiting."""

_abort_check: ContextVar[AbortCheck | None] = ContextVar("abort_check", default=None)

_interrupt: ContextVar[threading.Event | None] = ContextVar("interrupt", default=None)

RAY_LINE_PREFIXES = (":job_id:", ":actor_name:", ":task_name:")
"""Prefixes of the lines that Ray itself writes into a worker's stderr log."""


@contextmanager
def abort_check(check: AbortCheck) -> Iterator[None]:
    """Run `check` in every wait that this thread makes inside the block; replaces an enclosing `abort_check`."""
    token = _abort_check.set(check)
    try:
        yield
    finally:
        _abort_check.reset(token)


@contextmanager
def interruptible(interrupt: threading.Event) -> Iterator[None]:
    """Raise KeyboardInterrupt in the next wait that this thread makes inside the block once `interrupt` is set."""
    token = _interrupt.set(interrupt)
    try:
        yield
    finally:
        _interrupt.reset(token)


def pause(seconds: float) -> None:
    """Sleep; raises KeyboardInterrupt as soon as the enclosing `interruptible` block is interrupted."""
    interrupt = _interrupt.get()
    if interrupt is None:
        time.sleep(seconds)
    elif interrupt.wait(seconds):
        raise KeyboardInterrupt


def run_abort_check(late_names: LateNames) -> None:
    """Raise the error of the enclosing `abort_check`, if any.

    Raises:
        KeyboardInterrupt: the enclosing `interruptible` block is interrupted.
    """
    interrupt = _interrupt.get()
    if interrupt is not None and interrupt.is_set():
        raise KeyboardInterrupt
    check = _abort_check.get()
    if check is not None and (error := check(late_names)) is not None:
        raise error


def wait_all(
    refs: Sequence[Any],
    *,
    what: str,
    names: Mapping[Any, str | Workers],
    timeout: float | None = None,
    watched: Sequence[Any] = (),
) -> list[Any]:
    """Wait for all calls and return their results in order.

    Raises at the first failure, at most `BATCH_SECONDS` later, without waiting for the other ranks: they may be waiting
    for the failed one.

    Args:
        watched: calls that are not waited for, but whose failure ends the wait as well.

    Raises:
        MegarlError: as a worker or the `abort_check` raised it.
        WorkerError: a worker died, raised another exception or did not answer within `timeout` seconds.
        KeyboardInterrupt: the enclosing `interruptible` block is interrupted.
    """
    limit = _TimeLimit(what, names, timeout)
    results, waiting = dict[Any, Any](), list(dict.fromkeys([*refs, *watched]))
    for _ in range(NUM_LOOKS):
        if not (left := sum(ref not in results for ref in refs)):
            break
        done, waiting = ray.wait(waiting, num_returns=left, timeout=limit.poll_seconds(BATCH_SECONDS))
        try:
            results.update(zip(done, ray.get(done), strict=True))
        except RayError as error:
            raise _root_cause(done, waiting, what=what, names=names, watched=watched) from error
        if not done:
            limit.check(waiting)
    missing = [ref for ref in refs if ref not in results]
    if missing:
        joint = JointCompletion(missing, [ref for ref in watched if ref not in results])
        while not joint.wait(limit.poll_seconds()):
            limit.check(joint.separate()[1])
        ended, waiting = joint.separate()
        errors = [found for future in ended.values() if (found := future.exception()) is not None]
        if errors:
            raise _root_cause(list(ended), waiting, what=what, names=names, watched=watched) from errors[0]
        results.update((ref, future.result()) for ref, future in ended.items())
    return [results[ref] for ref in refs]


def wait_any(
    refs: Sequence[Any], *, what: str, names: Mapping[Any, str], timeout: float | None = None
) -> tuple[list[Any], list[Any]]:
    """Wait until a call is over, successful or not; return it and the calls that are left.

    Raises:
        HungWorkerError: no call was over within `timeout` seconds.
        MegarlError: as the `abort_check` raised it.
        KeyboardInterrupt: the enclosing `interruptible` block is interrupted.
    """
    limit = _TimeLimit(what, names, timeout)
    while True:
        done, waiting = ray.wait(list(refs), num_returns=1, timeout=limit.poll_seconds())
        if done:
            return done, waiting
        limit.check(waiting)


def results_in_time(names: Mapping[Any, str], timeout: float) -> dict[Any, Any]:
    """Wait for all these calls together, for at most `timeout` seconds; return the results of those that succeeded.

    Args:
        names: the workers by their calls.

    Raises:
        MegarlError: as the `abort_check` raised it.
        KeyboardInterrupt: the enclosing `interruptible` block is interrupted.
    """
    waiting, deadline, results = list(names), time.monotonic() + timeout, dict[Any, Any]()
    while waiting and (left := deadline - time.monotonic()) > 0:
        done, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=min(left, POLL_SECONDS))
        run_abort_check(partial(late_names, names, waiting))
        failed = _failures(done)
        results.update((ref, ray.get(ref)) for ref in done if ref not in failed)
    return results


class _TimeLimit:
    """What may end a wait before its calls are over: a timeout, the `abort_check` or an interrupt."""

    def __init__(self, what: str, names: Mapping[Any, str | Workers], timeout: float | None) -> None:
        self._what, self._names, self._timeout = what, names, timeout
        self._end = None if timeout is None else time.monotonic() + timeout

    def poll_seconds(self, longest: float | None = None) -> float | None:
        """Return how long to wait until the next `check`, at most `longest`; None: until calls are over."""
        checks = None if _abort_check.get() is None and _interrupt.get() is None else POLL_SECONDS
        left = None if self._end is None else max(0.0, self._end - time.monotonic())
        return min((seconds for seconds in (longest, checks, left) if seconds is not None), default=None)

    def check(self, waiting: Sequence[Any]) -> None:
        """Raise the error that ends the wait for these calls, if any."""
        run_abort_check(partial(late_names, self._names, waiting))
        if self._end is not None and time.monotonic() >= self._end:
            late = ", ".join(late_names(self._names, waiting))
            raise HungWorkerError(f"{self._what}: no answer within {self._timeout:g} s from {late}")


def late_names(names: Mapping[Any, str | Workers], waiting: Sequence[Any]) -> list[str]:
    """Return the names of the workers that have not answered the calls `waiting`.

    `Workers` count as late, all of them, if their query fails or takes longer than `LATE_SECONDS`.
    """
    late = list(dict.fromkeys(names.get(ref, "?") for ref in waiting))
    queries = {each: each.query_late() for each in late if isinstance(each, Workers)}
    done = ray.wait(list(queries.values()), num_returns=len(queries), timeout=LATE_SECONDS)[0] if queries else []
    succeeded = set(done) - set(_failures(done))
    found: list[str] = []
    for each in late:
        if isinstance(each, Workers):
            found += ray.get(queries[each]) if queries[each] in succeeded else each.names
        else:
            found.append(each)
    return list(dict.fromkeys(found))


def _root_cause(
    done: Sequence[Any],
    waiting: Sequence[Any],
    *,
    what: str,
    names: Mapping[Any, str | Workers],
    watched: Sequence[Any] = (),
) -> MegarlError:
    """Return the error to raise for the calls in `done`, of which some have failed: that which caused the others.

    Args:
        watched: calls in `waiting` that may rightly be without an answer.
    """
    silent: Sequence[Any] = ()
    failures = _failures(done)
    if waiting and min(map(_secondary_rank, failures.values())) > OWN_ERROR:
        late, left = ray.wait(list(waiting), num_returns=len(waiting), timeout=ROOT_CAUSE_SECONDS)
        failures |= _failures(late)
        silent = [ref for ref in left if ref not in watched]
    failed = min(failures, key=lambda ref: _secondary_rank(failures[ref]))
    cause = to_megarl_error(failures[failed], what=what, name=str(names.get(failed, "?")))
    # the others see a rank that waits in vain as late
    if silent and isinstance(cause, WeightSyncError) and (late := late_names(names, silent)):
        return type(cause)(f"{cause}; no answer from {', '.join(late)}")
    return cause


def _failures(done: Sequence[Any]) -> dict[Any, RayError]:
    """Return the errors of the finished calls that have failed."""
    found: dict[Any, RayError] = {}
    for ref in done:
        try:
            ray.get(ref)
        except RayError as error:
            found[ref] = error
    return found


OWN_ERROR = 1
"""`_secondary_rank` of an error that a rank raised about itself."""


def _secondary_rank(error: RayError) -> int:
    """Return how likely `error` only follows from another rank's failure: 0 (process death) to 4 (lost a peer)."""
    if isinstance(error, PROCESS_LOSSES):
        return 0
    cause = error.cause if isinstance(error, RayTaskError) else None
    match cause:
        case LostWorkerError():
            return 0
        case LostRankError():
            return 4
        case _ if _is_connection_loss(cause):
            return 4
        case WeightSyncError():
            return 3
        case MegarlError() if type(cause) is not WorkerError:  # for which a relay reports any other exception
            return OWN_ERROR
        case _:
            return 2


def raise_failure(ref: Any, *, what: str, name: str) -> None:
    """Raise a `MegarlError` if the finished call `ref` has failed."""
    try:
        ray.get(ref)
    except RayError as error:
        raise to_megarl_error(error, what=what, name=name) from error


def to_megarl_error(error: RayError, *, what: str, name: str) -> MegarlError:
    """Return the megarl error for a failed call `what` on worker `name`; errors that the worker raised are kept."""
    if isinstance(error, RayTaskError):
        cause = error.cause
        if isinstance(cause, MegarlError):
            return cause
        if isinstance(cause, RayError):
            return to_megarl_error(cause, what=what, name=name)
        if _is_connection_loss(cause):
            return LostRankError(f"{what} failed on {name}:\n{error}")
        return WorkerError(f"{what} failed on {name}:\n{error}")
    if isinstance(error, RayActorError):
        return LostWorkerError(f"{what}: {name} died. {_first_lines(str(error))}{_stderr_tail(str(error))}")
    if isinstance(error, PROCESS_LOSSES):
        return LostWorkerError(f"{what} failed on {name}, as a process or node was lost: {_first_lines(str(error))}")
    return WorkerError(f"{what} failed on {name}: {type(error).__name__}: {error}")


def _is_connection_loss(cause: BaseException | None) -> bool:
    """Return whether torch.distributed's backend raised the error: NCCL has lost a peer or aborted a collective."""
    # by name, because this process may not have imported torch
    return any(
        (each.__module__, each.__name__) == ("torch.distributed", "DistBackendError") for each in type(cause).__mro__
    )


def find_losses(actors: Mapping[str, ray.actor.ActorHandle], timeout: float) -> tuple[MegarlError | None, list[str]]:
    """Check which worker processes are alive.

    Args:
        actors: `WorkerHost` actors by the names of their processes.
        timeout: how many seconds to wait for the answers; a dead process is reported without waiting.

    Returns:
        The loss of a process that has died, or None; and the names of those that have not answered.
    """
    names = {actor.process_info.remote(): name for name, actor in actors.items()}
    waiting, deadline = list(names), time.monotonic() + timeout
    while waiting and (left := deadline - time.monotonic()) > 0:
        done, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=min(left, POLL_SECONDS))
        run_abort_check(partial(late_names, names, waiting))
        for ref in done:
            try:
                ray.get(ref)
            except PROCESS_LOSSES as error:
                return to_megarl_error(error, what="liveness check", name=names[ref]), []
    return None, [names[ref] for ref in waiting]


def _first_lines(text: str, count: int = 12) -> str:
    return "\n".join(text.strip().splitlines()[:count])


def _stderr_tail(report: str) -> str:
    """Return the end of the dead process's stderr log; empty if it is not on this node.

    `report`: Ray's error message, which names pid and address.
    """
    facts = dict(re.findall(r"^\s*(pid|ip): (\S+)$", report, re.MULTILINE))
    folder = _ray_log_folder()
    if "pid" not in facts or folder is None or facts.get("ip") != ray.util.get_node_ip_address():
        return ""
    for log in folder.glob(f"worker-*-{facts['pid']}.err"):
        if quoted := quote_tail(log, skip=RAY_LINE_PREFIXES):
            return f"\n{quoted}"
    return ""


def _ray_log_folder() -> Path | None:
    """Return Ray's log folder on this node, or None.

    Reads Ray internals: with a version that moved them, errors only lack the log tail.
    """
    node = getattr(ray._private.worker, "_global_node", None)
    find = getattr(node, "get_logs_dir_path", None)
    return Path(find()) if find else None
