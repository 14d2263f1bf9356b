"""The second part of an RL step: score the batch with auxiliary models, and estimate advantages.

Tokens stay in the workers: the controller passes references on.
"""

from __future__ import annotations

import numpy as np

from megarl.batch.pack import ColumnName
from megarl.groups.estimation.estimate_job import EstimateJob, estimate_completions
from megarl.groups.estimation.estimators import Estimator, is_by_completions
from megarl.run.kl_penalty import KL_METRIC
from megarl.run.rollout_batch import RolloutBatch
from megarl.run.sampling_run import SamplingRun


class ScoringRun(SamplingRun):
    """Base class of `RLRun`: adds log-probabilities, values and advantages to the batches that were sampled."""

    def add_logprobs(self, batch: RolloutBatch) -> None:
        """Add the column `old_logprobs`: token log-probs of the policy before the first update of the step."""
        if not batch.groups:
            return
        self._sync.begin_scoring()
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
            self._sync.begin_scoring("reference")
            with self.phase("reference"):
                reference = self.models.frozen["reference"]
                batch.columns["ref_logprobs"] = reference.logprobs(batch.forward_request(self.config))

    def add_model_logprobs(
        self, batch: RolloutBatch, model: str, column: ColumnName, *, phase: str | None = None
    ) -> None:
        """Add a column of token log-probs from an auxiliary language model; `phase` defaults to the model's name."""
        if not batch.groups:
            return
        self._sync.begin_scoring(model)
        with self.phase(phase or model):
            worker = self.models.trained.get(model) or self.models.frozen[model]
            batch.columns[column] = worker.logprobs(batch.forward_request(self.config))

    def add_values(self, batch: RolloutBatch, *, critic: str = "critic", column: ColumnName = "values") -> None:
        """Add a column of token values from a critic: V of the state before each token."""
        if not batch.groups:
            return
        self._sync.begin_scoring(critic)
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
        self._step_metrics.update(metrics)
        if self._adaptive_kl is not None and KL_METRIC in metrics:
            self._step_metrics["kl/coefficient"] = self._adaptive_kl.coefficient

    @property
    def _turn_weight(self) -> float | None:
        """Weight of the environment's rewards, if advantages are per turn."""
        environments = [name for name in self.config.reward.environments if name in self._weights.current]
        if self.config.algorithm.advantages_per != "turn" or not environments:
            return None
        return sum(self._weights.current[name] for name in environments)
