"""The training loop over the rows of a file that all stages without engines share."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import override

from megarl.batch.sample_table import SampleRef
from megarl.batch.trajectory import Trajectory
from megarl.cluster.workers.group import WorkerFuture
from megarl.cluster.workers.payload import LocalPayload
from megarl.config import SftConfig, SupervisedStageConfig
from megarl.data.demonstrations import load_demonstrations
from megarl.data.sampler import PromptOrder
from megarl.data.tokenizer import load_tokenizer
from megarl.functional import Denominators
from megarl.megatron.families.load_architecture import read_hf_config
from megarl.megatron.requests import MiniBatch, TrainRequest, TrainStats
from megarl.run.checkpointer import POLICY, Checkpointer, load_models
from megarl.run.remote.trainer_group import TrainerGroup
from megarl.run.run_events import EventLog
from megarl.run.run_state import RunState
from megarl.run.stage_run import StageRun
from megarl.tracking.phases import PhaseTimer
from megarl.tracking.progress import StepSummary

STEPS_AHEAD = 2
"""Steps in flight at the trainer: it does not idle between steps, except for evaluations and checkpoints."""


class SupervisedRun(StageRun, ABC):
    """Trains with one optimizer step per batch of rows; evaluates before the first step, periodically, and last."""

    def __init__(
        self,
        config: SupervisedStageConfig,
        events: EventLog,
        trainer: TrainerGroup,
        *,
        num_rows: int,
        checkpoints: Checkpointer | None = None,
        resume: Path | None = None,
    ) -> None:
        """Args:
        num_rows: number of rows in the training data.
        checkpoints: saves checkpoints; None: the run is not saved.
        resume: folder of the checkpoint to resume from; `train` loads its model.
        """
        resumed = None if resume is None else RunState.read(resume)
        order = PromptOrder(num_rows, config.seed, config.data.shuffle)
        super().__init__(config, events, PhaseTimer(), order=order, checkpoints=checkpoints, resumed=resumed)
        self.trainer, self._resume = trainer, resume
        self._batch_size = config.trainer.batch_size
        self.totals.logprob_abs_max = None
        self._finished_at = 0.0

    @abstractmethod
    def make_train_request(self, rows: Sequence[int]) -> TrainRequest:
        """Return the request for one optimizer step on the rows with these indices."""

    def prepare(self) -> None:
        """Compute what depends on the initial model, before a checkpoint is loaded into it."""

    def evaluate(self) -> None:
        """Evaluate the current model, if the stage has held-out data."""

    def finish(self) -> None:
        """Close the run's metrics and checkpoints."""
        self.close()

    def train(self) -> None:
        """Run steps until the last one or until `should_stop`, then save the last checkpoint and export the model."""
        if not self.should_stop():
            self.prepare()
        if self._resume is not None:
            self.notify(f"resuming from step {self.step}: {self._resume}")
            load_models(self._resume, {POLICY: self.trainer}, self.notify)
        elif not self.should_stop():
            self.evaluate()
        self._finished_at = time.perf_counter()
        in_flight: deque[WorkerFuture[TrainStats]] = deque()
        for step in range(self.step + 1, self._stage_config.trainer.steps + 1):
            if self.checkpoints is not None:
                self.checkpoints.poll()
            if self.should_stop():
                break
            rows = self.rows.take(self._batch_size)
            request = self.with_profile(self.make_train_request(rows), step)
            in_flight.append(self.trainer.begin_train_step(request))
            is_drained = self._is_eval_due(step) or self._is_save_due(step)
            while len(in_flight) > (0 if is_drained else STEPS_AHEAD - 1):
                self._finish_step(in_flight.popleft())
            if is_drained:
                self._evaluate_and_add_state()
        for pending in in_flight:
            self._finish_step(pending)
        self.save()
        self.export(self.trainer)
        self.finish()

    def _evaluate_and_add_state(self) -> None:
        """Evaluate if due and complete a checkpoint that has begun; called when no step is in flight."""
        if self._is_eval_due(self.step):
            self.evaluate()
        if self.checkpoints is not None:
            self.checkpoints.add_state(self.state)
        self._finished_at = time.perf_counter()

    def _finish_step(self, pending: WorkerFuture[TrainStats]) -> None:
        self.step += 1
        with self.phase("train"):
            stats = pending.result()
        now = time.perf_counter()
        seconds, self._finished_at = now - self._finished_at, now
        self.totals.add_step(tokens=stats.num_tokens, seconds=seconds)
        rate = stats.num_tokens / seconds
        metrics = {**stats.metrics, "time/step_seconds": seconds, "tokens_per_second": rate}
        if self.checkpoints is not None and self._is_save_due(self.step):
            metrics |= self.begin_save(self.checkpoints)
        line = StepSummary(step=self.step, seconds=seconds, loss=stats.metrics["loss"], tokens_per_second=rate)
        self.log(metrics, line if self._is_step_shown() else None)

    def _is_eval_due(self, step: int) -> bool:
        every = self._stage_config.trainer.eval_every
        return step == self._stage_config.trainer.steps or (every > 0 and step % every == 0)

    def _is_save_due(self, step: int) -> bool:
        return self.checkpoints is not None and self.checkpoints.is_due(step)

    def _is_step_shown(self) -> bool:
        every = max(1, self._stage_config.trainer.steps // 20)
        return self.step % every == 0 or self.step == self._stage_config.trainer.steps


class SftRun(SupervisedRun):
    """A supervised run on demonstrations, with one optimizer step per batch."""

    def __init__(
        self,
        config: SftConfig,
        events: EventLog,
        trainer: TrainerGroup,
        *,
        checkpoints: Checkpointer | None = None,
        resume: Path | None = None,
    ) -> None:
        """Arguments as for `SupervisedRun`."""
        context = int(read_hf_config(Path(config.model.path))["max_position_embeddings"])
        tokenizer = load_tokenizer(config.model.path, trust_remote_code=config.model.trust_remote_code)
        self._config = config
        self._rows = load_demonstrations(config.data, tokenizer, max_tokens=context)
        super().__init__(config, events, trainer, num_rows=len(self._rows), checkpoints=checkpoints, resume=resume)

    @override
    def make_train_request(self, rows: Sequence[int]) -> TrainRequest:
        return make_sft_request(self._config, [self._rows[i] for i in rows])


def make_sft_request(config: SftConfig, rows: Sequence[Trajectory]) -> TrainRequest:
    """Return the request for one optimizer step on `rows`."""
    samples = tuple(SampleRef(payload=0, index=i, num_tokens=row.num_tokens) for i, row in enumerate(rows))
    tokens = sum(int(row.loss_mask.sum()) for row in rows)
    return TrainRequest(
        mini_batches=(
            MiniBatch(samples=samples, denominators=Denominators(num_tokens=tokens, num_sequences=len(rows))),
        ),
        payloads=(LocalPayload(list(rows)),),
        max_tokens_per_micro_batch=config.trainer.max_tokens_per_micro_batch,
    )
