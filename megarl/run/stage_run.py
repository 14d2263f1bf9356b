"""The part of a run that every training stage shares: data order, timing, metrics, checkpoints, early stop."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

from megarl.checkpoint.run_lock import require_lock
from megarl.config import StageConfig
from megarl.data.sampler import PromptSampler, RowOrder
from megarl.errors import EarlyStop
from megarl.megatron.requests import ProfileSpec, TrainRequest
from megarl.run.checkpointer import Checkpointer
from megarl.run.remote.trainer_group import TrainerGroup
from megarl.run.run_state import RunState, resumed_metrics
from megarl.run.supervision.run_monitor import RunMonitor
from megarl.tracking.progress import EventLog, MessageEvent, PhaseEvent, StepSummary
from megarl.tracking.timing import PhaseTimer
from megarl.tracking.tracker import Tracker

SAMPLER_NAME = "prompts"
"""Key of the data sampler in `RunState.samplers`, for every stage and data format."""


class StageRun:
    """Base class of a training run: samples rows, times phases, reports to the driver, logs metrics, checkpoints."""

    def __init__(
        self,
        config: StageConfig,
        events: EventLog,
        timer: PhaseTimer,
        *,
        order: RowOrder,
        checkpoints: Checkpointer | None = None,
        resumed: RunState | None = None,
        monitor: RunMonitor | None = None,
    ) -> None:
        """Args:
        timer: phase timer of this stage, already running since its startup.
        order: order of the training rows.
        checkpoints: saves the run; None: no checkpoints.
        resumed: state to resume from; None: start from step 0.
        monitor: heartbeat, phase timeouts and straggler detection; None: not monitored.
        """
        self.timer, self.monitor = timer, monitor
        self._events, self._stage_config = events, config
        self._should_stop = False
        self.checkpoints = checkpoints
        """Saves the run; None: no checkpoints."""
        self._resumed = resumed or RunState()
        self.step = self._resumed.step
        self.rows = PromptSampler(order)
        if SAMPLER_NAME in self._resumed.samplers:
            self.rows.restore(self._resumed.samplers[SAMPLER_NAME])
        self.step_metrics: dict[str, float] = {}
        """Metrics that were added since the last step was logged."""
        self.totals = self._resumed.totals.snapshot(timer)
        timer.resume(self._resumed.totals.seconds, self._resumed.totals.seconds_by_phase)
        metrics = None if resumed is None else resumed_metrics(resumed)
        self._tracker = Tracker(
            config.tracking,
            config.run_dir,
            notify=self.notify,
            resumed=metrics,
            require_lock=partial(require_lock, config.run_dir),
        )

    @contextmanager
    def phase(self, name: str, *, waiting: bool = True) -> Iterator[None]:
        """Time the block as phase `name` and report it; `waiting`: other processes do the work meanwhile."""
        self._events.add(PhaseEvent(self.step, name))
        watched = nullcontext() if self.monitor is None else self.monitor.phase(self.step, name, waiting=waiting)
        with self.timer.phase(name, waiting=waiting), watched:
            yield

    def with_profile(self, request: TrainRequest, step: int) -> TrainRequest:
        """Ask for a trace of the request, if `trainer.profile` has one for this step."""
        profile = self._stage_config.trainer.profile
        if profile is None or step not in profile.steps:
            return request
        folder = str(Path(self._stage_config.run_dir).absolute() / "profile")
        return replace(request, profile=ProfileSpec(folder=folder, step=step, ranks=profile.ranks))

    def state(self) -> RunState:
        """Return everything needed to resume, except the models; call it between two steps."""
        return RunState(
            step=self.step,
            samplers={SAMPLER_NAME: self.rows.state()},
            metrics_bytes=self._tracker.num_bytes,
            totals=self.totals.snapshot(self.timer),
        )

    def save(self) -> None:
        """Save and complete a checkpoint of the last step, if checkpoints are enabled; a failure is only reported."""
        if self.checkpoints is None or self.step == self._resumed.step:
            return
        if self.checkpoints.last_step != self.step:
            self.begin_save(self.checkpoints)
            self.checkpoints.add_state(self.state)
        with self.phase("checkpoint"):
            self.checkpoints.finish()

    def begin_save(self, checkpoints: Checkpointer) -> dict[str, float]:
        """Start saving the models as of this step; return the checkpoint metrics."""
        with self.phase("checkpoint"):
            return checkpoints.begin(self.step)

    def should_stop(self) -> bool:
        """Whether the driver has requested an early stop; loops check it between two steps."""
        self._should_stop = self._should_stop or self._events.should_stop()
        return self._should_stop

    def export(self, trainer: TrainerGroup) -> None:
        """Export the trainer's model in Hugging Face format to `export_path`, if at least one step has finished."""
        if self.step > 0:
            with self.phase("export"):
                trainer.save_hf(self._stage_config.export_path)

    def raise_if_stopped_early(self) -> None:
        """Return if the run has reached its last step.

        Raises:
            EarlyStop: the run stopped before, as requested.
        """
        if not self._should_stop:
            return
        stop_signal = self._events.stop_signal or "SIGUSR1"  # under torchrun, the signal may have reached another rank
        if self.step == 0:
            raise EarlyStop(f"stopped before the first of {self._stage_config.trainer.steps} steps on {stop_signal}")
        raise EarlyStop(
            f"stopped after step {self.step} of {self._stage_config.trainer.steps} on {stop_signal}; "
            f"model exported to {self._stage_config.export_path}"
        )

    def add_metrics(self, metrics: Mapping[str, float]) -> None:
        """Add metrics to the log of this step."""
        self.step_metrics.update(metrics)

    def metric(self, name: str) -> float:
        """Return a metric added in this step."""
        return self.step_metrics[name]

    def notify(self, text: str) -> None:
        """Send a line of text to the user's terminal."""
        self._events.add(MessageEvent(text))

    def log(self, metrics: Mapping[str, float], line: StepSummary | None = None) -> None:
        """Log the metrics of the step, and show `line` in the progress output."""
        self._tracker.log(metrics, step=self.step)
        if line is not None:
            self._events.add(line)

    def close(self) -> None:
        """Flush and close the metrics writers."""
        self._tracker.close()
