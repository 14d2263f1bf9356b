"""What watches over a run: signs of life for outside monitors, how long phases take, who holds the others up."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

from megarl.config import RunConfig
from megarl.errors import WorkerError
from megarl.placement.rank_grid import RankGrid
from megarl.process.stack_dump import ProcessPlace
from megarl.supervision.phase_watchdog import PhaseWatch
from megarl.tracking.heartbeat import HEARTBEAT_FILE, Heartbeat
from megarl.workers.group import WorkerProcesses
from megarl.workers.stack_collector import ask_places, collect_stacks
from megarl.workers.stragglers import StragglerWatch

ANSWER_SECONDS = 10.0
"""How long a process may take to say where it is."""


class Vigil:
    """Of one run, through all restarts of its processes."""

    def __init__(self, config: RunConfig, say: Callable[[str], None]) -> None:
        """`say`: shows the user a line."""
        folder = Path(config.run_dir)
        folder.mkdir(parents=True, exist_ok=True)
        self.heartbeat = Heartbeat(folder / HEARTBEAT_FILE, steps=config.trainer.steps, say=say)
        self._say = say
        seconds = config.recovery.phase_timeout_seconds
        self._phases = PhaseWatch(seconds, say, self._stacks, folder)
        if seconds is not None:
            seconds += config.placement.start_timeout_seconds + config.rollout.engine.start_timeout_seconds
        self._starts = PhaseWatch(seconds, say, self._stacks, folder)
        self._trainer: WorkerProcesses | None = None
        self._stragglers: StragglerWatch | None = None
        self._others: Callable[[], Mapping[str, Any]] = dict
        self._asked: dict[str, Any] = {}
        """Those of the others that have said where they are."""
        self._places: dict[str, ProcessPlace] = {}

    @contextmanager
    def start(self, step: int) -> Iterator[None]:
        """In the block a run's processes start, for this step, and load; raises as `phase` does.

        That may take as long as a phase, beside what processes have to come up.
        """
        with self._starts.phase(step, "start"):
            yield

    def follow(self, trainer: WorkerProcesses, grid: RankGrid, others: Callable[[], Mapping[str, Any]]) -> None:
        """Watch these from now on, which are up and idle.

        Args:
            others: Ray actors as they are now, by their names for people.
        """
        self._trainer = trainer
        places = trainer.places()
        stages = [grid.coordinates(rank).pp for rank in range(grid.size)]
        self._stragglers = StragglerWatch([place.host for place in places.values()], self._say, stages=stages)
        self._places, self._others, self._asked = dict(places), others, {}
        self._find_others()

    def _find_others(self) -> None:
        """Ask those where they are that have not said so: processes that have been replaced are others."""
        for name, actor in self._others().items():
            if self._asked.get(name) is actor:
                continue
            self._places.pop(name, None)
            # one that is lost just now is replaced by whoever needs it next
            with suppress(WorkerError):
                self._places |= ask_places({name: actor}, timeout=ANSWER_SECONDS)
                self._asked[name] = actor

    @contextmanager
    def phase(self, step: int, name: str, *, waiting: bool) -> Iterator[None]:
        """The block is phase `name` of the step; `waiting`: other processes do the work meanwhile.

        Raises:
            WorkerError: they took too long; names who has not answered.
        """
        self.heartbeat.phase(step, name)
        with self._phases.phase(step, name) if waiting else nullcontext():
            yield

    def finished_step(self, seconds: float) -> dict[str, float]:
        """Metrics of the step that is over, in which the trainer's ranks are idle again."""
        self.heartbeat.finished_step(seconds)
        if self._trainer is None or self._stragglers is None:
            return {}
        return self._stragglers.step(self._trainer.take_calls())

    def ended(self, kind: type[BaseException] | None, *_: object) -> None:
        """Write the last sign of life; for `ExitStack.push`."""
        self.heartbeat.close("ended" if kind is None else "failed")

    def _stacks(self) -> str:
        self._find_others()
        return collect_stacks(self._places)
