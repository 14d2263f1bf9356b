"""Run monitoring: heartbeat file, phase timeouts, straggler detection."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from megarl.checkpoint.run_lock import require_lock
from megarl.config import RunConfig
from megarl.process.stack_dump import ProcessInfo
from megarl.supervision.phase_watchdog import PhaseWatchdog
from megarl.tracking.heartbeat import HEARTBEAT_FILE, Heartbeat
from megarl.workers.group import WorkerProcesses
from megarl.workers.stack_collector import collect_stacks, find_processes
from megarl.workers.stragglers import StragglerMonitor

if TYPE_CHECKING:
    from ray.actor import ActorHandle

LOCATE_TIMEOUT_SECONDS = 10.0
"""Time allowed for all processes to report their hosts and pids."""


class RunMonitor:
    """Monitors one run through all restarts of its processes."""

    def __init__(self, config: RunConfig, notify: Callable[[str], None]) -> None:
        """`notify`: shows the user a line."""
        folder = Path(config.run_dir)
        folder.mkdir(parents=True, exist_ok=True)
        self.heartbeat = Heartbeat(
            folder / HEARTBEAT_FILE,
            steps=config.trainer.steps,
            notify=notify,
            require_lock=partial(require_lock, config.run_dir),
        )
        self._notify = notify
        seconds = config.recovery.phase_timeout_seconds
        self._phase_watchdog = PhaseWatchdog(seconds, notify, self._stacks, folder)
        if seconds is not None:
            seconds += config.placement.start_timeout_seconds + config.rollout.engine.start_timeout_seconds
        self._start_watchdog = PhaseWatchdog(seconds, notify, self._stacks, folder)
        self._trainer: WorkerProcesses | None = None
        self._stragglers: StragglerMonitor | None = None
        self._actors: Callable[[], Mapping[str, ActorHandle]] = dict
        self._located: dict[str, ActorHandle] = {}
        """Actors whose entry in `_processes` is current."""
        self._processes: dict[str, ProcessInfo] = {}

    @contextmanager
    def start(self, step: int) -> Iterator[None]:
        """Monitor the block as the start of the run's processes before this step; raises as `phase` does.

        The timeout is that of a phase plus the start timeouts of trainer ranks and engines.
        """
        with self._start_watchdog.phase(step, "start"):
            yield

    def watch(self, trainer: WorkerProcesses, actors: Callable[[], Mapping[str, ActorHandle]]) -> None:
        """Monitor these processes from now on; the trainer must have started and be idle.

        Args:
            actors: returns the other Ray actors of the run as they are now, by their names in messages.
        """
        self._trainer = trainer
        processes = trainer.processes()
        self._stragglers = StragglerMonitor([info.host for info in processes.values()], self._notify)
        self._processes, self._actors, self._located = dict(processes), actors, {}
        self._locate_actors()

    def _locate_actors(self) -> None:
        """Query the host and pid of the actors that are new or have been replaced since the last call, all at once."""
        new = {name: actor for name, actor in self._actors().items() if self._located.get(name) is not actor}
        for name in new:
            self._processes.pop(name, None)
        # an actor that is lost at this moment is replaced when it is needed next
        found = find_processes(new, LOCATE_TIMEOUT_SECONDS)
        self._processes |= found
        self._located |= {name: new[name] for name in found}

    @contextmanager
    def phase(self, step: int, name: str, *, waiting: bool) -> Iterator[None]:
        """Monitor the block as phase `name` of the step; `waiting`: the controller waits for other processes in it.

        Raises:
            HungWorkerError: a phase with `waiting` exceeded its timeout; the message names who has not answered.
        """
        self.heartbeat.phase(step, name)
        with self._phase_watchdog.phase(step, name) if waiting else nullcontext():
            yield

    def record_step(self, seconds: float) -> dict[str, float]:
        """Record that a step has ended and return its straggler metrics; the trainer's ranks must be idle."""
        self.heartbeat.finished_step(seconds)
        if self._trainer is None or self._stragglers is None:
            return {}
        return self._stragglers.step(self._trainer.pop_call_records())

    def close(self, kind: type[BaseException] | None, *_: object) -> None:
        """Write the last heartbeat, `ended` or `failed`; has the signature of `__exit__`, for `ExitStack.push`."""
        self.heartbeat.close("ended" if kind is None else "failed")

    def _stacks(self) -> str:
        self._locate_actors()
        return collect_stacks(self._processes)
