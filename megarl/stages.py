"""The stages without engines: SFT, reward and cost models, and DPO; their training loops, and how they are built."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import override

import numpy as np

from megarl.batch.balance import MICRO_BATCHES_PER_CHUNK
from megarl.batch.pack import ColumnName, PerToken, SampleRef
from megarl.batch.trajectory import Trajectory
from megarl.checkpoint.run_lock import require_lock
from megarl.cluster.process.launcher_env import torchrun_world
from megarl.cluster.workers.dispatch import LocalPayload
from megarl.cluster.workers.group import Processes, WorkerFuture
from megarl.config import DpoConfig, RmConfig, SftConfig, StageConfig, SupervisedStageConfig
from megarl.data.demonstrations import load_demonstrations
from megarl.data.preference_pairs import PreferencePair, load_preferences
from megarl.data.sampler import PromptOrder, PromptSampler
from megarl.data.tokenizer import load_tokenizer
from megarl.functional import Denominators
from megarl.losses import BradleyTerryLoss, DpoLoss
from megarl.megatron.families.load_architecture import read_hf_config
from megarl.megatron.requests import ForwardRequest, MiniBatch, TrainRequest, TrainStats
from megarl.run.checkpointer import POLICY, Checkpointer, load_models
from megarl.run.remote.build import build_dpo, build_trainer
from megarl.run.remote.trainer_group import FrozenGroup, TrainerGroup
from megarl.run.run_state import RunState
from megarl.run.stage_run import StageRun
from megarl.tracking.progress import EventLog, MessageEvent, PhaseEvent, StepSummary
from megarl.tracking.timing import PhaseTimer

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


PairRewards = Sequence[tuple[float, float]]
"""Reward of the chosen and of the rejected answer of each pair; higher is better."""


class PairwiseRun(SupervisedRun):
    """A supervised run on preference pairs, evaluated by the accuracy on held-out pairs."""

    def __init__(
        self,
        config: SupervisedStageConfig,
        events: EventLog,
        trainer: TrainerGroup,
        *,
        safety: bool,
        checkpoints: Checkpointer | None = None,
        resume: Path | None = None,
    ) -> None:
        """`safety`: also read the safety labels of the answers. Other arguments: as for `SupervisedRun`."""
        tokenizer = load_tokenizer(config.model.path, trust_remote_code=config.model.trust_remote_code)
        context = int(read_hf_config(Path(config.model.path))["max_position_embeddings"])

        def load(path: str) -> list[PreferencePair]:
            return load_preferences(config.data, tokenizer, max_tokens=context, path=path, safety=safety)

        self.pairs = load(config.data.file)
        eval_path = config.data.eval_path
        self.held_out = load(eval_path)[: config.data.eval_size] if eval_path is not None else []
        self._run_dir = Path(config.run_dir)
        self.max_tokens = config.trainer.max_tokens_per_micro_batch
        super().__init__(config, events, trainer, num_rows=len(self.pairs), checkpoints=checkpoints, resume=resume)

    @abstractmethod
    def compute_held_out_rewards(self) -> PairRewards:
        """Return the rewards of the held-out pairs under the current model."""

    @override
    def evaluate(self) -> None:
        """Log the accuracy on held-out pairs and the mean reward gap between chosen and rejected answers."""
        if not self.held_out:
            return
        with self.phase("evaluate"):
            rewards = self.compute_held_out_rewards()
        accuracy, gap = preference_accuracy(rewards), sum(better - worse for better, worse in rewards) / len(rewards)
        self.totals.evaluations[self.step] = accuracy
        self.log({"eval/accuracy": accuracy, "eval/gap": gap})
        self.notify(f"step {self.step}: accuracy {accuracy:.3f}, gap {gap:.3g} on {len(rewards)} held-out pairs")

    @override
    def finish(self) -> None:
        """Write `summary.json`, then close the run's metrics and checkpoints."""
        totals = self.totals.snapshot(self.timer)
        summary = totals.summary(step=self.step, steps_planned=self._stage_config.trainer.steps)
        world = torchrun_world()
        if world is None or world.rank == 0:
            require_lock(self._run_dir)
            summary.write(self._run_dir / "summary.json")
        before, after = summary.eval_before, summary.eval_after
        if before is not None and after is not None:
            self.notify(f"held-out accuracy {before:.3f} -> {after:.3f} on {len(self.held_out)} pairs")
        self.close()


def preference_accuracy(rewards: PairRewards) -> float:
    """Return the fraction of pairs whose chosen answer has the higher reward; a tie counts as half a pair."""
    return sum(1.0 if better > worse else 0.5 if better == worse else 0.0 for better, worse in rewards) / len(rewards)


def flatten_pairs(pairs: Sequence[PreferencePair]) -> list[Trajectory]:
    """Return all answers: of each pair the chosen one, then the rejected one."""
    return [answer for pair in pairs for answer in (pair.chosen, pair.rejected)]


