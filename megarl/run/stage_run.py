"""What a training stage has at hand: its clock, its books, and the checkpoints that it can go on from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path

from megarl.config import StageConfig
from megarl.data.sampler import PromptSampler
from megarl.errors import StoppedEarly
from megarl.groups.trainer_group import TrainerGroup
from megarl.run.checkpointer import Checkpointer
from megarl.run.events import EventLog, Note, Phase
from megarl.run.run_state import RunState, position
from megarl.supervision.run_monitor import Vigil
from megarl.tracking.phases import PhaseTimer
from megarl.tracking.progress import StepLine
from megarl.tracking.tracker import Tracker

ROWS = "prompts"
"""What a saved state calls the data that batches are taken from, whatever its rows are."""


class StageRun:
    """Takes batches of rows, times phases, tells the driver about them, writes metrics, and saves itself."""

    def __init__(
        self,
        config: StageConfig,
        events: EventLog,
        timer: PhaseTimer,
        *,
        num_rows: int,
        checkpoints: Checkpointer | None = None,
        resumed: RunState | None = None,
        vigil: Vigil | None = None,
    ) -> None:
        """Args:
        timer: the stage's own, which has measured its start.
        num_rows: of the data.
        checkpoints: where the run is saved.
        resumed: what it goes on from.
        vigil: watches over the stage.
        """
        self.timer, self.vigil = timer, vigil
        self._events, self._stage = events, config
        self._ends_early = False
        self._checkpoints, self._resumed = checkpoints, resumed or RunState()
        self.step = self._resumed.step
        self._sampler = PromptSampler(num_rows, config.seed, config.data.shuffle)
        if ROWS in self._resumed.samplers:
            self._sampler.restore(self._resumed.samplers[ROWS])
        self._books = self._resumed.books.by(timer)
        timer.resume(self._resumed.books.seconds, self._resumed.books.seconds_by_phase)
        metrics = None if resumed is None else position(resumed)
        self._tracker = Tracker(config.tracking, Path(config.run_dir), resumed=metrics)

    @contextmanager
    def phase(self, name: str, *, waiting: bool = True) -> Iterator[None]:
        """Measure the block; `waiting`: other processes do the work meanwhile."""
        self._events.add(Phase(self.step, name))
        watched = nullcontext() if self.vigil is None else self.vigil.phase(self.step, name, waiting=waiting)
        with self.timer.phase(name, waiting=waiting), watched:
            yield

    def state(self) -> RunState:
        """What decides the run's future beside its models; between two steps."""
        return RunState(
            step=self.step,
            samplers={ROWS: self._sampler.state()},
            metrics_bytes=self._tracker.num_bytes,
            books=self._books.by(self.timer),
        )

    def save(self) -> None:
        """Have a checkpoint of the last step, where they are kept; one that could not be written is told."""
        if self._checkpoints is None or self.step == self._resumed.step:
            return
        if self._checkpoints.last_step != self.step:
            self.begin_save(self._checkpoints)
            self._checkpoints.add_state(self.state)
        with self.phase("checkpoint"):
            self._checkpoints.finish()

    def begin_save(self, checkpoints: Checkpointer) -> dict[str, float]:
        """Have the models save what they are after this step; metrics."""
        with self.phase("checkpoint"):
            return checkpoints.begin(self.step)

    def ends_early(self) -> bool:
        """Whether to end here, before the next step, as the driver has asked for; loops ask between two steps."""
        self._ends_early = self._ends_early or self._events.ends_early()
        return self._ends_early

    def export(self, trainer: TrainerGroup) -> None:
        """Write the trainer's model, if it has had a step."""
        if self.step > 0:
            with self.phase("export"):
                trainer.save_hf(self._stage.export_path)

    def require_whole(self) -> None:
        """Return if the run has gone to its last step.

        Raises:
            StoppedEarly: it has ended before, as it was asked to.
        """
        if not self._ends_early:
            return
        asked = self._events.asked_by or "SIGUSR1"  # torchrun's ranks may hear of it from each other
        if self.step == 0:
            raise StoppedEarly(f"stopped before its first step of {self._stage.trainer.steps}, as {asked} asked")
        raise StoppedEarly(
            f"stopped after step {self.step} of {self._stage.trainer.steps}, as {asked} asked; the model as it is: "
            f"{self._stage.export_path}"
        )

    def say(self, text: str) -> None:
        """Show the user a line."""
        self._events.add(Note(text))

    def log(self, metrics: Mapping[str, float], line: StepLine | None = None) -> None:
        """Write the step's metrics, and show `line`."""
        self._tracker.log(metrics, step=self.step)
        if line is not None:
            self._events.add(line)

    def close(self) -> None:
        """Flush and close what metrics are written to."""
        self._tracker.close()
