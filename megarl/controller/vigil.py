"""What watches over a run: signs of life for outside monitors, how long phases take, who holds the others up."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

from megarl.config import RunConfig
from megarl.controller.watchdog import PhaseWatch
from megarl.errors import WorkerError
from megarl.placement.grid import RankGrid
from megarl.tracking.heartbeat import HEARTBEAT_FILE, Heartbeat
from megarl.workers.group import WorkerProcesses
from megarl.workers.process_stacks import ProcessPlace
from megarl.workers.stacks import ask_places, collect_stacks
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
        self._phases = PhaseWatch(config.recovery.phase_timeout_seconds, say, self._stacks, folder)
        self._trainer: WorkerProcesses | None = None
        self._stragglers: StragglerWatch | None = None
        self._places: dict[str, ProcessPlace] = {}

    def follow(self, trainer: WorkerProcesses, grid: RankGrid, others: Mapping[str, Any]) -> None:
        """Watch these from now on, which are up and idle.

        Args:
            others: Ray actors, by their names for people.
        """
        self._trainer = trainer
        places = trainer.places()
        stages = [grid.coordinates(rank).pp for rank in range(grid.size)]
        self._stragglers = StragglerWatch([place.host for place in places.values()], self._say, stages=stages)
        self._places = dict(places)
        for name, actor in others.items():
            # one that is lost just now is replaced by whoever needs it next
            with suppress(WorkerError):
                self._places |= ask_places({name: actor}, timeout=ANSWER_SECONDS)

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
        return collect_stacks(self._places)
