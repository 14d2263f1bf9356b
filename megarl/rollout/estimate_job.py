"""Estimator calls that the rollout workers share: which groups each of them takes, and how their results are joined.

The results do not depend on who takes which groups: an estimator that is marked with `by_groups` computes a group's
values from that group alone, and sums over the step are sums over groups, in their order and in float64.

Shapes: G groups of a step; N completions (episodes) of them, or of some of them, which consist of S sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from math import ceil
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megarl.batch.pack import ColumnName, PerToken, SampleKey
from megarl.batch.trajectory import Trajectory
from megarl.cluster.workers.dispatch import Payload
from megarl.functional import normalize
from megarl.megatron.request_samples import ComputedColumn, merge_column, select_values
from megarl.megatron.requests import TokenColumn
from megarl.rollout.estimators import (
    CompletionBatch,
    Estimator,
    EstimatorOutput,
    GroupedMetric,
    Metric,
    Whitening,
    is_by_groups,
    make_token_batch,
)

TOKENS_PER_WORKER = 262_144
"""Fewest tokens for which one more worker takes part: their estimate takes about as long as a few calls."""

ColumnPart = dict[SampleKey, PerToken]
"""Values per token of some sequences."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimateJob:
    """An estimator call on the groups of a step, or on some of them."""

    estimator: Estimator
    arguments: tuple[object, ...]
    keys_S: NDArray[np.int64]
    """Keys of the sequences to estimate, group after group, [S, 2]: index of the group in the step, and index in its
    payload, which may have others. Sequences that continue an episode follow its first one."""
    groups_N: NDArray[np.int64]
    """Index in the step of the group of each completion, [N]."""
    rewards_N: NDArray[np.float64]
    """Reward of each completion, [N]."""
    scalars: Mapping[ColumnName, NDArray[np.float64]]
    """Further values per completion, [N] each."""
    columns: Mapping[ColumnName, Payload[TokenColumn]]
    """Values per token; those that the estimator reads are fetched."""
    outputs: tuple[ColumnName, ...]
    """Names of the columns of `EstimatorOutput` to return."""
    num_tokens: int
    """Number of tokens of the step."""
    turn_weight: float | None = None
    """Weight of the environment's rewards in the rewards, if advantages are per turn."""

    def split(self, workers_G: NDArray[np.int64]) -> dict[int, EstimateJob]:
        """Return the calls on the groups of each worker, by worker.

        Args:
            workers_G: index of the worker that takes each group of the step.
        """
        if len(np.unique(workers_G)) == 1:
            return {int(workers_G[0]): self}
        of_S, of_N = workers_G[self.keys_S[:, 0]], workers_G[self.groups_N]
        jobs = {}
        for worker in np.unique(workers_G).tolist():
            keys_S, in_N = self.keys_S[of_S == worker], of_N == worker
            jobs[worker] = replace(
                self,
                keys_S=keys_S,
                groups_N=self.groups_N[in_N],
                rewards_N=self.rewards_N[in_N],
                scalars={name: values_N[in_N] for name, values_N in self.scalars.items()},
                columns={name: select_values(column, keys_S) for name, column in self.columns.items()},
            )
        return jobs


