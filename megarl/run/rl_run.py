"""The interface that RL training loops are written with.

One step of a loop: `sample`, `add_reference_logprobs` / `add_values`, `estimate`, `train_critic`, `train_policy`,
`finish_step`. All of them work on a `RolloutBatch`; tokens stay in the workers, the controller passes references on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeVar, override

import numpy as np
import psutil

from megarl.batch.pack import ColumnName, SampleKey
from megarl.batch.trajectory import ROUTES, Prompt, Trajectory
from megarl.checkpoint.run_lock import require_lock
from megarl.cluster.workers.group import WorkerFuture
from megarl.config import RunConfig
from megarl.config.policy import CriticConfig
from megarl.errors import ConfigError, LimitError, OutdatedEngineError
from megarl.losses import Loss, PolicyLoss, TokenLoss, ValueLoss
from megarl.megatron.requests import (
    LOGPROB_MISMATCH,
    MISMATCH_METRICS,
    RATIO_MEAN,
    RATIO_SQUARE_MEAN,
    TrainRequest,
    TrainStats,
)
from megarl.rollout.estimate_job import EstimateJob, estimate_completions
from megarl.rollout.estimators import KL_METRIC, Estimator, is_by_completions, make_adaptive_kl
from megarl.run.checkpointer import POLICY, Checkpointer, remove_journal
from megarl.run.group_sampler import GroupSampler
from megarl.run.memory.step_ledger import StepMemory
from megarl.run.remote.trainer_group import TrainerGroup
from megarl.run.rollout_batch import KeptSample, RolloutBatch, batch_metrics, term_metrics
from megarl.run.run_logs import StepUpdate, UpdateLog, batch_hash
from megarl.run.run_parts import RunParts
from megarl.run.run_state import RunState
from megarl.run.scheduled_groups import Keep
from megarl.run.stage_run import StageRun
from megarl.run.step_limits import LimitDecision, StepLimits, StepStage
from megarl.run.sync.weight_sync import SyncedRun
from megarl.tracking.progress import EventLog, RunSummary, StepSummary
from megarl.tracking.timing import PhaseTimer, Startup

PROBE_TOKENS = 16
"""Largest number of tokens that an engine samples."""


def compare_engines(config: RunConfig, trainer: TrainerGroup, probe: RolloutBatch) -> dict[str, float]:
    """Return the metrics of the mismatch over the sampled tokens of `probe`, which are of the trainer's weights."""
    if not probe.groups:  # an environment has failed in all of them
        return {}
    column = trainer.logprobs(probe.forward_request(config)).fetch()
    logprobs: Mapping[SampleKey, np.ndarray] = {key: values for part in column for key, values in part.items()}
    differences = [
        (logprobs[key] - trajectory.logprobs)[trajectory.loss_mask] for key, trajectory in _trajectories(probe).items()
    ]
    difference = np.concatenate(differences).astype(np.float64)
    if not len(difference):
        return {}
    # k3 estimate of KL(rollout || trainer), as over the tokens of a batch
    values = {
        "logprob_abs_max": np.abs(difference).max(),
        "logprob_abs_p99": np.quantile(np.abs(difference), 0.99),
        "logprob_kl": (np.exp(difference) - 1 - difference).mean(),
    }
    return {MISMATCH_METRICS[key]: float(value) for key, value in values.items()}


def _trajectories(probe: RolloutBatch) -> dict[SampleKey, Trajectory]:
    groups = [group.payload.fetch() for group in probe.groups]
    return {key: groups[key[0]][key[1]] for keys in probe.segment_keys for key in keys}


D = TypeVar("D")


