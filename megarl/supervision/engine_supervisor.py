"""Detects dead or hung rollout engines and restarts them with backoff.

                watch raises, or no ping answered for recovery.engine_stall_seconds
    serving ------------------------------------------------------------> backoff
       ^                                                                     |
       | weights loaded                                                      v
       '------------------------- ready <-------------------------------- starting

The supervisor has no thread of its own: whoever waits for engines calls `poll` meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal, Protocol

import ray
from ray.exceptions import RayActorError, RayError

from megarl.config import RunConfig
from megarl.errors import HungWorkerError, LostEngineError, MegarlError, RestartLimitError, WeightSyncError
from megarl.supervision.liveness_probe import POLL_INTERVAL_SECONDS, PingTimer
from megarl.supervision.restart_budget import RestartBudget
from megarl.workers.failures import run_abort_check, to_megarl_error

GRACE_SECONDS = 2.0
"""Time allowed for Ray to report an engine's death after a call to it has failed."""

STOP_TIMEOUT_SECONDS = 3.0
"""Time allowed for a lost engine to shut down what is left of it gracefully."""

KILL_WAIT_SECONDS = 6.0
"""How long Ray takes to kill a process that does not answer, plus a margin of one second."""

State = Literal["serving", "backoff", "starting", "ready", "gone"]
"""State of a replica. `ready`: started, but without the current weights. `gone`: its node is lost."""


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

    def find_failure(self, grace_seconds: float = 0.0) -> MegarlError | None:
        """Return why the engine is lost, or None if it is alive as far as is known."""
        ended, _ = ray.wait(self.refs(), num_returns=1, timeout=grace_seconds)
        for ref in ended:
            if (error := _get_error(ref, self._name)) is not None:
                return error
            self.timer.mark_answered()
        if not self.timer.is_overdue():
            return None
        return LostEngineError(
            f"{self._name} has not answered a ping for {self._timeout:g} s (recovery.engine_stall_seconds)"
        )


