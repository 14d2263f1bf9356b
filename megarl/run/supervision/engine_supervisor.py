"""Detects dead or hung rollout engines and restarts them with backoff.

                watch raises, or no ping answered for recovery.engine_stall_seconds
    serving ------------------------------------------------------------> backoff
       ^                                                                     |
       | weights loaded                                                      v
       '------------------------- ready <-------------------------------- starting

The supervisor has no thread of its own: whoever waits for engines calls `poll` meanwhile. All engines are checked with
one `ray.wait`, however many there are, and those that are lost together are restarted and reported together.

Processes that hang are pinged, and do not answer. A busy rollout worker still answers pings, because a thread of its
own does. How long agents and rewards may take is limited elsewhere.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, Literal, Protocol

import ray
from ray.exceptions import RayActorError, RayError

from megarl.cluster.workers.failures import run_abort_check, to_megarl_error
from megarl.config import RunConfig
from megarl.errors import HungWorkerError, LostEngineError, MegarlError, RestartLimitError, WeightSyncError
from megarl.run.supervision.restart_budget import RestartBudget, first_line, name_some

POLL_INTERVAL_SECONDS = 1.0
"""Longest time between two checks for processes that do not answer."""

GATHER_SECONDS = 0.2
"""After a loss, how long to wait for the reports of processes that were lost with it, as those of one node are."""

LIVENESS_GROUP = "liveness"
"""Concurrency group of a rollout worker's actor in which pings are answered."""


class PingTimer:
    """Pings one process at intervals and measures how long it has not answered."""

    def __init__(self, send: Callable[[], ray.ObjectRef], timeout_seconds: float) -> None:
        """`send`: sends a ping and returns the reference to its answer."""
        self._send, self._timeout = send, timeout_seconds
        self._interval = timeout_seconds / 4  # pings of a thousand engines are most of what their supervision costs
        self._last_poll = time.monotonic()
        self._polled_seconds = 0.0
        """Time since the last answer, or since the ping that is pending, during which `is_overdue` was called."""
        self.pending: ray.ObjectRef | None = None
        """The ping that has not been answered yet."""

    def ping(self) -> None:
        """Ping the process now, unless a ping is pending, and restart the timeout."""
        self._polled_seconds, self._last_poll = 0.0, time.monotonic()
        if self.pending is None:
            self.pending = self._send()

    def mark_answered(self) -> None:
        """Record that the process has answered."""
        self.pending, self._polled_seconds = None, 0.0

    def is_overdue(self) -> bool:
        """Send a ping if one is due; return whether the process has not answered for `timeout_seconds`.

        Only time during which this method is called regularly counts towards the interval and the timeout: after a
        training step of minutes, not every process is pinged at once.
        """
        now = time.monotonic()
        since, self._last_poll = now - self._last_poll, now
        self._polled_seconds += min(since, 2 * POLL_INTERVAL_SECONDS)
        if self.pending is None:
            if self._polled_seconds >= self._interval:
                self.pending, self._polled_seconds = self._send(), 0.0
            return False
        return self._polled_seconds > self._timeout


class WorkerLivenessProbe:
    """Liveness of one rollout worker: a Ray actor (an AsyncWorkerHost) with the concurrency group `LIVENESS_GROUP`."""

    def __init__(self, worker: ray.actor.ActorHandle, timeout_seconds: float) -> None:
        ping = worker.process_info.options(concurrency_group=LIVENESS_GROUP)
        self._timer = PingTimer(ping.remote, timeout_seconds)

    @staticmethod
    def find_hung(probes: Mapping[int, WorkerLivenessProbe]) -> list[int]:
        """Return the workers that have not answered for `timeout_seconds`; one that has died is not hung."""
        pending = [timer.pending for probe in probes.values() if (timer := probe._timer).pending is not None]
        answered = set(ray.wait(pending, num_returns=len(pending), timeout=0)[0]) if pending else set()
        for probe in probes.values():
            if probe._timer.pending in answered:
                probe._timer.mark_answered()
        return [worker for worker, probe in probes.items() if probe._timer.is_overdue()]


GRACE_SECONDS = 2.0
"""Time allowed for Ray to report an engine's death after a call to it has failed."""

STOP_TIMEOUT_SECONDS = 3.0
"""Time allowed for a lost engine to shut down what is left of it gracefully."""

