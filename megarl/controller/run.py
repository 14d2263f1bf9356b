"""What a training stage has at hand: its groups, its data, its clock and its books."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path

from megarl.config import StageConfig
from megarl.controller.events import EventLog, Note, Phase
from megarl.controller.trainer_group import TrainerGroup
from megarl.controller.vigil import Vigil
from megarl.errors import StoppedEarly
from megarl.tracking.phases import PhaseTimer
from megarl.tracking.progress import StepLine
from megarl.tracking.tracker import ResumedMetrics, Tracker


class StageRun:
    """Times phases, tells the driver about them, and writes metrics."""

    def __init__(
        self,
        config: StageConfig,
        events: EventLog,
        timer: PhaseTimer,
        *,
        resumed: ResumedMetrics | None = None,
        vigil: Vigil | None = None,
    ) -> None:
        """Args:
        timer: the stage's own, which has measured its start.
        resumed: where metrics go on.
        vigil: watches over the stage.
        """
        self.timer, self.vigil = timer, vigil
        self.step = 0
        self._events, self._stage = events, config
        self._ends_early = False
        self._tracker = Tracker(config.tracking, Path(config.run_dir), resumed=resumed)

    @contextmanager
    def phase(self, name: str, *, waiting: bool = True) -> Iterator[None]:
        """Measure the block; `waiting`: other processes do the work meanwhile."""
        self._events.add(Phase(self.step, name))
        watched = nullcontext() if self.vigil is None else self.vigil.phase(self.step, name, waiting=waiting)
        with self.timer.phase(name, waiting=waiting), watched:
            yield

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
