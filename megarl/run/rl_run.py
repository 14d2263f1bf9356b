"""The interface that RL training loops are written with.

One step of a loop: `sample`, `add_reference_logprobs` / `add_values`, `estimate`, `train_critic`, `train_policy`,
`finish_step`. All of them work on a `RolloutBatch`; tokens stay in the workers, the controller passes references on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeVar

import psutil
from typing_extensions import override

from megarl.batch.pack import ColumnName
from megarl.batch.trajectory import Prompt
from megarl.checkpoint.run_lock import require_lock
from megarl.config import RunConfig
from megarl.config.algorithms.model_sections import CriticConfig
from megarl.errors import LimitError
from megarl.functional import AdaptiveKl
from megarl.groups.auxiliary_models import AuxiliaryModels
from megarl.groups.estimation import EstimateJob, Estimator
from megarl.groups.rollout_group import RolloutGroup
from megarl.groups.trainer_group import TrainerGroup
from megarl.groups.weight_sync import WeightSync
from megarl.megatron.losses.loss import Loss, TokenLoss
from megarl.megatron.losses.policy import PolicyLoss
from megarl.megatron.losses.supervised import ValueLoss
from megarl.megatron.requests import LOGPROB_MISMATCH, TrainRequest, TrainStats
from megarl.rollout.engine import Sampling
from megarl.run.checkpointer import Checkpointer
from megarl.run.evaluation import greedy_score
from megarl.run.events import EventLog
from megarl.run.kl_penalty import KL_METRIC
from megarl.run.rollout_batch import RolloutBatch, batch_metrics
from megarl.run.run_state import RunState
from megarl.run.stage_run import StageRun
from megarl.run.step_limits import StepLimits, StepStage, make_guard
from megarl.supervision.restart_budget import RestartBudget
from megarl.supervision.run_monitor import RunMonitor
from megarl.tracking.phases import PhaseTimer
from megarl.tracking.progress import StepSummary
from megarl.tracking.startup import Startup
from megarl.tracking.summary import RunSummary
from megarl.workers.group import WorkerFuture

D = TypeVar("D")


class RLRun(StageRun):
    """One RL run: its worker groups, models, prompts, metrics and totals."""

    def __init__(
        self,
        config: RunConfig,
        events: EventLog,
        timer: PhaseTimer,
        startup: Startup,
        *,
        trainer: TrainerGroup,
        models: AuxiliaryModels,
        rollout: RolloutGroup,
        weights: WeightSync,
        prompts: Sequence[Prompt],
        held_out: Sequence[Prompt],
        checkpoints: Checkpointer | None = None,
        resumed: RunState | None = None,
        restart_budget: RestartBudget | None = None,
        monitor: RunMonitor | None = None,
    ) -> None:
        """Args:
        trainer: the policy's trainer ranks.
        models: auxiliary models: reference, critics, reward models, teacher.
        rollout: the rollout engines and the workers that hold trajectories.
        weights: syncs the policy's weights to the engines.
        held_out: prompts to evaluate on; may be empty.
        checkpoints: saves the run; None: no checkpoints.
        resumed: state to resume from; its models have been loaded already.
        restart_budget: restart counter, notified of each finished step; None: not counted.
        monitor: heartbeat, phase timeouts and straggler detection of the run.
        """
        super().__init__(
            config,
            events,
            timer,
            num_rows=len(prompts),
            checkpoints=checkpoints,
            resumed=resumed,
            monitor=monitor,
        )
        self.config, self.trainer, self.models, self.rollout = config, trainer, models, rollout
        self._weights, self._prompts, self._held_out = weights, prompts, held_out
        s = config.rollout.sampling
        self.sampling = Sampling(
            temperature=s.temperature, top_p=s.top_p, top_k=s.top_k, max_new_tokens=config.rollout.max_new_tokens
        )
        self._startup, self._is_startup_reported = startup, resumed is not None
        self._restart_budget = restart_budget
        self._algorithm_state: dict[str, Any] = {}
        self._limits = StepLimits(config.limits)
        self._limits.skips_in_a_row = self._resumed.skips_in_a_row
        self._adaptive_kl = _make_adaptive_kl(config)
        if self._adaptive_kl is not None:
            self.register_state("kl", self._adaptive_kl)
        self._pending_critics: dict[str, WorkerFuture[TrainStats]] = {}
        self._step_metrics: dict[str, float] = {}
        self._sync_metrics: dict[str, float] = {}

    @override
    def state(self) -> RunState:
        return replace(
            super().state(),
            policy_version=self._weights.policy_version,
            algorithm_state={name: asdict(state) for name, state in self._algorithm_state.items()},
            skips_in_a_row=self._limits.skips_in_a_row,
        )

    def register_state(self, name: str, state: D) -> D:
        """Register algorithm state for checkpointing; on resume, restore its fields in place. Return `state`.

        Args:
            name: key of the state in the checkpoint.
            state: a dataclass of numbers that changes from step to step.
        """
        for field, value in self._resumed.algorithm_state.get(name, {}).items():
            setattr(state, field, value)
        self._algorithm_state[name] = state
        return state

    def begin(self) -> None:
        """Push the initial weights to the engines; evaluate once if the run starts from step 0."""
        with self._startup.phase("first weight sync"):
            self._sync_weights(policy_version=self._resumed.policy_version)
        self._offload()
        if self.step == 0 and not self.should_stop():
            self._evaluate()

    def steps(self) -> Iterator[list[Prompt]]:
        """Yield the prompts of each step, and advance `step` (counts from 1). Stops early on `should_stop`."""
        for step in range(self.step + 1, self.config.trainer.steps + 1):
            if self._checkpoints is not None:
                self._checkpoints.poll()
            if self.should_stop():
                return
            self.step = step
            self.timer.start_step()
            yield self.prompts()

    def prompts(self) -> list[Prompt]:
        """Return the next `prompts_per_step` prompts of the training data."""
        return [self._prompts[i] for i in self._sampler.take(self.config.algorithm.prompts_per_step)]

    def sample(self, prompts: Sequence[Prompt], *, attempt: int = 0, greedy: bool = False) -> RolloutBatch:
        """Generate and score completions: `group_size` per prompt, or one with temperature 0 if `greedy`.

        Completions whose reward failed (`on_error: drop`) are not in the batch, which may therefore be empty. The
        methods below do nothing with an empty batch.

        Args:
            attempt: index of this call within the step, if a step samples several batches; it changes the seed.
        """
        label = f"step-{self.step}" + (f"-{attempt}" if attempt else "") + ("-greedy" if greedy else "")
        with self.phase("rollout"):
            groups = self.rollout.collect(
                prompts,
                num_samples=1 if greedy else self.config.algorithm.group_size,
                sampling=replace(self.sampling, temperature=0.0) if greedy else self.sampling,
                label=label,
                seed=(self.config.seed, self.step, *([attempt] if attempt else [])),
            )
        self._report_startup()
        needs_group = self.config.algorithm.needs_group and not greedy
        batch = RolloutBatch.from_sampled(groups, min_completions=2 if needs_group else 1)
        for name, num in batch.dropped_metrics().items():  # a step may sample several batches
            self._step_metrics[name] = self._step_metrics.get(name, 0.0) + num
        self._add_model_rewards(batch)
        return batch

    def _add_model_rewards(self, batch: RolloutBatch) -> None:
        """Score the batch with the reward models and recompute the total rewards; costs do not count as reward."""
        cost_terms, scorers = self.config.algorithm.cost_terms, self.models.scorers
        if not batch.groups or not (scorers or cost_terms):
            return
        request, values = batch.forward_request(self.config), {}
        for name, scorer in scorers.items():
            with self.phase("score"):
                scores = scorer.scores(request)
            values[name] = [scores[key] for key in batch.keys]
        weights = {name: term.weight for name, term in self.config.reward.terms.items() if name not in cost_terms}
        batch.add_rewards(values, weights)

    def add_logprobs(self, batch: RolloutBatch) -> None:
        """Add the column `old_logprobs`: token log-probs of the policy before the first update of the step."""
        if not batch.groups:
            return
        with self.phase("logprobs"):
            batch.columns["old_logprobs"] = self.trainer.logprobs(batch.forward_request(self.config))

    def add_reference_logprobs(self, batch: RolloutBatch) -> None:
        """Add `ref_logprobs` if the algorithm uses a reference, and `old_logprobs` if the reward has a KL penalty."""
        if not batch.groups:
            return
        algorithm = self.config.algorithm
        if algorithm.kl_reward is not None:
            self.add_logprobs(batch)
        if algorithm.uses_reference:
            with self.phase("reference"):
                reference = self.models.frozen["reference"]
                batch.columns["ref_logprobs"] = reference.logprobs(batch.forward_request(self.config))

    def add_model_logprobs(
        self, batch: RolloutBatch, model: str, column: ColumnName, *, phase: str | None = None
    ) -> None:
        """Add a column of token log-probs from an auxiliary language model; `phase` defaults to the model's name."""
        if not batch.groups:
            return
        with self.phase(phase or model):
            worker = self.models.trained.get(model) or self.models.frozen[model]
            batch.columns[column] = worker.logprobs(batch.forward_request(self.config))

    def add_values(self, batch: RolloutBatch, *, critic: str = "critic", column: ColumnName = "values") -> None:
        """Add a column of token values from a critic: V of the state before each token."""
        if not batch.groups:
            return
        with self.phase("values"):
            batch.columns[column] = self.models.trained[critic].values(batch.forward_request(self.config))

    @property
    def kl_coefficient(self) -> float:
        """Current coefficient of the KL penalty in the reward; 0 without one."""
        return 0.0 if self._adaptive_kl is None else self._adaptive_kl.coefficient

    def estimate(
        self, estimator: Estimator, batch: RolloutBatch, *arguments: object, outputs: tuple[ColumnName, ...] = ()
    ) -> None:
        """Run `estimator(tokens, *arguments)` in a rollout worker, where the tokens are; store its results in `batch`.

        Args:
            estimator: a module-level function, such as `group_estimates`.
            outputs: columns (per token) that it returns; scalars (per completion) and metrics need no declaration.
        """
        if not batch.groups:
            return
        with self.phase("estimate"):
            job = EstimateJob(
                estimator=estimator,
                arguments=arguments,
                keys=tuple(batch.keys),
                rewards=tuple(batch.rewards),
                columns=dict(batch.columns),
                outputs=outputs,
            )
            output, columns = self.rollout.estimate(job, batch.groups)
        batch.columns.update(columns)
        batch.scalars.update(output.scalars)
        self._step_metrics.update(output.metrics)
        if self._adaptive_kl is not None and KL_METRIC in output.metrics:
            self._step_metrics["kl/coefficient"] = self._adaptive_kl.coefficient

    def add_metrics(self, metrics: Mapping[str, float]) -> None:
        """Add metrics to the log of this step."""
        self._step_metrics.update(metrics)

    def metric(self, name: str) -> float:
        """Return a metric added in this step."""
        return self._step_metrics[name]

    def finish_pretraining_step(self, number: int, metrics: Mapping[str, float]) -> None:
        """Finish a step of critic pretraining: log `metrics` as `pretraining/...`, offload, reset the step metrics."""
        self._offload()
        self._tracker.log({f"pretraining/{name}": value for name, value in metrics.items()}, step=number)
        self.notify(f"pretraining {number}: " + "  ".join(f"{name} {value:.4f}" for name, value in metrics.items()))
        self._step_metrics.clear()

    def train_policy(self, batch: RolloutBatch, token_loss: TokenLoss, *, nll: float = 0.0) -> TrainStats | None:
        """Train the policy on the columns of the loss; return None if a limit skips the update, or the batch is empty.

        Args:
            token_loss: the loss per token; `algorithm.rollout_is`, `kl_loss` and `aggregation` apply to it.
            nll: coefficient of the NLL term on completions with a positive reward, as in `PolicyLoss`.

        Raises:
            LimitError: a limit with action `stop` was exceeded, or too many steps in a row had no update.
        """
        if self._skips_update("sampled", batch_metrics(batch)) or self._skips_update("estimated", self._step_metrics):
            return None
        algorithm = self.config.algorithm
        loss = PolicyLoss(
            token_loss=token_loss,
            algorithm=algorithm,
            length_norm=algorithm.length_norm or self.config.rollout.max_new_tokens,
            nll=nll,
        )
        request = batch.train_request(self.config, loss)
        self._onload()
        with self.phase("train"), self._with_step_in_limit_errors():
            return self.trainer.train_step(self.with_update_guard(request))

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
        """Finish the step: sync weights, checkpoint, offload, log metrics, and evaluate when due.

        Args:
            stats: stats of the policy update; None: the policy was not trained.

        Raises:
            LimitError: a limit with action `stop` was exceeded.
        """
        if stats is not None:
            self._sync_weights(policy_version=self.step)
            self._adapt_kl(len(batch.keys))
        if self._checkpoints is not None and (self._checkpoints.is_due(self.step) or self._is_last()):
            self.finish_critics()
            self.add_metrics(self.begin_save(self._checkpoints))
        self._offload()
        self.finish_critics()
        if self.config.tracking.rollouts:
            self.rollout.record(self.step, batch.all_groups, batch.logged_advantages)
        every = self.config.trainer.eval_every
        due = self.step == self.config.trainer.steps or (every > 0 and self.step % every == 0)
        self._log_step(batch_metrics(batch), stats)
        if due:
            self._evaluate()
        if self._checkpoints is not None:
            self._checkpoints.add_state(self.state)
        if self._restart_budget is not None:
            self._restart_budget.mark_step_done(self.step)

    def _is_last(self) -> bool:
        """Whether this is the last step, as far as known: it is then saved before the trainer is offloaded."""
        return self.step == self.config.trainer.steps or self.should_stop()

    def _log_step(self, metrics: Mapping[str, float], stats: TrainStats | None) -> None:
        times = self.timer.take()
        seconds = times["time/step_seconds"]
        stragglers = {} if self.monitor is None else self.monitor.record_step(seconds)
        train_metrics = {} if stats is None else stats.metrics
        tokens = 0 if stats is None else stats.num_tokens
        self.totals.add_step(tokens=tokens, seconds=seconds, mismatch=train_metrics.get(LOGPROB_MISMATCH, 0.0))
        rate = tokens / seconds
        sync_metrics = {} if stats is None else self._sync_metrics
        self.log(
            {
                **metrics,
                **train_metrics,
                **self._step_metrics,
                **sync_metrics,
                **times,
                **stragglers,
                **self._controller_metrics(rate),
            },
            StepSummary(
                step=self.step,
                seconds=seconds,
                reward=metrics.get("reward/mean"),
                loss=train_metrics.get("loss"),
                tokens_per_second=rate if tokens else None,
                weight_sync_seconds=sync_metrics.get("weight_sync/seconds"),
                weight_sync_bytes=int(sync_metrics["weight_sync/bytes"]) if sync_metrics else None,
            ),
        )
        self._step_metrics.clear()
        self._skips_update("trained", train_metrics)

    def _skips_update(self, stage: StepStage, metrics: Mapping[str, float]) -> bool:
        """Check the metrics against the limits, report violations, and return whether to skip the policy update.

        Raises:
            LimitError: a limit with action `stop` was exceeded.
        """
        decision = self._limits.check(stage, metrics, step=self.step)
        if decision.action == "stop":
            raise LimitError(decision.message)
        if decision.action != "none":
            self.notify(decision.message)
        return decision.action == "skip"

    def with_update_guard(self, request: TrainRequest, model: str = "") -> TrainRequest:
        """Attach the update guard (NaN, grad-norm, log-prob mismatch) to a training request.

        Args:
            model: name of the auxiliary model trained; empty for the policy.
        """
        return replace(request, guard=make_guard(self.config.limits, self.config.run_dir, self.step, model=model))

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
            self._adaptive_kl.update(self._step_metrics[KL_METRIC], num_samples)

    def _sync_weights(self, policy_version: int) -> None:
        """Push the trainer's weights to the engines, and record the time and bytes of the sync."""
        with self.phase("weight_sync"):
            report = self._weights.push(policy_version)
        if self.monitor is not None:
            self.monitor.heartbeat.pushed(policy_version)
        self.totals.weight_sync_bytes += report.bytes_moved
        self._sync_metrics = {
            "weight_sync/seconds": sum(report.seconds.values()),
            "weight_sync/bytes": report.bytes_moved,
            "weight_sync/buckets": report.stats.buckets,
            **{f"weight_sync/{name}_seconds": seconds for name, seconds in report.seconds.items()},
        }

    def _offload(self) -> None:
        """Offload trainer state as configured by `trainer.offload`, to free device memory for the engines."""
        if not self.trainer.offload_config.is_enabled:
            return
        with self.phase("offload"):
            stats = self.trainer.offload()
        self.add_metrics({"offload/device_bytes_freed": stats.device_bytes, "offload/host_bytes": stats.host_bytes})

    def _onload(self) -> None:
        """Load the offloaded trainer state back onto the devices."""
        if self.trainer.offload_config.is_enabled:
            with self.phase("onload"):
                self.trainer.onload()

    def _evaluate(self) -> None:
        """Generate greedily for the held-out prompts; log the mean of `reward.eval_term` as `eval/<term>`."""
        if not self._held_out:
            return
        with self.phase("evaluate"):
            evaluation = greedy_score(self.config, self.rollout, self._held_out, label=f"evaluate-{self.step}")
        self._report_startup()
        term, num = self.config.reward.eval_name, len(self._held_out)
        dropped = {"eval/dropped": float(evaluation.num_dropped)} if evaluation.num_dropped else {}
        if dropped:
            self.notify(
                f"step {self.step}: eval {term} failed on {evaluation.num_dropped} of {num} held-out prompts, which do "
                "not count"
            )
        if evaluation.score is None:
            self.log(dropped)
            return
        self.totals.evaluations[self.step] = evaluation.score
        self.log({f"eval/{term}": evaluation.score, **dropped})
        self.notify(f"step {self.step}: eval {term} {evaluation.score:.3f} on {num} held-out prompts")

    def _report_startup(self) -> None:
        """After the first completions: write `startup.json` and report the startup time by phase. Runs once."""
        if self._is_startup_reported:
            return
        self._is_startup_reported = True
        report = self._startup.finish("first completion", self.rollout.first_completion_time())
        report.write(Path(self.config.run_dir) / "startup.json")
        self.notify(report.line)

    def _controller_metrics(self, tokens_per_second: float) -> dict[str, float]:
        # RSS shows whether the controller accumulates data; it must only pass references on.
        return {"tokens_per_second": tokens_per_second, "controller/rss_bytes": psutil.Process().memory_info().rss}

    def abort(self) -> None:
        """Discard the unfinished checkpoint and close the metrics; the run will resume from its last checkpoint."""
        if self._checkpoints is not None:
            self._checkpoints.discard()
        self.close()

    def finish(self) -> RunSummary:
        """Flush rollout records, write `summary.json`, close the metrics. Return the summary."""
        self.rollout.flush_records()
        totals = self.totals.snapshot(self.timer)
        summary = totals.summary(step=self.step, steps_planned=self.config.trainer.steps)
        require_lock(self.config.run_dir)
        summary.write(Path(self.config.run_dir) / "summary.json")
        self.close()
        return summary


def _make_adaptive_kl(config: RunConfig) -> AdaptiveKl | None:
    kl = config.algorithm.kl_reward
    if kl is None:
        return None
    return AdaptiveKl(coefficient=kl.coefficient, target=kl.target or 1.0, horizon=kl.horizon)