KILL_WAIT_SECONDS = 6.0
"""How long Ray takes to kill a process that does not answer, plus a margin of one second."""

State = Literal["serving", "backoff", "starting", "ready", "gone"]
"""State of a replica. `ready`: started, but without the current weights. `gone`: the run continues without it."""


class EngineProcesses(Protocol):
    """The processes of a run's engines, by replica index."""

    def name(self, replica: int) -> str:
        """Return the engine's name for messages."""
        ...

    def handles(self, replica: int) -> Sequence[ray.actor.ActorHandle]:
        """Return the engine's Ray actors, which are AsyncWorkerHosts: the engine, then those of its other nodes."""
        ...

    def has_live_node(self, replica: int) -> bool:
        """Return whether all nodes of the engine's slots are alive."""
        ...

    def may_allocate(self) -> bool:
        """Return whether the devices have memory for engines that start now; else they wait before allocating any."""
        ...

    def start(self, replica: int) -> ray.ObjectRef:
        """Start new processes for the engine; return a Ray reference that resolves when it has started or failed."""
        ...


class EngineLivenessProbe:
    """Liveness of one engine, from a call that returns when the engine ends and from periodic pings."""

    def __init__(self, handle: ray.actor.ActorHandle, name: str, timeout_seconds: float) -> None:
        self._name, self._timeout = name, timeout_seconds
        self.watch = handle.invoke.remote("watch")
        self.timer = PingTimer(partial(handle.invoke.remote, "ping"), timeout_seconds)

    def refs(self) -> list[ray.ObjectRef]:
        """Return the Ray references that become ready when the engine ends or answers a ping."""
        return [self.watch] if self.timer.pending is None else [self.watch, self.timer.pending]

    def find_failure(self, results: Mapping[ray.ObjectRef, Any]) -> MegarlError | None:
        """Return why the engine is lost, or None if it is alive as far as is known; `results`: as `_ended_calls`."""
        for ref in self.refs():
            if ref not in results:
                continue
            if (error := _to_loss(results[ref], self._name)) is not None:
                return error
            self.timer.mark_answered()
        if not self.timer.is_overdue():
            return None
        return LostEngineError(
            f"{self._name} has not answered a ping for {self._timeout:g} s (recovery.engine_stall_seconds)"
        )


