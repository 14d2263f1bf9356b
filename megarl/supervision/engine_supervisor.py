"""Sees to it that a run's engines live, and starts those anew that have died or stand still.

                watch raises, or no beat for recovery.engine_stall_seconds
    serving ------------------------------------------------------------> waiting (back-off)
       ^                                                                     |
       | weights given                                                       v
       '-------------------------- up <--------------------------------- starting

It does nothing by itself: whoever waits for engines calls `tend` meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

import ray
from ray.exceptions import RayActorError, RayError

from megarl.config import RunConfig
from megarl.errors import GivenUpError, LostEngineError, MegarlError, WeightSyncError, WorkerError
from megarl.supervision.restart_budget import Restarts
from megarl.workers.failures import check_deadline, translate

LOOK_SECONDS = 1.0
"""How often it is looked whether an engine is late."""

GRACE_SECONDS = 2.0
"""How long the end of an engine may take to be known after what it has caused."""

STOP_SECONDS = 3.0
"""How long a lost engine may take to end what is left of it in order."""

KILLED_SECONDS = 6.0
"""How long Ray takes to end a process that does not answer, and a second."""

State = Literal["serving", "waiting", "starting", "up", "gone"]
"""`gone`: with its machine."""


class Startable(Protocol):
    """The engines' processes."""

    def name(self, replica: int) -> str:
        """For people."""
        ...

    def handle(self, replica: int) -> Any:
        """The Ray actor, an AsyncShell."""
        ...

    def has_machine(self, replica: int) -> bool:
        """Whether the machine of its slots is there."""
        ...

    def start(self, replica: int) -> Any:
        """Put a new process in the place of an engine's; a reference that is ready once it is up, or has failed."""
        ...


class Pulse:
    """The signs of life of one engine: a call that ends when it does, and calls that end soon."""

    def __init__(self, handle: Any, name: str, stall_seconds: float) -> None:
        self._handle, self._name, self._limit = handle, name, stall_seconds
        self._pause = min(stall_seconds / 4, 5.0)
        self.watch = handle.invoke.remote("watch")
        self._looked = self._answered = time.monotonic()
        self._silent = 0.0
        self._beat: Any = None

    def refs(self) -> list[Any]:
        """What tells of its end."""
        return [self.watch] if self._beat is None else [self.watch, self._beat]

    def failure(self, grace_seconds: float = 0.0) -> MegarlError | None:
        """Why it is lost; None: it lives, as far as is known.

        Only time counts in which it was looked.
        """
        now = time.monotonic()
        since, self._looked = now - self._looked, now
        ended, _ = ray.wait(self.refs(), num_returns=1, timeout=grace_seconds)
        for ref in ended:
            if (error := _error_of(ref, self._name)) is not None:
                return error
            self._beat, self._answered, self._silent = None, now, 0.0
        if self._beat is None:
            if now - self._answered >= self._pause:
                self._beat = self._handle.invoke.remote("beat")
            return None
        self._silent += min(since, 2 * LOOK_SECONDS)
        if self._silent <= self._limit:
            return None
        return LostEngineError(
            f"{self._name} has given no sign of life for {self._limit:g} s (recovery.engine_stall_seconds)"
        )

    def ask(self) -> None:
        """Have it give a sign of life now."""
        self._silent, self._looked = 0.0, time.monotonic()
        if self._beat is None:
            self._beat = self._handle.invoke.remote("beat")

    @property
    def is_asked(self) -> bool:
        """It has been asked for a sign of life, and has given none yet."""
        return self._beat is not None


class Replica:
    """One engine, whichever process it is."""

    def __init__(self, number: int, engines: Startable, config: RunConfig, restarts: Restarts) -> None:
        self.number, self._engines = number, engines
        self._stall_seconds = config.recovery.engine_stall_seconds
        self._start_seconds = config.rollout.engine.start_timeout_seconds
        self.restarts = restarts
        self.state: State = "waiting"
        self.pulse: Pulse | None = None
        self._starting: Any = None
        self._until = self._lost_at = time.monotonic()
        self._was_up = False

    @property
    def name(self) -> str:
        """For people."""
        return self._engines.name(self.number)

    def served(self) -> None:
        """It has the weights that it is to serve."""
        if self.state == "up" and self._was_up:
            seconds = time.monotonic() - self._lost_at
            self.restarts.say(f"{self.name} serves again, {seconds:.1f} s after it was found lost")
        if self.state == "up":
            self.state, self._was_up = "serving", True

    def refs(self) -> list[Any]:
        """What is worth waiting for."""
        return self.pulse.refs() if self.pulse is not None else [] if self._starting is None else [self._starting]

    def tend(self, grace_seconds: float = 0.0) -> None:
        """Look at it, and do what is due.

        Raises:
            MegarlError: it is lost, and may not be restarted; or it did not come up for the first time, other than by
                the death of a process.
        """
        match self.state:
            case "serving" | "up":
                assert self.pulse is not None
                if (error := self.pulse.failure(grace_seconds)) is not None:
                    self._lose(error)
            case "waiting":
                self._start_if_due()
            case "starting":
                self._look_at_start()

    def _start_if_due(self) -> None:
        if time.monotonic() < self._until:
            return
        if not self._engines.has_machine(self.number):
            self.state = "gone"
            self.restarts.say(f"the machine of {self.name} is lost; the run goes on without this engine")
            return
        self._starting = self._engines.start(self.number)
        self._until = time.monotonic() + self._start_seconds
        self.state = "starting"

    def _look_at_start(self) -> None:
        done, _ = ray.wait([self._starting], timeout=0)
        if done and (error := _error_of(self._starting, self.name)) is not None:
            self._lose(error)
        elif done:
            self._listen()
            self.state = "up"
        elif time.monotonic() > self._until:
            seconds = f"{self._start_seconds:g} s (rollout.engine.start_timeout_seconds)"
            self._lose(WorkerError(f"{self.name} was not up after {seconds}"))

    def _listen(self) -> None:
        self.pulse = Pulse(self._engines.handle(self.number), self.name, self._stall_seconds)
        self._starting = None

    def _lose(self, error: MegarlError) -> None:
        if not self._was_up and not isinstance(error, LostEngineError):
            raise error
        if self.state in ("serving", "up"):
            self._lost_at = time.monotonic()
        seconds = self.restarts.take("engine", error, self.restarts.step, who=self.name)
        self.pulse = self._starting = None
        self.state, self._until = "waiting", time.monotonic() + max(seconds, self._end())
        self._start_if_due()

    def _end(self) -> float:
        """End what is left of its process, and of the schedulers below it; how long that takes yet."""
        handle = self._engines.handle(self.number)
        stopping = handle.stop.remote()
        answered, _ = ray.wait([stopping], timeout=STOP_SECONDS)
        ray.kill(handle)  # the system ends schedulers together with their parent
        return 0.0 if answered else KILLED_SECONDS