class RLRun(StageRun):
    """One RL run, as its training loop sees it.

    Examples:
            run.begin()
            for prompts in run.steps():
                batch = run.sample(prompts)
                run.add_reference_logprobs(batch)
                run.estimate(rl.group_estimates, batch, config, run.kl_coefficient)
                run.finish_step(batch, run.train_policy(batch, rl.ClippedLoss.of(config)))
    """

    def __init__(
        self, config: RunConfig, events: EventLog, timer: PhaseTimer, startup: Startup, parts: RunParts
    ) -> None:
        """Prepare the run, or restore it from `parts.resumed`; `timer` and `startup` have run since it was started."""
        super().__init__(
            config,
            events,
            timer,
            order=parts.prompts.order,
            checkpoints=parts.checkpoints,
            resumed=parts.resumed,
            monitor=parts.monitor,
        )
        self.config, self.trainer, self.models, self.rollout = config, parts.trainer, parts.models, parts.rollout
        self._startup, self._restart_budget, self._replay_until = startup, parts.restart_budget, parts.replay_until
        clocks = None if config.schedule.type == "sync" else parts.rollout
        memory = StepMemory(parts.trainer, parts.engines, self.phase, clocks)
        self.sync = parts.sync
        """Pushes the policy's weights to the engines, and lets trainer and engines take turns on shared devices."""
        self.sync.run = SyncedRun(
            memory=memory,
            phase=self.phase,
            totals=self.totals,
            dedicated=parts.models.dedicated,
            monitor=parts.monitor,
        )
        self._sampler = GroupSampler(config, self, parts, self.sync, startup)
        self._limits = StepLimits(config.limits, parts.dtype)
        self._limits.skips_in_a_row = self._resumed.skips_in_a_row
        self._limits.mismatch.restore(self._resumed.mismatch)
        self._algorithm_state: dict[str, Any] = {}
        self._adaptive_kl = make_adaptive_kl(config.algorithm.kl_reward)
        if self._adaptive_kl is not None:
            self.register_state("kl", self._adaptive_kl)
        if self._sampler.gate is not None:
            self.register_state("difficulty", self._sampler.gate.solved)
        self._pending_critics: dict[str, WorkerFuture[TrainStats]] = {}
        self._updates = UpdateLog(config.run_dir, after=self._resumed.step, writes=not self._is_replay)

    @property
    def _is_replay(self) -> bool:
        """Whether the steps are those of another run, whose limits and engines have decided about them."""
        return self._replay_until is not None

    def begin(self) -> None:
        """Push the initial weights to the engines; evaluate once if the run starts from step 0."""
        with self._startup.phase("first weight sync"):
            self.sync.push(self._resumed.policy_version)
        self._sampler.begin_sampling()
        if self.step == 0 and not self.should_stop():
            self._sampler.evaluate()

    def steps(self) -> Iterator[list[Prompt]]:
        """Yield the prompts of each step, and advance `step` (counts from 1). Stops early on `should_stop`."""
        for step in range(self.step + 1, self.config.trainer.steps + 1):
            if self.checkpoints is not None:
                self.checkpoints.poll()
            if self.should_stop():
                return
            self.step = step
            self.timer.start_step()
            self._sampler.begin_step()
            yield self._sampler.step_prompts()

    def prompts(self) -> list[Prompt]:
        """Return the next `prompts_per_step` prompts of the training data, without those that are retired.

        Raises:
            DataError: all prompts are retired.
            ConfigError: the schedule samples ahead, and a step has begun.
        """
        return self._sampler.prompts()

    def serve(self, model: str = POLICY) -> None:
        """Let the engines sample with the weights of `policy`, or of a trained auxiliary model, until the step's end.

        Raises:
            ConfigError: engines cannot serve the model, or the schedule samples ahead with the policy.
        """
        if self._sampler.scheduled is not None and model != POLICY:
            raise ConfigError(
                f"schedule.type: needs sync, because {self.config.algorithm.type} lets engines serve the model "
                f"{model!r}, got {self.config.schedule.type}, which samples ahead with the policy"
            )
        self.sync.serve(None if model == POLICY else model)

    def sample(self, prompts: Sequence[Prompt], *, attempt: int = 0, greedy: bool = False) -> RolloutBatch:
        """Generate and score completions: `group_size` per prompt, or one with temperature 0 if `greedy`.

        Completions whose reward failed (`on_error: drop`) are not in the batch, which may therefore be empty. The
        methods below do nothing with an empty batch. A schedule that samples ahead may return other groups than those
        of `prompts`, which it has just begun. With `data.difficulty`, groups with other pass rates are replaced.

        Args:
            attempt: index of this call within the step, if a step samples several batches; it changes the seed.
        """
        return self._sampler.sample(prompts, attempt=attempt, greedy=greedy)

    def sample_kept(self, prompts: Sequence[Prompt], keep: Keep, *, max_batches: int | None = None) -> KeptSample:
        """Sample until `prompts_per_step` groups are kept, or `max_batches` batches were sampled.

        A synchronous run samples batch after batch; a schedule replaces each group that is not kept by the next prompt.

        Args:
            keep: whether to train on a group; it must depend on its rewards only.
            max_batches: None: one, or with a schedule `DEFAULT_MAX_BATCHES`.
        """
        return self._sampler.sample_kept(prompts, keep, max_batches=max_batches)

    def sample_with_baselines(self, prompts: Sequence[Prompt]) -> tuple[RolloutBatch, list[float]]:
        """Sample as `sample`; also return the reward of each group's greedy completion, without those that failed."""
        return self._sampler.sample_with_baselines(prompts)

    def add_logprobs(self, batch: RolloutBatch) -> None:
        """Add the column `old_logprobs`: token log-probs of the policy before the first update of the step."""
        if not batch.groups:
            return
        self.sync.begin_scoring()
        with self.phase("logprobs"):
            request = batch.forward_request(self.config)
            request = replace(request, records_routes=self.config.trainer.moe.router_replay == "R2")
            batch.columns["old_logprobs"] = self.trainer.logprobs(request)
            if request.records_routes:
                batch.routes = self.trainer.take_routes(request)

    def add_reference_logprobs(self, batch: RolloutBatch) -> None:
        """Add `ref_logprobs` if the algorithm uses a reference, and `old_logprobs` if the reward has a KL penalty."""
        if not batch.groups:
            return
        algorithm = self.config.algorithm
        if algorithm.kl_reward is not None:
            self.add_logprobs(batch)
        if algorithm.uses_reference:
            self.sync.begin_scoring("reference")
            with self.phase("reference"):
                reference = self.models.frozen["reference"]
                batch.columns["ref_logprobs"] = reference.logprobs(batch.forward_request(self.config))

    def add_model_logprobs(
        self, batch: RolloutBatch, model: str, column: ColumnName, *, phase: str | None = None
    ) -> None:
        """Add a column of token log-probs from an auxiliary language model; `phase` defaults to the model's name."""
        if not batch.groups:
            return
        self.sync.begin_scoring(model)
        with self.phase(phase or model):
            worker = self.models.trained.get(model) or self.models.frozen[model]
            batch.columns[column] = worker.logprobs(batch.forward_request(self.config))

    def add_values(self, batch: RolloutBatch, *, critic: str = "critic", column: ColumnName = "values") -> None:
        """Add a column of token values from a critic: V of the state before each token."""
        if not batch.groups:
            return
        self.sync.begin_scoring(critic)
        with self.phase("values"):
            batch.columns[column] = self.models.trained[critic].values(batch.forward_request(self.config))

    @property
    def kl_coefficient(self) -> float:
        """Current coefficient of the KL penalty in the reward; 0 without one."""
        return 0.0 if self._adaptive_kl is None else self._adaptive_kl.coefficient

    def estimate(
        self, estimator: Estimator, batch: RolloutBatch, *arguments: object, outputs: tuple[ColumnName, ...] = ()
    ) -> None:
        """Run `estimator(tokens, *arguments)` where the tokens are, in rollout workers; store its results in `batch`.

        Args:
            estimator: a module-level function, such as `group_estimates`. With `by_groups`, each worker runs it on some
                of the groups; otherwise one worker runs it on all. With `by_completions`, it runs here if it needs no
                tokens. They have the columns and scalars of `batch`.
            outputs: columns (per token) that it returns; scalars (per completion) and metrics need no declaration.
        """
        if not batch.groups:
            return
        with self.phase("estimate"):
            job = EstimateJob(
                estimator=estimator,
                arguments=arguments,
                keys_S=batch.kept.sequence_keys,
                groups_N=batch.kept.group_numbers,
                rewards_N=np.array(batch.rewards, np.float64),
                scalars={name: np.array(values, np.float64) for name, values in batch.scalars.items()},
                columns=dict(batch.columns),
                outputs=outputs,
                num_tokens=int(batch.kept.sequence_tokens.sum()),
                turn_weight=self._turn_weight,
            )
            reads_tokens = outputs or job.turn_weight is not None or self.config.algorithm.kl_reward is not None
            if is_by_completions(estimator) and not reads_tokens:
                summary = estimate_completions(job)
            else:
                summary, columns = self.rollout.estimate(job, batch.groups)
                batch.columns.update(columns)
        batch.scalars.update({name: values_N.tolist() for name, values_N in summary.scalars.items()})
        metrics = summary.metric_values
        self.step_metrics.update(metrics)
        if self._adaptive_kl is not None and KL_METRIC in metrics:
            self.step_metrics["kl/coefficient"] = self._adaptive_kl.coefficient

    @property
    def _turn_weight(self) -> float | None:
        """Weight of the environment's rewards, if advantages are per turn."""
        if self.config.algorithm.advantages_per != "turn":
            return None
        weights = self._sampler.weights.current
        environments = [name for name in self.config.reward.environments if name in weights]
        return sum(weights[name] for name in environments) if environments else None

    @override
    def should_stop(self) -> bool:
        return super().should_stop() or (self._replay_until is not None and self.step >= self._replay_until)

    def finish_pretraining_step(self, number: int, metrics: Mapping[str, float]) -> None:
        """Finish a step of critic pretraining: log `metrics` as `pretraining/...`, offload, reset the step metrics."""
        self._sampler.begin_sampling()
        self._tracker.log({f"pretraining/{name}": value for name, value in metrics.items()}, step=number)
        self.notify(f"pretraining {number}: " + "  ".join(f"{name} {value:.4f}" for name, value in metrics.items()))
        self._sampler.clear_step()

    def train_policy(self, batch: RolloutBatch, token_loss: TokenLoss, *, nll: float = 0.0) -> TrainStats | None:
        """Train the policy on the columns of the loss.

        A step that is repeated on the same groups skips and rejects the updates that it did before, whatever limits and
        engines say.

        Returns:
            Stats of the step; None if a limit skips the update, or no completion is left to train on.

        Args:
            token_loss: the loss per token; `algorithm.rollout_is`, `kl_loss`, `entropy_coefficient` and `aggregation`
                apply to it.
            nll: coefficient of the NLL term on completions with a positive reward, as in `PolicyLoss`.

        Raises:
            LimitError: a limit with action `stop` was exceeded, or too many steps in a row had no update.
        """
        batch_id, algorithm, reasons = batch_hash(batch.groups), self.config.algorithm, list[str]()
        if algorithm.mask_truncated_completions and batch.groups:
            batch = batch.without_truncated()
            if not batch.sample_indices:
                reasons.append("all completions were truncated (algorithm.mask_truncated_completions)")
        before = self._updates.find(self.step, batch_id)
        if before is None:
            why = self._check("sampled", batch.mean_reward, reasons) or self._check("estimated", self.step_metrics)
            record = StepUpdate(step=self.step, batch=batch_id, skipped=why)
        else:
            record = before
            self._limits.repeat(record.probe, is_skipped=bool(record.skipped))
            if record.skipped:
                self.notify(record.skipped)
        if not record.skipped:
            request = self.with_update_guard(batch.train_request(self.config, self.policy_loss(token_loss, nll=nll)))
            if batch.routes is not None:
                request = replace(request, columns={**request.columns, ROUTES: batch.routes})
            if before is None and request.versions is not None and not request.versions.num_current_tokens:
                probe = self._probe_engines()
                why = self._apply(self._limits.check_engines(probe, step=self.step))
                record = replace(record, probe=probe, skipped=why)
        self.add_metrics(record.probe)
        if record.skipped:
            self._updates.write(record)
            return None
        if before is not None:
            request = replace(request, guard=before.apply_guard(request.guard))
        self.sync.begin_training()
        with self.phase("train"), self._with_step_in_limit_errors():
            stats = self.trainer.train_step(self.with_profile(request, self.step))
        record = record.trained(stats, request.guard)
        if before is not None and record.outcome != before.outcome:
            self.notify(
                f"step {self.step}: {record.outcome}; before, {before.outcome}: the weights differ from here on"
            )
        self._updates.write(record)
        return stats

    def policy_loss(self, token_loss: TokenLoss, *, nll: float = 0.0) -> PolicyLoss:
        """Return the loss of `train_policy`, with which `train_model` trains another policy; arguments as there."""
        algorithm = self.config.algorithm
        return PolicyLoss(
            token_loss=token_loss,
            algorithm=algorithm,
            length_norm=algorithm.length_norm or self.config.rollout.max_new_tokens,
            nll=nll,
        )

    def _probe_engines(self) -> dict[str, float]:
        """Return the metrics of the mismatch between the trainer and a short completion of each engine."""
        if self._is_replay:
            return {}
        self._sampler.begin_sampling()
        with self.phase("probe"):
            return compare_engines(self.config, self.trainer, self._sampler.probe(PROBE_TOKENS))

    def train_critic(
        self,
        batch: RolloutBatch,
        config: CriticConfig,
        *,
        critic: str = "critic",
        values: ColumnName = "values",
        returns: ColumnName = "returns",
    ) -> None:
        """Train a critic on the returns; its metrics are `<critic>/...`.

        A critic on dedicated slots trains in the background, in parallel with the policy, until `finish_critics` or the
        end of the step.

        Args:
            critic: name of the model.
            values: column with its old values.
            returns: column with its targets.
        """
        if not batch.groups:
            return
        self.sync.begin_update(critic)
        names = {"values": values, "returns": returns}
        request = batch.train_request(self.config, ValueLoss(clip=config.clip), names)
        self._pending_critics[critic] = self.models.trained[critic].begin_train_step(
            self.with_update_guard(request, critic)
        )
        if critic not in self.models.dedicated:
            self.finish_critics()

    def train_model(self, batch: RolloutBatch, model: str, loss: Loss) -> None:
        """Train an auxiliary language model on the columns of the loss; its metrics are `<model>/...`."""
        if not batch.groups:
            return
        request = self.with_update_guard(batch.train_request(self.config, loss), model)
        self.sync.begin_update(model)
        with self.phase(f"train_{model}"), self._with_step_in_limit_errors():
            stats = self.models.trained[model].train_step(request)
        self.add_metrics({f"{model}/{name}": value for name, value in stats.metrics.items()})

    def finish_critics(self) -> None:
        """Wait for critics training in the background and add their metrics."""
        for critic, pending in self._pending_critics.items():
            with self.phase(f"train_{critic}"), self._with_step_in_limit_errors():
                stats = pending.result()
            self.add_metrics({f"{critic}/{name}": value for name, value in stats.metrics.items()})
        self._pending_critics.clear()

    def finish_step(self, batch: RolloutBatch, stats: TrainStats | None) -> None:
        """Finish the step: checkpoint, offload, sync weights, log metrics, and evaluate when due.

        Args:
            stats: stats of the policy update; None: the policy was not trained.

        Raises:
            LimitError: a limit with action `stop` was exceeded.
        """
        if stats is not None:
            self._adapt_kl(len(batch.keys))
        if self.checkpoints is not None and (self.checkpoints.is_due(self.step) or self._is_last()):
            self.finish_critics()
            self.add_metrics(self.begin_save(self.checkpoints))
        self._push(trained=stats is not None)
        self._sampler.begin_sampling()
        self.finish_critics()
        if self.config.tracking.rollouts:
            self.rollout.record(self.step, batch.all_groups, batch.logged_advantages)
        every = self.config.trainer.eval_every
        due = self.step == self.config.trainer.steps or (every > 0 and self.step % every == 0)
        self._log_step(batch_metrics(batch) | term_metrics(batch, self._sampler.weights.current), stats)
        if due:
            self._sampler.evaluate()
        if self.checkpoints is not None:
            self.checkpoints.add_state(self.state)
        checkpoint = self.config.checkpoint
        if checkpoint.every == 0 and checkpoint.keep_journal == "needed":  # only groups in flight can be used again
            remove_journal(self.config, self.state())
        if self._restart_budget is not None:
            self._restart_budget.mark_step_done(self.step)

    def _push(self, *, trained: bool) -> None:
        """Push the weights of the step, if it has any; a schedule then samples with them."""
        scheduled = self._sampler.scheduled
        if scheduled is None:
            if trained:
                self.sync.push(self.step)
            else:
                self.sync.serve(None)
            return
        drained = True
        try:
            with self.phase("drain"):
                scheduled.prepare_push()
        except OutdatedEngineError as error:
            self.notify(f"step {self.step}: {error}: groups in flight continue with them")
            drained = False
        try:
            if trained:
                self.rollout.pause_clocks()
                self.sync.push(self.step)
            scheduled.finish_push(self.sync.policy_version, drained=drained)
            self._sampler.begin_sampling()
        finally:
            self.rollout.resume_clocks()  # the workers outlive a recovery from a push that failed

    def _is_last(self) -> bool:
        """Whether this is the last step, as far as known: it is then saved before the trainer is offloaded."""
        return self.step == self.config.trainer.steps or self.should_stop()

    def _log_step(self, metrics: Mapping[str, float], stats: TrainStats | None) -> None:
        times = self.timer.take()
        seconds = times["time/step_seconds"]
        stragglers = {} if self.monitor is None else self.monitor.record_step(seconds)
        train_metrics = {} if stats is None else stats.metrics
        if RATIO_MEAN in train_metrics:
            train_metrics["drift/ess"] = train_metrics[RATIO_MEAN] ** 2 / train_metrics[RATIO_SQUARE_MEAN]
        tokens = 0 if stats is None else stats.num_tokens
        self.totals.add_step(tokens=tokens, seconds=seconds, mismatch=train_metrics.get(LOGPROB_MISMATCH, 0.0))
        sync_metrics = {} if stats is None else self.sync.metrics
        metrics = {
            **metrics,
            **train_metrics,
            **self.step_metrics,
            **sync_metrics,
            **times,
            **stragglers,
            "tokens_per_second": tokens / seconds,
            # shows whether the controller accumulates data; it must only pass references on
            "controller/rss_bytes": psutil.Process().memory_info().rss,
        }
        self.log(metrics, StepSummary.of(metrics, step=self.step))
        self._sampler.clear_step()
        self._check("trained", train_metrics)

    def _check(self, stage: StepStage, metrics: Mapping[str, float], reasons: Sequence[str] = ()) -> str:
        """Check the metrics against the limits, report violations, and return why to skip the update; empty: it is not.

        Args:
            reasons: further reasons to skip it.

        Raises:
            LimitError: a limit with action `stop` was exceeded.
        """
        return self._apply(self._limits.check(stage, metrics, step=self.step, reasons=reasons))

    def _apply(self, decision: LimitDecision) -> str:
        """Report the decision; return why to skip the update, empty: it is not. Raises LimitError for `stop`."""
        if decision.action == "stop" and self._is_replay:  # the run has finished the step nevertheless
            decision = replace(decision, action="warn")
        if decision.action == "stop":
            raise LimitError(decision.message)
        if decision.action != "none":
            self.notify(decision.message)
        return decision.message if decision.action == "skip" else ""

    def with_update_guard(self, request: TrainRequest, model: str = "") -> TrainRequest:
        """Attach the update guard (NaN, grad-norm, log-prob mismatch) to a training request.

        Args:
            model: name of the auxiliary model trained; empty for the policy.
        """
        return replace(request, guard=self._limits.guard(self.config.run_dir, self.step, model=model))

    @contextmanager
    def _with_step_in_limit_errors(self) -> Iterator[None]:
        """Prefix the step to the message of a `LimitError` raised by a trainer."""
        try:
            yield
        except LimitError as error:
            raise LimitError(f"step {self.step}: {error}") from error

    def _adapt_kl(self, num_samples: int) -> None:
        """Adapt the KL coefficient to its target, if there is one; called only after a policy update."""
        kl = self.config.algorithm.kl_reward
        if self._adaptive_kl is not None and kl is not None and kl.target is not None:
            self._adaptive_kl.update(self.step_metrics[KL_METRIC], num_samples)

    @override
    def begin_save(self, checkpoints: Checkpointer) -> dict[str, float]:
        self.sync.begin_update()  # a save needs all state of the trainer, which it brings to the device itself
        return super().begin_save(checkpoints)

    @override
    def state(self) -> RunState:
        self._updates.begin_file()
        return replace(
            super().state(),
            policy_version=self.sync.policy_version,
            **self._sampler.schedule_state(),
            algorithm_state={name: asdict(state) for name, state in self._algorithm_state.items()},
            skips_in_a_row=self._limits.skips_in_a_row,
            mismatch=dict(self._limits.mismatch.history),
            reward_weights=dict(self._sampler.weights.current),
        )

    def register_state(self, name: str, state: D) -> D:
        """Register algorithm state for checkpointing; on resume, restore its fields in place. Return `state`.

        Args:
            name: key of the state in the checkpoint.
            state: a dataclass of JSON values that changes from step to step.
        """
        for field, value in self._resumed.algorithm_state.get(name, {}).items():
            setattr(state, field, value)
        self._algorithm_state[name] = state
        return state

    def abort(self) -> None:
        """Discard the unfinished checkpoint and close the metrics; the run will resume from its last checkpoint."""
        if self._sampler.scheduled is not None:
            self._sampler.scheduled.close()
        if self.checkpoints is not None:
            self.checkpoints.discard()
        self.close()

    def finish(self) -> RunSummary:
        """Flush rollout records, write `summary.json`, close the metrics. Return the summary."""
        if self._sampler.scheduled is not None:
            self._sampler.scheduled.close()
        self.rollout.flush_records()
        totals = self.totals.snapshot(self.timer)
        summary = totals.summary(step=self.step, steps_planned=self.config.trainer.steps)
        require_lock(self.config.run_dir)
        summary.write(Path(self.config.run_dir) / "summary.json")
        self.close()
        return summary