class EngineReplica:
    """State machine of one engine, across the processes that it has had."""

    def __init__(self, index: int, engines: EngineProcesses, config: RunConfig) -> None:
        self.index, self._engines = index, engines
        self._stall_seconds = config.recovery.engine_stall_seconds
        self._start_seconds = config.rollout.engine.start_timeout_seconds
        self.state: State = "backoff"
        self.probe: EngineLivenessProbe | None = None
        self._start_ref: ray.ObjectRef | None = None
        self._deadline = self._lost_at = time.monotonic()
        self.has_served = self._waits_for_memory = False
        self.is_left_out = False
        """Whether the engine is not started again, although its node may be alive."""
        self._stopping: list[ray.ObjectRef] = []
        """Calls that shut down the processes of a lost engine and have not answered."""
        self._stop_deadline = 0.0

    @property
    def name(self) -> str:
        """Name of the engine in messages."""
        return self._engines.name(self.index)

    def mark_serving(self) -> float | None:
        """Move from `ready` to `serving`: the engine has the weights that it is to serve.

        Returns:
            Seconds since its loss was detected; None if it was not lost.
        """
        if self.state != "ready":
            return None
        was_lost, self.state, self.has_served = self.has_served, "serving", True
        return time.monotonic() - self._lost_at if was_lost else None

    def refs(self) -> list[ray.ObjectRef]:
        """Return the Ray references that become ready when the engine ends, has started, or has shut down."""
        if self.probe is not None:
            return [self.probe.watch]
        return self._stopping if self._start_ref is None else [self._start_ref]

    def polled_refs(self) -> list[ray.ObjectRef]:
        """Return the Ray references whose results `poll` looks for: those of `refs`, and of the ping in flight."""
        return self.refs() if self.probe is None else self.probe.refs()

    def poll(self, results: Mapping[ray.ObjectRef, Any]) -> MegarlError | None:
        """Make the state transition that is due; return why the engine is lost if it is, for `begin_restart`.

        Args:
            results: as `_ended_calls`, of `polled_refs` and perhaps others.
        """
        match self.state:
            case "serving" | "ready":
                assert self.probe is not None
                return self.probe.find_failure(results)
            case "backoff":
                self._start_if_due(results)
            case "starting":
                return self._check_start(results)
        return None

    def begin_restart(self, seconds: float) -> None:
        """Stop what is left of the lost engine; a later `poll` starts it again, after `seconds` at the earliest."""
        now = time.monotonic()
        if self.state in ("serving", "ready"):
            self._lost_at = now
        self.probe = self._start_ref = None
        self.state, self._deadline = "backoff", now + seconds
        self._stopping = [handle.stop.remote() for handle in self._engines.handles(self.index)]
        self._stop_deadline = now + STOP_TIMEOUT_SECONDS

    def _start_if_due(self, results: Collection[ray.ObjectRef]) -> None:
        if not self._has_stopped(results) or time.monotonic() < self._deadline:
            return
        if self.is_left_out or not self._engines.has_live_node(self.index):
            self.state = "gone"
            return
        self._waits_for_memory = not self._engines.may_allocate()
        self._start_ref = self._engines.start(self.index)
        self._deadline = time.monotonic() + self._start_seconds
        self.state = "starting"

    def _check_start(self, results: Mapping[ray.ObjectRef, Any]) -> MegarlError | None:
        if self._start_ref in results:
            if (error := _to_loss(results[self._start_ref], self.name)) is not None:
                return error
            self.probe = EngineLivenessProbe(self._engines.handles(self.index)[0], self.name, self._stall_seconds)
            self.state, self._start_ref = "ready", None
        elif self._waits_for_memory:
            self._waits_for_memory = not self._engines.may_allocate()
            self._deadline = time.monotonic() + self._start_seconds
        elif time.monotonic() > self._deadline:
            seconds = f"{self._start_seconds:g} s (rollout.engine.start_timeout_seconds)"
            return HungWorkerError(f"{self.name} did not start within {seconds}")
        return None

    def _has_stopped(self, results: Collection[ray.ObjectRef]) -> bool:
        """Kill what is left of the lost engine on all its nodes, once it has shut down or had the time to; no wait."""
        if not self._stopping:
            return True
        self._stopping = [ref for ref in self._stopping if ref not in results]
        now = time.monotonic()
        if self._stopping and now < self._stop_deadline:
            return False
        if self._stopping:
            self._deadline, self._stopping = max(self._deadline, now + KILL_WAIT_SECONDS), []
        for handle in self._engines.handles(self.index):
            ray.kill(handle)  # the operating system ends schedulers together with their parent
        return True


