"""Runs estimators in this process as the rollout workers run them, each on its share of the groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from megarl.batch.pack import PerToken
from megarl.batch.sample_table import SampleKey
from megarl.batch.trajectory import Trajectory
from megarl.groups.estimation.estimate_job import EstimateJob, EstimateSummary, estimate, estimate_in_shares, whiten
from megarl.groups.estimation.estimators import Estimator

Columns = dict[str, dict[SampleKey, PerToken]]
"""Values per token by name of the column and key of the sequence."""


def make_job(
    estimator: Estimator,
    arguments: Sequence[object],
    groups: Sequence[Sequence[Trajectory]],
    rewards: Sequence[float],
    columns: Mapping[str, Any],
    outputs: tuple[str, ...],
    *,
    scalars: Mapping[str, Sequence[float]] | None = None,
    turn_weight: float | None = None,
) -> EstimateJob:
    """Return a job on all sequences of the groups; `rewards` and `scalars` have one value per episode."""
    return EstimateJob(
        estimator=estimator,
        arguments=tuple(arguments),
        keys_S=np.array([(g, i) for g, group in enumerate(groups) for i in range(len(group))], np.int64),
        groups_N=np.array([g for g, group in enumerate(groups) for t in group if t.segment == 0], np.int64),
        rewards_N=np.array(rewards, np.float64),
        scalars={name: np.array(values, np.float64) for name, values in (scalars or {}).items()},
        columns=columns,
        outputs=outputs,
        num_tokens=sum(trajectory.num_tokens for group in groups for trajectory in group),
        turn_weight=turn_weight,
    )


def estimate_here(
    job: EstimateJob, groups: Sequence[Sequence[Trajectory]], workers: Sequence[int] | None = None
) -> tuple[EstimateSummary, Columns]:
    """Run the job as the workers that take the groups, one index for each; None: one takes all."""
    workers_G = np.zeros(len(groups), np.int64) if workers is None else np.array(workers)

    def call(method: str, arguments: Mapping[int, tuple[Any, ...]], num_columns: int) -> Any:
        found = {}
        for worker, own_arguments in arguments.items():
            own_job, *columns = own_arguments
            own = [groups[index] for index in np.flatnonzero(workers_G == worker)]
            summary, parts = estimate(own_job, own) if method == "estimate" else whiten(own_job, own, *columns)
            found[worker] = summary, parts if method == "estimate" else [parts]
            assert len(found[worker][1]) == num_columns
        return found

    summary, columns, keys = estimate_in_shares(job, workers_G, call)
    for parts in columns.values():
        assert [list(part) for part in parts] == [list(map(tuple, own.tolist())) for own in keys]
    return summary, {name: {k: v for part in parts for k, v in part.items()} for name, parts in columns.items()}


def assert_same_bits(one: tuple[EstimateSummary, Columns], other: tuple[EstimateSummary, Columns]) -> None:
    assert one[0].metric_values == other[0].metric_values
    assert one[0].scalars.keys() == other[0].scalars.keys()
    for name, values_N in one[0].scalars.items():
        assert values_N.tobytes() == other[0].scalars[name].tobytes()
    assert one[1].keys() == other[1].keys()
    for name, column in one[1].items():
        assert column.keys() == other[1][name].keys()
        for key, values in column.items():
            assert values.tobytes() == other[1][name][key].tobytes(), (name, key)
