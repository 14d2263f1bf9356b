"""Learning from the rows of a file, batch by batch: the loop that fine-tuning and learning from pairs share."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence

from megarl.config import StageConfig
from megarl.controller.events import EventLog
from megarl.controller.run import StageRun
from megarl.controller.trainer_group import TrainerGroup
from megarl.data.sampler import PromptSampler
from megarl.megatron.work import TrainStats, TrainWork
from megarl.tracking.phases import PhaseTimer
from megarl.tracking.progress import StepLine
from megarl.workers.group import Pending

STEPS_AHEAD = 2
"""Steps sent to the trainer before the oldest is waited for: it never idles between steps."""


class SupervisedRun(StageRun, ABC):
    """Rows in, one optimizer step a batch; an evaluation before the first, now and then, and after the last."""

    def __init__(self, config: StageConfig, events: EventLog, trainer: TrainerGroup, *, num_rows: int) -> None:
        super().__init__(config, events, PhaseTimer())
        self.trainer, self.tokens_per_second = trainer, 0.0
        self._sampler = PromptSampler(num_rows, config.seed, config.data.shuffle)
        self._num_tokens, self._step_seconds, self._finished_at = 0, 0.0, 0.0

    @abstractmethod
    def work(self, rows: Sequence[int]) -> TrainWork:
        """One optimizer step on the rows of these numbers."""

    def evaluate(self) -> None:
        """Say how good the model is by now, where there is something to tell by."""

    def finish(self) -> None:
        """Close the books."""
        self.close()

    def train(self) -> None:
        """All steps, or those until `ends_early`, then the export."""
        under_way: deque[Pending[TrainStats]] = deque()
        if not self.ends_early():
            self.evaluate()
        self._finished_at = time.perf_counter()
        for begun in range(1, self._stage.trainer.steps + 1):
            if self.ends_early():
                break
            rows = self._sampler.take(self._stage.trainer.batch_size)
            under_way.append(self.trainer.begin_train_step(self.work(rows)))
            due = self._is_due(begun)
            while len(under_way) > (0 if due else STEPS_AHEAD - 1):
                self._finish_step(under_way.popleft())
            if due:
                self.evaluate()
                self._finished_at = time.perf_counter()
        for pending in under_way:
            self._finish_step(pending)
        self.export(self.trainer)
        self.finish()

    def _finish_step(self, pending: Pending[TrainStats]) -> None:
        self.step += 1
        with self.phase("train"):
            stats = pending.result()
        now = time.perf_counter()
        seconds, self._finished_at = now - self._finished_at, now
        self._num_tokens, self._step_seconds = self._num_tokens + stats.num_tokens, self._step_seconds + seconds
        self.tokens_per_second = self._num_tokens / self._step_seconds
        rate = stats.num_tokens / seconds
        metrics = {**stats.metrics, "time/step_seconds": seconds, "tokens_per_second": rate}
        line = StepLine(step=self.step, seconds=seconds, loss=stats.metrics["loss"], tokens_per_second=rate)
        self.log(metrics, line if self._is_shown() else None)

    def _is_due(self, step: int) -> bool:
        every = self._stage.trainer.eval_every
        return step == self._stage.trainer.steps or (every > 0 and step % every == 0)

    def _is_shown(self) -> bool:
        every = max(1, self._stage.trainer.steps // 20)
        return self.step % every == 0 or self.step == self._stage.trainer.steps