class EngineSupervisor:
    """Monitors all engines of a run and restarts the lost ones within the restart budget."""

    def __init__(self, engines: EngineProcesses, count: int, config: RunConfig, restart_budget: RestartBudget) -> None:
        self.replicas = [EngineReplica(index, engines, config) for index in range(count)]
        self.restart_budget = restart_budget
        self.restore: Callable[[*tuple[int, ...]], Sequence[int]] | None = None
        """Loads the current weights into restarted engines, and returns which of them have these now; the others wait
        for the next weights. None: engines serve the weights of the model folder."""
        self._is_closed = False

    @property
    def serving(self) -> list[int]:
        """Indices of the replicas that serve requests."""
        return [replica.index for replica in self.replicas if replica.state == "serving"]

    @property
    def ready(self) -> list[int]:
        """Indices of the replicas that can receive weights: those that serve and those that have just started."""
        return [replica.index for replica in self.replicas if replica.state in ("serving", "ready")]

    @property
    def starting(self) -> list[int]:
        """Indices of the replicas that have begun to start."""
        return [replica.index for replica in self.replicas if replica.state == "starting"]

    def start(self) -> None:
        """Begin to start all engines; returns at once."""
        self._poll(self.replicas)

    def close(self) -> None:
        """Disable restarts; from now on `poll` raises."""
        self._is_closed = True

    def wait_started(self) -> None:
        """Block until every engine has started, and mark all as serving the weights that they have loaded themselves.

        An engine that dies meanwhile is restarted, or left out if its node is lost. Raises as `poll` does.
        """
        while any(replica.state in ("backoff", "starting") for replica in self.replicas):
            self._wait_and_check()
        self.mark_serving(self.ready)

    def mark_serving(self, replicas: Sequence[int]) -> None:
        """Record that these replicas have the weights that they are to serve."""
        seconds = {index: self.replicas[index].mark_serving() for index in replicas}
        back = {index: since for index, since in seconds.items() if since is not None}
        if back:
            since = "its loss" if len(back) == 1 else "the first of these losses"
            what, verb = self._name(list(back)), "is" if len(back) == 1 else "are"
            self.restart_budget.notify(
                f"{what} {verb} serving again, {max(back.values()):.1f} s after {since} was detected"
            )

    def refs(self) -> list[ray.ObjectRef]:
        """Return the Ray references to wait for between two calls of `poll`, at most `POLL_INTERVAL_SECONDS` apart."""
        return [ref for replica in self.replicas for ref in replica.refs()]

    def poll(self) -> None:
        """Check all engines and make the transitions that are due; restarted engines receive their weights.

        Raises:
            MegarlError: an engine is lost and must not be restarted, or loading weights failed for another reason.
            RestartLimitError: `close` has been called.
        """
        self._check()
        restarted = [replica.index for replica in self.replicas if replica.state == "ready"]
        self.mark_serving(self.restore(*restarted) if restarted and self.restore is not None else restarted)

    def wait_ready(self) -> list[int]:
        """Block until at least one engine is ready; return `ready`. Raises as `poll` does."""
        while not self.ready:
            self._wait_and_check()
        return self.ready

    def _check(self) -> None:
        if self._is_closed:
            raise RestartLimitError("the engines were shut down")
        self._poll(self.replicas)
        if all(replica.state == "gone" for replica in self.replicas):
            raise LostEngineError("the nodes of all engines are lost")

    def _poll(self, replicas: Sequence[EngineReplica]) -> None:
        """Check these engines together and make the transitions that are due.

        Raises:
            MegarlError: an engine is lost and must not be restarted, or its first start failed for a reason other
                than the death of a process.
        """
        were_gone = {replica.index for replica in replicas if replica.state == "gone"}
        losses = self._find_losses(replicas)
        if losses:
            self._restart(losses | self._gather_losses([replica for replica in replicas if replica not in losses]))
        now_gone = [replica for replica in replicas if replica.state == "gone" and replica.index not in were_gone]
        gone = [replica.index for replica in now_gone if not replica.is_left_out]
        if gone:
            them = "this engine" if len(gone) == 1 else "them"
            self.restart_budget.notify(f"a node of {self._name(gone)} is lost; the run continues without {them}")

    def _find_losses(self, replicas: Sequence[EngineReplica]) -> dict[EngineReplica, MegarlError]:
        """Make all transitions of these engines but restarts; return why those that are lost are."""
        results = _ended_calls([ref for replica in replicas for ref in replica.polled_refs()])
        errors = {replica: replica.poll(results) for replica in replicas}
        return {replica: error for replica, error in errors.items() if error is not None}

    def _gather_losses(self, replicas: Sequence[EngineReplica]) -> dict[EngineReplica, MegarlError]:
        """Return which of these engines are lost within `GATHER_SECONDS`, and why."""
        deadline, losses = time.monotonic() + GATHER_SECONDS, dict[EngineReplica, MegarlError]()
        left = [replica for replica in replicas if replica.probe is not None]
        while left and (seconds := deadline - time.monotonic()) > 0:
            ray.wait([ref for replica in left for ref in replica.refs()], num_returns=1, timeout=seconds)
            losses |= self._find_losses(left)
            left = [replica for replica in left if replica not in losses]
        return losses

    def _restart(self, losses: Mapping[EngineReplica, MegarlError]) -> None:
        """Stop the engines that are lost, and start those again that have stopped at once; raises as `_poll`."""
        for replica, error in losses.items():
            if not replica.has_served and not isinstance(error, LostEngineError):
                raise error
        budget, hopeless = self.restart_budget, self._find_hopeless(losses)
        for replica, error in hopeless.items():
            replica.is_left_out = True
            replica.begin_restart(0.0)
            budget.notify(
                f"{replica.name} was lost too often for the same reason (recovery.max_identical_failures); the run "
                f"continues without this engine: {first_line(error)}"
            )
        causes = {replica.name: error for replica, error in losses.items() if replica not in hopeless}
        if causes:
            waits = budget.spend_each("engine", causes, budget.step, num_processes=len(self.replicas))
            restarting = [replica for replica in losses if replica not in hopeless]
            for replica, seconds in zip(restarting, waits, strict=True):
                replica.begin_restart(seconds)
        results = _ended_calls([ref for replica in losses for ref in replica.polled_refs()])
        for replica in losses:
            replica.poll(results)

    def _find_hopeless(self, losses: Mapping[EngineReplica, MegarlError]) -> dict[EngineReplica, MegarlError]:
        """Return the lost engines that another restart would not help, while others serve: a GPU may have failed."""
        if not any(replica.state == "serving" for replica in self.replicas if replica not in losses):
            return {}
        budget = self.restart_budget
        return {replica: error for replica, error in losses.items() if budget.is_hopeless(replica.name, error)}

    def _name(self, indices: Sequence[int]) -> str:
        names = [self.replicas[index].name for index in indices]
        return names[0] if len(names) == 1 else f"{len(names)} engines ({name_some(names)})"

    def _wait_and_check(self) -> None:
        """Wait until the state of an engine may have changed, then check all engines."""
        refs = self.refs()
        if refs:
            ray.wait(refs, num_returns=1, timeout=POLL_INTERVAL_SECONDS)
        else:
            time.sleep(POLL_INTERVAL_SECONDS / 10)
        run_abort_check(lambda: [r.name for r in self.replicas if r.state in ("backoff", "starting")])
        self._check()

    def attribute_failure(self, error: MegarlError) -> bool:
        """Return whether a lost engine explains `error`, which a call to or with the engines raised.

        The lost engines are restarted. Blocks for `GRACE_SECONDS` if none is lost, after a weight sync also until all
        have answered a ping, however many engines there are.

        Raises:
            MegarlError: a lost engine must not be restarted.
        """
        before = [self.replicas[index] for index in self.ready]
        deadline = time.monotonic() + GRACE_SECONDS
        self._poll(before)
        while before and not _any_lost(before) and (left := deadline - time.monotonic()) > 0:
            watches = [ref for replica in before for ref in replica.refs()]
            ray.wait(watches, num_returns=1, timeout=min(left, POLL_INTERVAL_SECONDS))
            self._poll(before)
        # only a weight sync times out because of an engine that hangs
        return _any_lost(before) or (isinstance(error, WeightSyncError) and self._is_any_hung(before))

    def _is_any_hung(self, replicas: Sequence[EngineReplica]) -> bool:
        """Ping these replicas, which are ready, and return whether one of them is lost before all have answered."""
        probes = [replica.probe for replica in replicas if replica.probe is not None]
        for probe in probes:
            probe.timer.ping()
        # one answer per probe is enough: `poll` pings again meanwhile
        waiting = [probe.timer.pending for probe in probes]
        while waiting and not _any_lost(replicas):
            _, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=POLL_INTERVAL_SECONDS)
            self._poll(replicas)
        return _any_lost(replicas)


def _any_lost(replicas: Sequence[EngineReplica]) -> bool:
    """Return whether one of these replicas, which were ready, is not any more."""
    return any(replica.probe is None for replica in replicas)


def _ended_calls(refs: Sequence[ray.ObjectRef]) -> dict[ray.ObjectRef, Any]:
    """Return the value, or the `RayError`, of each of these calls that has ended; no wait."""
    ended, _ = ray.wait(refs, num_returns=len(refs), timeout=0) if refs else ([], [])
    if not ended:
        return {}
    try:
        return dict(zip(ended, ray.get(ended), strict=True))
    except RayError:
        return {ref: _value_or_error(ref) for ref in ended}


def _value_or_error(ref: ray.ObjectRef) -> Any:
    try:
        return ray.get(ref)
    except RayError as error:
        return error


def _to_loss(result: Any, name: str) -> MegarlError | None:
    """Return the error that a call of `_ended_calls` has returned or raised, or None."""
    match result:
        case RayActorError():
            return LostEngineError(str(to_megarl_error(result, what="engine", name=name)))
        case RayError():
            return to_megarl_error(result, what="engine", name=name)
    error: MegarlError | None = result
    return error