class Supervision:
    """Of all engines."""

    def __init__(self, engines: Startable, count: int, config: RunConfig, restarts: Restarts) -> None:
        self.replicas = [Replica(number, engines, config, restarts) for number in range(count)]
        self.restore: Callable[[int], None] | None = None
        """Gives an engine that is up anew the weights that the others serve. None: it serves the model's folder."""
        self._is_over = False

    @property
    def restarts(self) -> Restarts:
        """The budget."""
        return self.replicas[0].restarts

    @restarts.setter
    def restarts(self, restarts: Restarts) -> None:
        for replica in self.replicas:
            replica.restarts = restarts

    @property
    def serving(self) -> list[int]:
        """Replicas that serve."""
        return [replica.number for replica in self.replicas if replica.state == "serving"]

    @property
    def up(self) -> list[int]:
        """Replicas that can be given weights."""
        return [replica.number for replica in self.replicas if replica.state in ("serving", "up")]

    def start(self) -> None:
        """Begin to start all of them."""
        for replica in self.replicas:
            replica.tend()

    def end(self) -> None:
        """Restart none from now on."""
        self._is_over = True

    def wait_started(self) -> None:
        """Block until all are up for the first time, and serve what they have loaded by themselves; raises as `tend`.

        One that dies meanwhile is started anew.
        """
        while len(self.up) < len(self.replicas):
            self._pause()
        self.served(self.up)

    def served(self, replicas: Sequence[int]) -> None:
        """These have the weights that they are to serve."""
        for number in replicas:
            self.replicas[number].served()

    def refs(self) -> list[Any]:
        """What is worth waiting for between two calls of `tend`, which may be `LOOK_SECONDS` apart."""
        return [ref for replica in self.replicas for ref in replica.refs()]

    def tend(self) -> None:
        """Look at all engines, and do what is due; an engine that is up again gets its weights.

        Raises:
            MegarlError: one is lost, and may not be restarted; or weights could not be given for another reason.
            GivenUpError: after `end`.
        """
        self._look()
        for replica in self.replicas:
            if replica.state == "up":
                if self.restore is not None:
                    self.restore(replica.number)
                replica.served()

    def wait_up(self) -> list[int]:
        """`up`, once it is not empty; raises as `tend` does."""
        while not self.up:
            self._pause()
        return self.up

    def _look(self) -> None:
        if self._is_over:
            raise GivenUpError("the engines were shut down")
        for replica in self.replicas:
            replica.tend()
        if all(replica.state == "gone" for replica in self.replicas):
            raise WorkerError("the machines of all engines are lost")

    def _pause(self) -> None:
        """Look at the engines, after a while in which something may happen to them."""
        refs = self.refs()
        if refs:
            ray.wait(refs, num_returns=1, timeout=LOOK_SECONDS)
        else:
            time.sleep(LOOK_SECONDS / 10)
        check_deadline([replica.name for replica in self.replicas if replica.state in ("waiting", "starting")])
        self._look()

    def blame(self, error: MegarlError) -> bool:
        """Whether an engine is lost that was up when a call to it, or with it, ended in `error`; it is restarted.

        Raises:
            MegarlError: it may not be restarted.
        """
        before = self.up
        deadline = time.monotonic() + GRACE_SECONDS
        while self.up == before and time.monotonic() < deadline:
            for number in before:
                self.replicas[number].tend(grace_seconds=0.1)
        if self.up != before:
            return True
        # only a sync waits in vain for an engine that stands still
        return isinstance(error, WeightSyncError) and self._blame_silent(before)

    def _blame_silent(self, before: Sequence[int]) -> bool:
        pulses = [pulse for number in before if (pulse := self.replicas[number].pulse) is not None]
        for pulse in pulses:
            pulse.ask()
        while self.up == before and pulses:
            for number in before:
                self.replicas[number].tend(grace_seconds=0.1)
            pulses = [pulse for pulse in pulses if pulse.is_asked]  # once is enough: they are asked again meanwhile
        return self.up != before


def _error_of(ref: Any, name: str) -> MegarlError | None:
    """What the finished `ref` has found, or has failed with."""
    try:
        found: MegarlError | None = ray.get(ref)
    except RayActorError as error:
        return LostEngineError(str(translate(error, what="engine", name=name)))
    except RayError as error:
        return translate(error, what="engine", name=name)
    return found
