"""A reinforcement-learning run: what every algorithm's loop is written with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeVar

import psutil

from megarl.batch.pack import Column
from megarl.batch.trajectory import Prompt
from megarl.config import RunConfig
from megarl.config.algorithms.algorithm import CriticConfig, SafeRlhfConfig
from megarl.errors import LimitError
from megarl.functional import AdaptiveKl
from megarl.groups.auxiliary_models import Models
from megarl.groups.estimation import EstimateJob, Estimator
from megarl.groups.rollout_group import RolloutGroup
from megarl.groups.trainer_group import TrainerGroup
from megarl.groups.weight_sync import WeightSync
from megarl.megatron.requests import MISMATCH, ReturnsLoss, SurrogateLoss, TrainStats, TrainWork
from megarl.rollout.engine import Sampling
from megarl.run.checkpointer import Checkpointer
from megarl.run.evaluation import greedy_score
from megarl.run.events import EventLog
from megarl.run.kl_penalty import KL
from megarl.run.rollout_batch import Experience, metrics_of
from megarl.run.run_state import RunState
from megarl.run.stage_run import StageRun
from megarl.run.step_limits import Stage, StepLimits, guard_of
from megarl.supervision.restart_budget import Restarts
from megarl.supervision.run_monitor import Vigil
from megarl.tracking.phases import PhaseTimer
from megarl.tracking.progress import StepLine
from megarl.tracking.startup import Startup
from megarl.tracking.summary import RunSummary
from megarl.workers.group import Pending

D = TypeVar("D")


class PolicyRun(StageRun):
    """Groups, models, data and books of one run."""

    def __init__(
        self,
        config: RunConfig,
        events: EventLog,
        timer: PhaseTimer,
        startup: Startup,
        *,
        trainer: TrainerGroup,
        models: Models,
        rollout: RolloutGroup,
        weights: WeightSync,
        prompts: Sequence[Prompt],
        held_out: Sequence[Prompt],
        checkpoints: Checkpointer | None = None,
        resumed: RunState | None = None,
        restarts: Restarts | None = None,
        vigil: Vigil | None = None,
    ) -> None:
        """Args:
        checkpoints: where the run is saved.
        resumed: what it goes on from, its models having been loaded.
        restarts: counted between finished steps.
        vigil: watches over the run.
        """
        super().__init__(
            config,
            events,
            timer,
            num_rows=len(prompts),
            checkpoints=checkpoints,
            resumed=resumed,
            vigil=vigil,
        )
        self.config, self.trainer, self.models, self.rollout = config, trainer, models, rollout
        self._weights, self._prompts, self._held_out = weights, prompts, held_out
        s = config.rollout.sampling
        self.sampling = Sampling(
            temperature=s.temperature, top_p=s.top_p, top_k=s.top_k, max_new_tokens=config.rollout.max_new_tokens
        )
        self._startup, self._is_started = startup, resumed is not None
        self._restarts = restarts
        self._carried: dict[str, Any] = {}
        self._limits = StepLimits(config.limits)
        self._limits.skips_in_a_row = self._resumed.skips_in_a_row
        self._kl = _kl_state(config)
        if self._kl is not None:
            self.carry("kl", self._kl)
        self._training: dict[str, Pending[TrainStats]] = {}
        self._step_metrics: dict[str, float] = {}
        self._sync_metrics: dict[str, float] = {}

    def state(self) -> RunState:
        """See `StageRun`."""
        return replace(
            super().state(),
            policy_version=self._weights.policy_version,
            carried={name: asdict(state) for name, state in self._carried.items()},
            skips_in_a_row=self._limits.skips_in_a_row,
        )

    def carry(self, name: str, state: D) -> D:
        """`state`, a dataclass of numbers that changes from step to step: saved with the run, and here as it was."""
        for field, value in self._resumed.carried.get(name, {}).items():
            setattr(state, field, value)
        self._carried[name] = state
        return state

    def begin(self) -> None:
        """Give the engines the first weights, and see how good they are where that is not known."""
        with self._startup.phase("first weight sync"):
            self._push_weights(policy_version=self._resumed.policy_version)
        self._offload()
        if self.step == 0 and not self.ends_early():
            self._evaluate()

    def steps(self) -> Iterator[list[Prompt]]:
        """The prompts of each step; `step` counts from 1, and ends before the last one where `ends_early`."""
        for step in range(self.step + 1, self.config.trainer.steps + 1):
            if self._checkpoints is not None:
                self._checkpoints.poll()
            if self.ends_early():
                return
            self.step = step
            self.timer.start_step()
            yield self.prompts()

    def prompts(self) -> list[Prompt]:
        """As many as a step samples, the next of the data."""
        return [self._prompts[i] for i in self._sampler.take(self.config.algorithm.prompts_per_step)]

    def sample(self, prompts: Sequence[Prompt], *, attempt: int = 0, greedy: bool = False) -> Experience:
        """`group_size` completions of each, or the greedy one, with their rewards.

        Args:
            attempt: of several samplings in a step, the number.
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
        self._tell_start()
        batch = Experience(groups=groups)
        self._add_model_rewards(batch)
        return batch

    def _add_model_rewards(self, batch: Experience) -> None:
        """What reward models say, and costs apart from rewards."""
        algorithm, scorers = self.config.algorithm, self.models.scorers
        apart = {algorithm.cost_term} if isinstance(algorithm, SafeRlhfConfig) else set()
        if not scorers and not apart:
            return
        work, values = batch.evaluation_work(self.config), {}
        for name, scorer in scorers.items():
            with self.phase("score"):
                scores = scorer.scores(work)
            values[name] = [scores[key] for key in batch.keys]
        weights = {name: term.weight for name, term in self.config.reward.terms.items() if name not in apart}
        batch.add_rewards(values, weights)

    def add_logprobs(self, batch: Experience) -> None:
        """`old_logprobs`: the policy's, before the step's first update."""
        with self.phase("logprobs"):
            batch.columns["old_logprobs"] = self.trainer.logprobs(batch.evaluation_work(self.config))

    def add_reference(self, batch: Experience) -> None:
        """`ref_logprobs`, where the algorithm measures from a reference; for rewards `old_logprobs` too."""
        algorithm = self.config.algorithm
        if algorithm.kl_reward is not None:
            self.add_logprobs(batch)
        if algorithm.uses_reference:
            with self.phase("reference"):
                reference = self.models.frozen["reference"]
                batch.columns["ref_logprobs"] = reference.logprobs(batch.evaluation_work(self.config))

    def add_values(self, batch: Experience, *, critic: str = "critic", column: Column = "values") -> None:
        """What a critic expects before each token."""
        with self.phase("values"):
            batch.columns[column] = self.models.trained[critic].values(batch.evaluation_work(self.config))

    @property
    def kl_coefficient(self) -> float:
        """Of the penalty in the reward, as it is now."""
        return 0.0 if self._kl is None else self._kl.coefficient

    def estimate(
        self, estimator: Estimator, batch: Experience, *arguments: object, gives: tuple[Column, ...] = ()
    ) -> None:
        """Run `estimator(tokens, *arguments)` where the tokens are; the batch gets its scalars, and columns `gives`."""
        with self.phase("estimate"):
            job = EstimateJob(
                estimator=estimator,
                arguments=arguments,
                rewards=tuple(batch.rewards),
                columns=dict(batch.columns),
                gives=gives,
            )
            found, columns = self.rollout.estimate(job, batch.groups)
        batch.columns.update(columns)
        batch.scalars.update(found.scalars)
        self._step_metrics.update(found.metrics)
        if self._kl is not None and KL in found.metrics:
            self._step_metrics["kl/coefficient"] = self._kl.coefficient

    def note(self, metrics: Mapping[str, float]) -> None:
        """Log these with the step."""
        self._step_metrics.update(metrics)

    def noted(self, name: str) -> float:
        """A metric of the step so far."""
        return self._step_metrics[name]

    def log_pretraining(self, number: int, metrics: Mapping[str, float]) -> None:
        """End one step of a critic that learns before the policy does."""
        self._offload()
        self._tracker.log({f"pretraining/{name}": value for name, value in metrics.items()}, step=number)
        self.say(f"pretraining {number}: " + "  ".join(f"{name} {value:.4f}" for name, value in metrics.items()))
        self._step_metrics.clear()

    def train_policy(self, batch: Experience, *, nll: float = 0.0) -> TrainStats | None:
        """Follow `advantages`; None where a limit says that the step leaves the policy as it is.

        Args:
            nll: as in `SurrogateLoss`.

        Raises:
            LimitError: a limit ends the run.
        """
        if self._skips("sampled", metrics_of(batch)) or self._skips("estimated", self._step_metrics):
            return None
        algorithm = self.config.algorithm
        columns: dict[Column, Column] = {"advantages": "advantages"}
        if algorithm.kl_loss is not None:
            columns["ref_logprobs"] = "ref_logprobs"
        if "old_logprobs" in batch.columns:
            columns["old_logprobs"] = "old_logprobs"
        if nll:
            columns["positive"] = "positive"
        loss = SurrogateLoss(
            algorithm=algorithm, length_norm=algorithm.length_norm or self.config.rollout.max_new_tokens, nll=nll
        )
        work = batch.train_work(self.config, loss, columns)
        self._onload()
        with self.phase("train"), self._named_limits():
            return self.trainer.train_step(self.guarded(work))

    def train_critic(
        self,
        batch: Experience,
        config: CriticConfig,
        *,
        critic: str = "critic",
        values: Column = "values",
        returns: Column = "returns",
    ) -> None:
        """Fit a critic to the returns; its metrics are `<critic>/...`.

        One with slots of its own trains while the policy does, until the step ends or `finish_critics`.
        """
        work = batch.train_work(self.config, ReturnsLoss(clip=config.clip), {"values": values, "returns": returns})
        self._training[critic] = self.models.trained[critic].begin_train_step(self.guarded(work, critic))
        if critic not in self.models.apart:
            self.finish_critics()

    def finish_critics(self) -> None:
        """Wait for the critics that train."""
        for critic, pending in self._training.items():
            with self.phase(f"train_{critic}"), self._named_limits():
                stats = pending.result()
            self.note({f"{critic}/{name}": value for name, value in stats.metrics.items()})
        self._training.clear()

    def finish_step(self, batch: Experience, stats: TrainStats | None) -> None:
        """Push the new weights, write the step down, and evaluate where it is due.

        Args:
            stats: of the policy's training; None: it was not trained.

        Raises:
            LimitError: a limit was passed.
        """
        if stats is not None:
            self._push_weights(policy_version=self.step)
            self._adapt_kl(len(batch.keys))
        if self._checkpoints is not None and (self._checkpoints.is_due(self.step) or self._is_last()):
            self.finish_critics()
            self.note(self.begin_save(self._checkpoints))
        self._offload()
        self.finish_critics()
        if self.config.tracking.rollouts:
            advantages = batch.scalars.get("advantages", [0.0] * len(batch.keys))
            self.rollout.record(self.step, batch.groups, advantages)
        every = self.config.trainer.eval_every
        due = self.step == self.config.trainer.steps or (every > 0 and self.step % every == 0)
        self._log_step(metrics_of(batch), stats)
        if due:
            self._evaluate()
        if self._checkpoints is not None:
            self._checkpoints.add_state(self.state)
        if self._restarts is not None:
            self._restarts.step_done(self.step)

    def _is_last(self) -> bool:
        """As far as is known: a step that is is saved before the engines get its memory."""
        return self.step == self.config.trainer.steps or self.ends_early()

    def _log_step(self, metrics: Mapping[str, float], stats: TrainStats | None) -> None:
        times = self.timer.take()
        seconds = times["time/step_seconds"]
        stragglers = {} if self.vigil is None else self.vigil.finished_step(seconds)
        trained = {} if stats is None else stats.metrics
        tokens = 0 if stats is None else stats.num_tokens
        self._books.count_step(tokens=tokens, seconds=seconds, mismatch=trained.get(MISMATCH, 0.0))
        rate = tokens / seconds
        synced = {} if stats is None else self._sync_metrics
        self.log(
            {**metrics, **trained, **self._step_metrics, **synced, **times, **stragglers, **self._own_metrics(rate)},
            StepLine(
                step=self.step,
                seconds=seconds,
                reward=metrics["reward/mean"],
                loss=trained.get("loss"),
                tokens_per_second=rate if tokens else None,
                weight_sync_seconds=synced.get("weight_sync/seconds"),
                weight_sync_bytes=int(synced["weight_sync/bytes"]) if synced else None,
            ),
        )
        self._step_metrics.clear()
        self._skips("trained", trained)

    def _skips(self, stage: Stage, metrics: Mapping[str, float]) -> bool:
        """Whether a limit says that the step leaves the policy as it is.

        Raises:
            LimitError: a limit ends the run.
        """
        verdict = self._limits.check(stage, metrics, step=self.step)
        if verdict.action == "stop":
            raise LimitError(verdict.text)
        if verdict.action != "none":
            self.say(verdict.text)
        return verdict.action == "skip"

    def guarded(self, work: TrainWork, model: str = "") -> TrainWork:
        """The work of a step with what its trainer is to look at; `model`: its name, if it is not the policy."""
        return replace(work, guard=guard_of(self.config.limits, self.config.run_dir, self.step, model=model))

    @contextmanager
    def _named_limits(self) -> Iterator[None]:
        """A limit that a trainer has found passed names the step."""
        try:
            yield
        except LimitError as error:
            raise LimitError(f"step {self.step}: {error}") from error

    def _adapt_kl(self, num_samples: int) -> None:
        """Move the coefficient towards the target, where there is one; while the policy rests there is no news."""
        kl = self.config.algorithm.kl_reward
        if self._kl is not None and kl is not None and kl.target is not None:
            self._kl.update(self._step_metrics[KL], num_samples)

    def _push_weights(self, policy_version: int) -> None:
        """Give the engines the trainer's weights."""
        with self.phase("weight_sync"):
            report = self._weights.push(policy_version)
        if self.vigil is not None:
            self.vigil.heartbeat.pushed(policy_version)
        self._books.weight_sync_bytes += report.bytes_moved
        self._sync_metrics = {
            "weight_sync/seconds": sum(report.seconds.values()),
            "weight_sync/bytes": report.bytes_moved,
            "weight_sync/buckets": report.stats.buckets,
            **{f"weight_sync/{name}_seconds": seconds for name, seconds in report.seconds.items()},
        }

    def _offload(self) -> None:
        """Leave the devices to the engines, as far as `trainer.offload` says."""
        if not self.trainer.offloaded.anything:
            return
        with self.phase("offload"):
            stats = self.trainer.offload()
        self.note({"offload/device_bytes_freed": stats.device_bytes, "offload/host_bytes": stats.host_bytes})

    def _onload(self) -> None:
        """Bring back what `_offload` took away."""
        if self.trainer.offloaded.anything:
            with self.phase("onload"):
                self.trainer.onload()

    def _evaluate(self) -> None:
        """Greedy completions of the held-out prompts; the mean of `reward.eval_term` is `eval/<term>`."""
        if not self._held_out:
            return
        with self.phase("evaluate"):
            score = greedy_score(self.config, self.rollout, self._held_out, label=f"evaluate-{self.step}")
        self._tell_start()
        self._books.evaluations[self.step] = score
        term = self.config.reward.eval_name
        self.log({f"eval/{term}": score})
        self.say(f"step {self.step}: eval {term} {score:.3f} on {len(self._held_out)} held-out prompts")

    def _tell_start(self) -> None:
        """Once there are completions: write `startup.json`, and say what the start was made of."""
        if self._is_started:
            return
        self._is_started = True
        report = self._startup.ended("first completion", self.rollout.first_completion())
        report.write(Path(self.config.run_dir) / "startup.json")
        self.say(report.line)

    def _own_metrics(self, tokens_per_second: float) -> dict[str, float]:
        # The controller passes references on and must not grow with what they point to.
        return {"tokens_per_second": tokens_per_second, "controller/rss_bytes": psutil.Process().memory_info().rss}

    def give_up(self) -> None:
        """Close the books of a run that will go on from its last checkpoint."""
        if self._checkpoints is not None:
            self._checkpoints.discard()
        self.close()

    def finish(self) -> RunSummary:
        """Write `summary.json` and close the books."""
        self.rollout.finish_records()
        books = self._books.by(self.timer)
        summary = books.summary(step=self.step, steps_planned=self.config.trainer.steps)
        summary.write(Path(self.config.run_dir) / "summary.json")
        self.close()
        return summary


def _kl_state(config: RunConfig) -> AdaptiveKl | None:
    kl = config.algorithm.kl_reward
    if kl is None:
        return None
    return AdaptiveKl(coefficient=kl.coefficient, target=kl.target or 1.0, horizon=kl.horizon)