def share_groups(job: EstimateJob, generated_by_G: Sequence[int], num_workers: int) -> NDArray[np.int64]:
    """Return the index of the worker that estimates each group, [G].

    Where values per token were computed in several parts, a worker takes the groups of whole parts, so that each part
    is sent once; otherwise the groups that it has generated, which are on its node. One worker takes a small step.

    Args:
        generated_by_G: index of the worker that has generated each group.
    """
    num_workers = min(num_workers, ceil(job.num_tokens / TOKENS_PER_WORKER))
    if num_workers <= 1 or not is_by_groups(job.estimator):
        return np.zeros(len(generated_by_G), np.int64)
    computed = [column for column in job.columns.values() if isinstance(column, ComputedColumn)]
    if computed:
        _, first_G = np.unique(job.keys_S[:, 0], return_index=True)
        return computed[0].find_parts(job.keys_S[first_G]) % num_workers
    return np.array(generated_by_G, np.int64) % num_workers


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimateSummary:
    """The part of an estimator's result that is sent to the controller: values per completion and metrics."""

    groups_N: NDArray[np.int64]
    """Index in the step of the group of each completion."""
    scalars: Mapping[ColumnName, NDArray[np.float64]]
    """Values per completion, [N] each."""
    metrics: Mapping[str, Metric]
    whitening: Whitening | None = None
    """How the column `advantages` is to be whitened over the step."""

    @property
    def metric_values(self) -> dict[str, float]:
        """The metrics as numbers."""
        return {
            name: metric.value if isinstance(metric, GroupedMetric) else metric for name, metric in self.metrics.items()
        }

    @classmethod
    def merge(cls, parts: Sequence[EstimateSummary]) -> EstimateSummary:
        """Return the summary of the groups of all parts, in the order of the step.

        Raises:
            ValueError: a metric of one of several parts is a number, so that the step's is unknown.
        """
        if len(parts) == 1:
            return parts[0]
        groups_N = np.concatenate([part.groups_N for part in parts])
        order_N = np.argsort(groups_N, kind="stable")
        order_G = np.argsort(np.concatenate([np.unique(part.groups_N) for part in parts]))
        whitenings = [part.whitening for part in parts if part.whitening is not None]
        return cls(
            groups_N=groups_N[order_N],
            scalars={
                name: np.concatenate([part.scalars[name] for part in parts])[order_N] for name in parts[0].scalars
            },
            metrics={
                name: _merge_metric(name, [part.metrics[name] for part in parts], order_G) for name in parts[0].metrics
            },
            whitening=Whitening.merge(whitenings, order_G) if whitenings else None,
        )


def _merge_metric(name: str, parts: Sequence[Metric], order_G: NDArray[np.int64]) -> GroupedMetric:
    grouped = [part for part in parts if isinstance(part, GroupedMetric)]
    if len(grouped) < len(parts):
        raise ValueError(
            f"the metric {name!r} of an estimator with by_groups is a number, of some groups of the step only; return "
            "TokenBatch.token_mean or TokenBatch.completion_mean of its values, or remove by_groups"
        )
    return grouped[0].merge(grouped, order_G)


def estimate(job: EstimateJob, groups: Sequence[Sequence[Trajectory]]) -> tuple[EstimateSummary, list[ColumnPart]]:
    """Run the estimator; return the summary for the controller and the columns of `job.outputs`.

    Args:
        groups: the sequences of each group of the job.

    Raises:
        ValueError: the estimator whitens its advantages, which are not among the outputs.
    """
    kept, keys = _take_kept(job.keys_S, groups)
    columns = _FetchedColumns(job.columns, keys)
    tokens = make_token_batch(kept, job.rewards_N.tolist(), columns, _scalars(job), turn_weight=job.turn_weight)
    output = job.estimator(tokens, *job.arguments)
    if output.whitening is not None and "advantages" not in job.outputs:
        raise ValueError("the estimator whitens its advantages: pass outputs=('advantages',) to RLRun.estimate")
    return _summary(job, output), [_split_column(output.columns[name], kept, keys) for name in job.outputs]


def estimate_completions(job: EstimateJob) -> EstimateSummary:
    """Run an estimator with `by_completions`, which reads no tokens."""
    _, group_ids_N = np.unique(job.groups_N, return_inverse=True)
    batch = CompletionBatch.of(job.rewards_N.tolist(), group_ids_N.tolist(), _scalars(job))
    return _summary(job, job.estimator(batch, *job.arguments))


def _scalars(job: EstimateJob) -> dict[ColumnName, Tensor]:
    return {name: torch.from_numpy(values_N).float() for name, values_N in job.scalars.items()}