class EngineReplica:
    """State machine of one engine, across the processes that it has had."""

    def __init__(self, index: int, engines: EngineProcesses, config: RunConfig, restart_budget: RestartBudget) -> None:
        self.index, self._engines = index, engines
        self._stall_seconds = config.recovery.engine_stall_seconds
        self._start_seconds = config.rollout.engine.start_timeout_seconds
        self.restart_budget = restart_budget
        self.state: State = "backoff"
        self.probe: EngineLivenessProbe | None = None
        self._start_ref: ray.ObjectRef | None = None
        self._deadline = self._lost_at = time.monotonic()
        self._has_served = self._waits_for_memory = False
        self._stopping: list[ray.ObjectRef] = []
        """Calls that shut down the processes of a lost engine and have not answered."""
        self._stop_deadline = 0.0

    @property
    def name(self) -> str:
        """Name of the engine in messages."""
        return self._engines.name(self.index)

    def mark_serving(self) -> None:
        """Move from `ready` to `serving`: the engine has the weights that it is to serve."""
        if self.state == "ready" and self._has_served:
            seconds = time.monotonic() - self._lost_at
            self.restart_budget.notify(f"{self.name} is serving again, {seconds:.1f} s after its loss was detected")
        if self.state == "ready":
            self.state, self._has_served = "serving", True

    def refs(self) -> list[ray.ObjectRef]:
        """Return the Ray references that become ready when the engine ends, has started, or has shut down."""
        if self.probe is not None:
            return [self.probe.watch]
        return self._stopping if self._start_ref is None else [self._start_ref]

    def poll(self, grace_seconds: float = 0.0) -> None:
        """Check the engine and make the state transition that is due.

        Raises:
            MegarlError: the engine is lost and must not be restarted, or its first start failed for a reason other
                than the death of a process.
        """
        match self.state:
            case "serving" | "ready":
                assert self.probe is not None
                if (error := self.probe.find_failure(grace_seconds)) is not None:
                    self._handle_loss(error)
            case "backoff":
                self._start_if_due()
            case "starting":
                self._check_start()

    def _start_if_due(self) -> None:
        if not self._has_stopped() or time.monotonic() < self._deadline:
            return
        if not self._engines.has_live_node(self.index):
            self.state = "gone"
            self.restart_budget.notify(f"a node of {self.name} is lost; the run continues without this engine")
            return
        self._waits_for_memory = not self._engines.may_allocate()
        self._start_ref = self._engines.start(self.index)
        self._deadline = time.monotonic() + self._start_seconds
        self.state = "starting"

    def _check_start(self) -> None:
        done, _ = ray.wait([self._start_ref], timeout=0)
        if done and (error := _get_error(self._start_ref, self.name)) is not None:
            self._handle_loss(error)
        elif done:
            self._attach_probe()
            self.state = "ready"
        elif self._waits_for_memory:
            self._waits_for_memory = not self._engines.may_allocate()
            self._deadline = time.monotonic() + self._start_seconds
        elif time.monotonic() > self._deadline:
            seconds = f"{self._start_seconds:g} s (rollout.engine.start_timeout_seconds)"
            self._handle_loss(HungWorkerError(f"{self.name} did not start within {seconds}"))

    def _attach_probe(self) -> None:
        self.probe = EngineLivenessProbe(self._engines.handles(self.index)[0], self.name, self._stall_seconds)
        self._start_ref = None

    def _handle_loss(self, error: MegarlError) -> None:
        if not self._has_served and not isinstance(error, LostEngineError):
            raise error
        if self.state in ("serving", "ready"):
            self._lost_at = time.monotonic()
        seconds = self.restart_budget.spend("engine", error, self.restart_budget.step, worker=self.name)
        self.probe = self._start_ref = None
        self.state, self._deadline = "backoff", time.monotonic() + seconds
        self._stopping = [handle.stop.remote() for handle in self._engines.handles(self.index)]
        self._stop_deadline = time.monotonic() + STOP_TIMEOUT_SECONDS
        self._start_if_due()

    def _has_stopped(self) -> bool:
        """Kill what is left of the lost engine on all its nodes, once it has shut down or had the time to; no wait."""
        if not self._stopping:
            return True
        _, self._stopping = ray.wait(self._stopping, num_returns=len(self._stopping), timeout=0)
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
        self.replicas = [EngineReplica(index, engines, config, restart_budget) for index in range(count)]
        self.resync: Callable[[int], None] | None = None
        """Loads the current weights into a restarted engine; None: engines serve the weights of the model folder."""
        self._is_closed = False

    @property
    def restart_budget(self) -> RestartBudget:
        """The restart budget that all replicas share."""
        return self.replicas[0].restart_budget

    @restart_budget.setter
    def restart_budget(self, restart_budget: RestartBudget) -> None:
        for replica in self.replicas:
            replica.restart_budget = restart_budget

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
        for replica in self.replicas:
            replica.poll()

    def close(self) -> None:
        """Disable restarts; from now on `poll` raises."""
        self._is_closed = True

    def wait_started(self) -> None:
        """Block until every engine has started, and mark all as serving the weights that they have loaded themselves.

        An engine that dies meanwhile is restarted. Raises as `poll` does.
        """
        while len(self.ready) < len(self.replicas):
            self._wait_and_check()
        self.mark_serving(self.ready)

    def mark_serving(self, replicas: Sequence[int]) -> None:
        """Record that these replicas have the weights that they are to serve."""
        for index in replicas:
            self.replicas[index].mark_serving()

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
        for replica in self.replicas:
            if replica.state == "ready":
                if self.resync is not None:
                    self.resync(replica.index)
                replica.mark_serving()

    def wait_ready(self) -> list[int]:
        """Block until at least one engine is ready; return `ready`. Raises as `poll` does."""
        while not self.ready:
            self._wait_and_check()
        return self.ready

    def _check(self) -> None:
        if self._is_closed:
            raise RestartLimitError("the engines were shut down")
        for replica in self.replicas:
            replica.poll()
        if all(replica.state == "gone" for replica in self.replicas):
            raise LostEngineError("the nodes of all engines are lost")

    def _wait_and_check(self) -> None:
        """Wait until the state of an engine may have changed, then check all engines."""
        refs = self.refs()
        if refs:
            ray.wait(refs, num_returns=1, timeout=POLL_INTERVAL_SECONDS)
        else:
            time.sleep(POLL_INTERVAL_SECONDS / 10)
        run_abort_check([replica.name for replica in self.replicas if replica.state in ("backoff", "starting")])
        self._check()

    def attribute_failure(self, error: MegarlError) -> bool:
        """Return whether a lost engine explains `error`, which a call to or with the engines raised.

        The lost engine is restarted.

        Raises:
            MegarlError: the lost engine must not be restarted.
        """
        before = self.ready
        deadline = time.monotonic() + GRACE_SECONDS
        while self.ready == before and time.monotonic() < deadline:
            for index in before:
                self.replicas[index].poll(grace_seconds=0.1)
        if self.ready != before:
            return True
        # only a weight sync times out because of an engine that hangs
        return isinstance(error, WeightSyncError) and self._is_any_hung(before)

    def _is_any_hung(self, before: Sequence[int]) -> bool:
        """Ping these replicas and return whether one of them is lost before all have answered."""
        probes = [probe for index in before if (probe := self.replicas[index].probe) is not None]
        for probe in probes:
            probe.timer.ping()
        while self.ready == before and probes:
            for index in before:
                self.replicas[index].poll(grace_seconds=0.1)
            # one answer per probe is enough: `poll` pings again meanwhile
            probes = [probe for probe in probes if probe.timer.pending is not None]
        return self.ready != before


def _get_error(ref: ray.ObjectRef, name: str) -> MegarlError | None:
    """Return the error that the finished call `ref` has returned or raised, or None."""
    try:
        found: MegarlError | None = ray.get(ref)
    except RayActorError as error:
        return LostEngineError(str(to_megarl_error(error, what="engine", name=name)))
    except RayError as error:
        return to_megarl_error(error, what="engine", name=name)
    return found
