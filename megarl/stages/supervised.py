"""Learning from the rows of a file, batch by batch: the loop that fine-tuning and learning from pairs share."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from megarl.config import StageConfig
from megarl.groups.trainer_group import TrainerGroup
from megarl.megatron.requests import TrainStats, TrainWork
from megarl.run.checkpointer import POLICY, Checkpointer, load_models
from megarl.run.events import EventLog
from megarl.run.run_state import RunState
from megarl.run.stage_run import StageRun
from megarl.tracking.phases import PhaseTimer
from megarl.tracking.progress import StepLine
from megarl.workers.group import Pending

STEPS_AHEAD = 2
"""Steps sent to the trainer before the oldest is waited for: it never idles between steps, save for a checkpoint."""


class SupervisedRun(StageRun, ABC):
    """Rows in, one optimizer step a batch; an evaluation before the first, now and then, and after the last."""

    def __init__(
        self,
        config: StageConfig,
        events: EventLog,
        trainer: TrainerGroup,
        *,
        num_rows: int,
        checkpoints: Checkpointer | None = None,
        resume: Path | None = None,
    ) -> None:
        """Args:
        checkpoints: where the run is saved.
        resume: the checkpoint that it goes on from; `train` loads its model.
        """
        resumed = None if resume is None else RunState.read(resume)
        super().__init__(config, events, PhaseTimer(), num_rows=num_rows, checkpoints=checkpoints, resumed=resumed)
        self.trainer, self._resume = trainer, resume
        self._books.logprob_abs_max = None
        self._finished_at = 0.0

    @abstractmethod
    def work(self, rows: Sequence[int]) -> TrainWork:
        """One optimizer step on the rows of these numbers."""

    def begin(self) -> None:
        """Ask the model that training starts from, before a checkpoint takes its place."""

    def evaluate(self) -> None:
        """Say how good the model is by now, where there is something to tell by."""

    def finish(self) -> None:
        """Close the books."""
        self.close()

    def train(self) -> None:
        """All steps, or those until `ends_early`, then the last checkpoint and the export."""
        if not self.ends_early():
            self.begin()
        if self._resume is not None:
            self.say(f"going on from step {self.step}: {self._resume}")
            load_models(self._resume, {POLICY: self.trainer}, self.say)
        elif not self.ends_early():
            self.evaluate()
        self._finished_at = time.perf_counter()
        under_way: deque[Pending[TrainStats]] = deque()
        for begun in range(self.step + 1, self._stage.trainer.steps + 1):
            if self._checkpoints is not None:
                self._checkpoints.poll()
            if self.ends_early():
                break
            rows = self._sampler.take(self._stage.trainer.batch_size)
            under_way.append(self.trainer.begin_train_step(self.work(rows)))
            pauses = self._is_due(begun) or self._is_saved(begun)
            while len(under_way) > (0 if pauses else STEPS_AHEAD - 1):
                self._finish_step(under_way.popleft())
            if pauses:
                self._pause()
        for pending in under_way:
            self._finish_step(pending)
        self.save()
        self.export(self.trainer)
        self.finish()

    def _pause(self) -> None:
        """After a step, no other being under way."""
        if self._is_due(self.step):
            self.evaluate()
        if self._checkpoints is not None:
            self._checkpoints.add_state(self.state)
        self._finished_at = time.perf_counter()

    def _finish_step(self, pending: Pending[TrainStats]) -> None:
        self.step += 1
        with self.phase("train"):
            stats = pending.result()
        now = time.perf_counter()
        seconds, self._finished_at = now - self._finished_at, now
        self._books.count_step(tokens=stats.num_tokens, seconds=seconds)
        rate = stats.num_tokens / seconds
        metrics = {**stats.metrics, "time/step_seconds": seconds, "tokens_per_second": rate}
        if self._checkpoints is not None and self._is_saved(self.step):
            metrics |= self.begin_save(self._checkpoints)
        line = StepLine(step=self.step, seconds=seconds, loss=stats.metrics["loss"], tokens_per_second=rate)
        self.log(metrics, line if self._is_shown() else None)

    def _is_due(self, step: int) -> bool:
        every = self._stage.trainer.eval_every
        return step == self._stage.trainer.steps or (every > 0 and step % every == 0)

    def _is_saved(self, step: int) -> bool:
        return self._checkpoints is not None and self._checkpoints.is_due(step)

    def _is_shown(self) -> bool:
        every = max(1, self._stage.trainer.steps // 20)
        return self.step % every == 0 or self.step == self._stage.trainer.steps