def make_pair_request(
    pairs: Sequence[PreferencePair],
    loss: BradleyTerryLoss | DpoLoss,
    *,
    max_tokens: int,
    ref_logprobs: Sequence[PerToken] | None = None,
) -> TrainRequest:
    """Return the request for one optimizer step on the pairs.

    Args:
        max_tokens: largest number of tokens in a micro-batch.
        ref_logprobs: reference log-probabilities of `flatten_pairs(pairs)`, for a loss that needs them.
    """
    answers = flatten_pairs(pairs)
    scalars = [make_pair_scalars(pair) if isinstance(loss, BradleyTerryLoss) else ({}, {}) for pair in pairs]
    samples = tuple(
        SampleRef(payload=0, index=i, num_tokens=answer.num_tokens, scalars=scalars[i // 2][i % 2])
        for i, answer in enumerate(answers)
    )
    tokens = sum(int(answer.loss_mask.sum()) for answer in answers)
    batch = MiniBatch(samples=samples, denominators=Denominators(num_tokens=tokens, num_sequences=len(answers)))
    column = None if ref_logprobs is None else {(0, i): of for i, of in enumerate(ref_logprobs)}
    return TrainRequest(
        mini_batches=(batch,),
        payloads=(LocalPayload(answers),),
        max_tokens_per_micro_batch=max_tokens,
        loss=loss,
        columns={} if column is None else {"ref_logprobs": LocalPayload([column])},
        sequences_per_unit=2,
    )


def make_pair_scalars(pair: PreferencePair) -> tuple[Mapping[ColumnName, float], Mapping[ColumnName, float]]:
    """Return the scalars of the chosen and of the rejected answer: the margin and, if labeled, the sign (1: unsafe)."""
    margin: dict[ColumnName, float] = {"margins": pair.margin}
    if pair.safe is None:
        return margin, margin
    chosen, rejected = (-1.0 if safe else 1.0 for safe in pair.safe)
    return {**margin, "signs": chosen}, {**margin, "signs": rejected}


def iter_forward_requests(
    answers: Sequence[Trajectory], group: TrainerGroup | FrozenGroup, max_tokens: int
) -> Iterator[ForwardRequest]:
    """Yield forward requests with the answers in order, in chunks that bound memory.

    The key of an answer is (0, its index in the chunk).

    Args:
        max_tokens: largest number of tokens in a micro-batch.
    """
    start = num_tokens = 0
    room = group.grid.dp * MICRO_BATCHES_PER_CHUNK * max_tokens
    for end, answer in enumerate(answers, start=1):
        num_tokens += answer.num_tokens
        if num_tokens >= room or end == len(answers):
            yield make_forward_request(answers[start:end], max_tokens)
            start, num_tokens = end, 0


def make_forward_request(answers: Sequence[Trajectory], max_tokens: int) -> ForwardRequest:
    """Return a request to evaluate the answers, in micro-batches of at most `max_tokens` tokens."""
    return ForwardRequest(
        samples=tuple(SampleRef(payload=0, index=i, num_tokens=a.num_tokens) for i, a in enumerate(answers)),
        payloads=(LocalPayload(list(answers)),),
        max_tokens_per_micro_batch=max_tokens,
    )


class RewardModelRun(PairwiseRun):
    """Trains a value model whose last value scores how good (reward) or how harmful (cost) an answer is."""

    def __init__(
        self,
        config: RmConfig,
        events: EventLog,
        trainer: TrainerGroup,
        *,
        checkpoints: Checkpointer | None = None,
        resume: Path | None = None,
    ) -> None:
        """Arguments as for `SupervisedRun`."""
        self._loss = BradleyTerryLoss(kind=config.rm.kind)
        safety = config.rm.kind == "cost"
        super().__init__(config, events, trainer, safety=safety, checkpoints=checkpoints, resume=resume)

    @override
    def make_train_request(self, rows: Sequence[int]) -> TrainRequest:
        return make_pair_request([self.pairs[i] for i in rows], self._loss, max_tokens=self.max_tokens)

    @override
    def compute_held_out_rewards(self) -> PairRewards:
        """Return the scores of the held-out pairs, negated for a cost model."""
        sign = 1.0 if self._loss.kind == "reward" else -1.0
        scores: list[float] = []
        for chunk in iter_forward_requests(flatten_pairs(self.held_out), self.trainer, self.max_tokens):
            found = self.trainer.scores(chunk)
            scores += [sign * found[ref.key] for ref in chunk.samples]
        return list(zip(scores[::2], scores[1::2], strict=True))


class DpoRun(PairwiseRun):
    """DPO with reference log-probabilities that are computed once, before the first step.

    Without a separate reference model the trainer itself computes them, as it still has the initial weights: there is
    no second copy. A resumed run recomputes them before it loads the checkpoint.
    """

    def __init__(
        self,
        config: DpoConfig,
        events: EventLog,
        trainer: TrainerGroup,
        reference: FrozenGroup | None = None,
        *,
        checkpoints: Checkpointer | None = None,
        resume: Path | None = None,
    ) -> None:
        """`reference`: separate reference model; None: the initial weights, which `trainer` still has."""
        super().__init__(config, events, trainer, safety=False, checkpoints=checkpoints, resume=resume)
        self._config, self._reference = config, reference
        self._loss = DpoLoss(beta=config.dpo.beta, nll=config.dpo.nll)
        self._ref_logprobs: Mapping[int, tuple[PerToken, PerToken]] = {}
        self._held_out_ref: Sequence[float] = ()

    @override
    def prepare(self) -> None:
        with self.phase("reference"):
            self._compute_reference_logprobs()

    @override
    def make_train_request(self, rows: Sequence[int]) -> TrainRequest:
        return make_pair_request(
            [self.pairs[i] for i in rows],
            self._loss,
            max_tokens=self.max_tokens,
            ref_logprobs=[of for i in rows for of in self._ref_logprobs[i]],
        )

    @override
    def compute_held_out_rewards(self) -> PairRewards:
        """Return beta * (log pi - log pi_reference) of the chosen and of the rejected answer of each held-out pair."""
        answers = flatten_pairs(self.held_out)
        found = self._compute_logprobs(self.trainer, answers)
        rewards = [
            self._config.dpo.beta * (sum_answer_logprobs(answer, of) - ref)
            for answer, of, ref in zip(answers, found, self._held_out_ref, strict=True)
        ]
        return list(zip(rewards[::2], rewards[1::2], strict=True))

    def _compute_reference_logprobs(self) -> None:
        """Compute the reference log-probabilities of the pairs that the run trains on and of the held-out pairs."""
        config, model = self._config, self._reference or self.trainer
        rows = select_rows(config, len(self.pairs))
        held_out = flatten_pairs(self.held_out)
        found = self._compute_logprobs(model, flatten_pairs([self.pairs[i] for i in rows]) + held_out, what="reference")
        self._ref_logprobs = {row: (found[2 * i], found[2 * i + 1]) for i, row in enumerate(rows)}
        held_out_ref = found[2 * len(rows) :]
        self._held_out_ref = [
            sum_answer_logprobs(answer, of) for answer, of in zip(held_out, held_out_ref, strict=True)
        ]

    def _compute_logprobs(
        self, model: TrainerGroup | FrozenGroup, answers: Sequence[Trajectory], *, what: str | None = None
    ) -> list[PerToken]:
        """Return the log-probabilities of each answer; `what`: label under which progress is reported, None: silent."""
        logprobs: list[PerToken] = []
        for chunk in iter_forward_requests(answers, model, self.max_tokens):
            found = {key: of for part in model.logprobs(chunk).fetch() for key, of in part.items()}
            # copied, because views would keep the shared memory allocated
            logprobs += [found[ref.key].copy() for ref in chunk.samples]
            if what is not None:
                self._events.add(PhaseEvent(self.step, f"{what} {len(logprobs):,}/{len(answers):,} answers"))
        return logprobs


def select_rows(config: DpoConfig, num_rows: int) -> list[int]:
    """Return the indices of the rows that the run trains on, in ascending order."""
    needed = config.trainer.steps * config.trainer.batch_size
    if needed >= num_rows:
        return list(range(num_rows))
    return sorted(PromptSampler(PromptOrder(num_rows, config.seed, config.data.shuffle)).take(needed))


def sum_answer_logprobs(answer: Trajectory, logprobs: PerToken) -> float:
    """Return the log-probability of the answer given the prompt: the sum over its sampled tokens."""
    return float(np.sum(logprobs, where=answer.loss_mask, dtype=np.float64))


def make_sft(config: SftConfig, events: EventLog, processes: Processes, resume: Path | None = None) -> SftRun:
    """Build an SFT run; `resume`: folder of the checkpoint to resume from."""
    trainer = build_trainer(config, processes, load_weights=resume is None)
    checkpoints = _make_checkpointer(config, events, processes, trainer)
    return SftRun(config, events, trainer, checkpoints=checkpoints, resume=resume)


def make_rm(config: RmConfig, events: EventLog, processes: Processes, resume: Path | None = None) -> RewardModelRun:
    """Build a run that trains a reward or cost model; `resume`: folder of the checkpoint to resume from."""
    trainer = build_trainer(config, processes, load_weights=resume is None)
    checkpoints = _make_checkpointer(config, events, processes, trainer)
    return RewardModelRun(config, events, trainer, checkpoints=checkpoints, resume=resume)


def make_dpo(config: DpoConfig, events: EventLog, processes: Processes, resume: Path | None = None) -> DpoRun:
    """Build a DPO run; `resume`: folder of the checkpoint to resume from."""
    trainer, reference = build_dpo(config, processes)
    checkpoints = _make_checkpointer(config, events, processes, trainer)
    return DpoRun(config, events, trainer, reference, checkpoints=checkpoints, resume=resume)


def _make_checkpointer(
    config: StageConfig, events: EventLog, processes: Processes, trainer: TrainerGroup
) -> Checkpointer | None:
    """Create the checkpointer; None if the configuration disables checkpoints."""
    if not config.checkpoint.every:
        return None

    def notify(text: str) -> None:
        events.add(MessageEvent(text))

    return Checkpointer(config, {POLICY: trainer}, notify, run_on_rank0=processes.run_on_rank0)