def _summary(job: EstimateJob, output: EstimatorOutput) -> EstimateSummary:
    return EstimateSummary(
        groups_N=job.groups_N,
        scalars={name: values_N.double().numpy() for name, values_N in output.scalars.items()},
        metrics=output.metrics,
        whitening=output.whitening,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class WhitenJob:
    """Whitening of the advantages of some groups, once those of the step are known."""

    keys_S: NDArray[np.int64]
    """Keys of the sequences, [S, 2], as in `EstimateJob`."""
    groups_N: NDArray[np.int64]
    """Index in the step of the group of each completion, [N]."""
    mean: float
    """Of the advantages of all sampled tokens of the step."""
    variance: float


def whiten(
    job: WhitenJob, groups: Sequence[Sequence[Trajectory]], advantages: ColumnPart
) -> tuple[EstimateSummary, ColumnPart]:
    """Return the means per completion, the scalar `advantages`, and the whitened column.

    Args:
        groups: the sequences of each group of the job.
        advantages: the column `advantages` of these groups, as estimated.
    """
    kept, keys = _take_kept(job.keys_S, groups)
    tokens = make_token_batch(kept, [0.0] * len(job.groups_N), {})
    values_T = torch.from_numpy(np.concatenate([advantages[key] for key in keys]))
    whitened_T = normalize(values_T, tokens.mask_T, mean=job.mean, variance=job.variance)
    means_N = tokens.sequence_means(whitened_T).double().numpy()
    summary = EstimateSummary(groups_N=job.groups_N, scalars={"advantages": means_N}, metrics={})
    return summary, _split_column(whitened_T, kept, keys)


CallWorkers = Callable[
    [str, Mapping[int, tuple[object, ...]], int], Mapping[int, tuple[EstimateSummary, Sequence[Any]]]
]
"""Calls `estimate` or `whiten`, by name, with arguments by worker, to which it adds the groups. Returns the summary and
handles on the columns, as many as the last argument says, by worker."""


def estimate_in_shares(
    job: EstimateJob, workers_G: NDArray[np.int64], call: CallWorkers
) -> tuple[EstimateSummary, dict[ColumnName, list[Any]], list[NDArray[np.int64]]]:
    """Run the job on the groups of each worker, and whiten the advantages if the estimator asks for it.

    Args:
        workers_G: index of the worker that takes each group.

    Returns:
        The summary of the step, the handles on the parts of each column, and the keys of the sequences of each part.
    """
    jobs = job.split(workers_G)
    found = call("estimate", {worker: (own,) for worker, own in jobs.items()}, len(job.outputs))
    summary = EstimateSummary.merge([found[worker][0] for worker in jobs])
    columns = {name: [found[worker][1][i] for worker in jobs] for i, name in enumerate(job.outputs)}
    if summary.whitening is not None:
        mean, variance = summary.whitening.mean, summary.whitening.variance
        arguments = {
            worker: (WhitenJob(keys_S=own.keys_S, groups_N=own.groups_N, mean=mean, variance=variance), column)
            for (worker, own), column in zip(jobs.items(), columns["advantages"], strict=True)
        }
        whitened = call("whiten", arguments, 1)
        means = EstimateSummary.merge([whitened[worker][0] for worker in jobs])
        columns["advantages"] = [whitened[worker][1][0] for worker in jobs]
        summary = replace(summary, scalars={**summary.scalars, **means.scalars})
    return summary, columns, [own.keys_S for own in jobs.values()]


def _take_kept(
    keys_S: NDArray[np.int64], groups: Sequence[Sequence[Trajectory]]
) -> tuple[list[list[Trajectory]], list[SampleKey]]:
    """Return the sequences of each group that have a key, and the keys."""
    keys: list[SampleKey] = list(map(tuple, keys_S.tolist()))
    by_group = groupby(keys, key=itemgetter(0))
    return [[group[i] for _, i in members] for group, (_, members) in zip(groups, by_group, strict=True)], keys


def _split_column(values_T: Tensor, kept: Sequence[Sequence[Trajectory]], keys: Sequence[SampleKey]) -> ColumnPart:
    bounds = np.cumsum([trajectory.num_tokens for group in kept for trajectory in group])[:-1]
    return dict(zip(keys, np.split(values_T.float().numpy(), bounds), strict=True))


class _FetchedColumns(Mapping[ColumnName, Tensor]):
    """Columns of sequences, float32 [T] each, which are fetched when they are read."""

    def __init__(self, columns: Mapping[ColumnName, Payload[TokenColumn]], keys: Sequence[SampleKey]) -> None:
        self._columns, self._keys = columns, keys
        self._fetched: dict[ColumnName, Tensor] = {}

    def __getitem__(self, name: ColumnName) -> Tensor:
        if name not in self._fetched:
            values = merge_column(self._columns[name].fetch())
            self._fetched[name] = torch.from_numpy(np.concatenate([values[key] for key in self._keys]))
        return self._fetched[name]

    def __iter__(self) -> Iterator[ColumnName]:
        return iter(self._columns)

    def __len__(self) -> int:
        return len(self._columns)
