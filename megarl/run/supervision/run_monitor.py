"""Run monitoring: heartbeat file, phase timeouts, straggler detection.

Aborts phases that exceed their timeout, and records the stacks of all processes.

    controller thread      train: waits for the ranks .......................... fails
    watchdog thread                | timeout | collects all stacks, writes the file
                                             `stacks/step-000012-train.txt`

Only waits for worker processes can be aborted (`abort_check` in megarl.cluster.workers.failures). If the controller's
own thread hangs elsewhere, the user is notified and the file contains its stack, but the phase does not end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from megarl.checkpoint.run_lock import require_lock
from megarl.cluster.process.stack_dump import ProcessInfo
from megarl.cluster.workers.group import WorkerProcesses
from megarl.cluster.workers.stragglers import StragglerMonitor, collect_stacks, find_processes
from megarl.config import RunConfig
from megarl.tracking.progress import HEARTBEAT_FILE, Heartbeat

if TYPE_CHECKING:
    from ray.actor import ActorHandle
import sys
import threading
import traceback

from ray.exceptions import RayError

from megarl.cluster.process.atomic_files import atomic_write
from megarl.cluster.workers.failures import LateNames, abort_check
from megarl.errors import HungWorkerError, MegarlError

STACKS_FOLDER = "stacks"


class PhaseWatchdog:
    """Timeouts for the phases of a run. Phases may nest: while an inner one is active, the outer one cannot fail."""

    def __init__(
        self, timeout_seconds: float | None, notify: Callable[[str], None], stacks: Callable[[], str], folder: Path
    ) -> None:
        """Args:
        timeout_seconds: for each phase; None: no timeout.
        notify: shows the user a line.
        stacks: returns the stacks of all worker processes as text; called on another thread, must return in bounded
            time.
        folder: the run folder.
        """
        self._timeout, self._notify, self._stacks, self._folder = timeout_seconds, notify, stacks, folder

    @contextmanager
    def phase(self, step: int, name: str) -> Iterator[None]:
        """Limit the block to `timeout_seconds`.

        Raises:
            HungWorkerError: the block took longer; the message names the workers that have not answered.
        """
        if self._timeout is None:
            yield
            return
        late = _PhaseTimeout(f"{name} of step {step}", self._timeout, self._folder / _file_name(step, name))
        timer = threading.Timer(self._timeout, late.dump_stacks, (self._stacks, self._notify))
        timer.name, timer.daemon = "phase watchdog", True
        timer.start()
        try:
            with abort_check(late.check_abort):
                yield
        finally:
            timer.cancel()


class _PhaseTimeout:
    """What happens when one phase exceeds its timeout."""

    def __init__(self, what: str, seconds: float, path: Path) -> None:
        self._what, self._path = f"{what} took longer than {seconds:g} s", path
        self._watched = threading.get_ident()
        self._late: LateNames = list
        self._dumped, self._outcome = threading.Event(), ""

    def check_abort(self, late: LateNames) -> MegarlError | None:
        """Return the error that aborts the wait, once the stacks are on disk."""
        self._late = late
        return HungWorkerError(self._text()) if self._dumped.is_set() else None

    def dump_stacks(self, stacks: Callable[[], str], notify: Callable[[str], None]) -> None:
        """Write all stacks to the file, then let the phase fail."""
        try:
            notify(f"{self._text()}; collecting the stacks of all processes")
            self._outcome = self._write(stacks)
            notify(self._text())
        finally:
            self._dumped.set()

    def _write(self, stacks: Callable[[], str]) -> str:
        """Write the file; return the end of the error message: the path, or why the write failed."""
        try:
            found = stacks()
        except (MegarlError, RayError, OSError) as error:
            found = f"could not collect the stacks of workers: {type(error).__name__}: {error}"
        try:
            with atomic_write(self._path) as draft:
                draft.write_text(f"{self._text()}\n\n{_stack_of(self._watched)}\n{found}\n")
        except OSError as error:
            return f"; stacks could not be written: {error}"
        return f"; stacks: {self._path}"

    def _text(self) -> str:
        late = self._late()
        unanswered = f"; no answer from {', '.join(late)}" if late else ""
        return f"{self._what}{unanswered}{self._outcome}"


def _file_name(step: int, name: str) -> str:
    return f"{STACKS_FOLDER}/step-{step:06d}-{name}.txt"


def _stack_of(thread: int) -> str:
    """Return the current stack of a thread of this process, innermost call last."""
    frame = sys._current_frames().get(thread)
    lines = traceback.format_stack(frame) if frame is not None else ["the thread has ended\n"]
    return "== controller, innermost call last ==\n" + "".join(lines)


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
        self._phase_watchdog = PhaseWatchdog(seconds, notify, self.collect_stacks, folder)
        if seconds is not None:
            seconds += config.placement.start_timeout_seconds + config.rollout.engine.start_timeout_seconds
        self._start_watchdog = PhaseWatchdog(seconds, notify, self.collect_stacks, folder)
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

    def collect_stacks(self) -> str:
        """Return the stacks of all processes as text, after locating those that were replaced."""
        self._locate_actors()
        return collect_stacks(self._processes)
