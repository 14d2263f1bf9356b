"""Runs estimators in this process as the rollout workers run them, each on its share of the groups."""

import numpy as np

from megarl.cluster.workers.dispatch import LocalPayload
from megarl.rollout.estimate_job import EstimateJob, estimate, estimate_in_shares, whiten


def keys_of(groups):
    return [(g, i) for g, group in enumerate(groups) for i in range(len(group))]


def token_column(groups, values):
    """Return a column of `values`, one for each token of the groups."""
    keys = keys_of(groups)
    parts = np.split(values.astype(np.float32), np.cumsum([groups[g][i].num_tokens for g, i in keys])[:-1])
    return LocalPayload([dict(zip(keys, parts, strict=True))])


def make_job(estimator, arguments, groups, rewards, columns, outputs, *, scalars=None, turn_weight=None):
    """Return a job on all sequences of the groups; `rewards` and `scalars` have one value per episode."""
    return EstimateJob(
        estimator=estimator,
        arguments=tuple(arguments),
        keys_S=np.array(keys_of(groups), np.int64),
        groups_N=np.array([g for g, group in enumerate(groups) for t in group if t.segment == 0], np.int64),
        rewards_N=np.array(rewards, np.float64),
        scalars={name: np.array(values, np.float64) for name, values in (scalars or {}).items()},
        columns=columns,
        outputs=outputs,
        num_tokens=sum(trajectory.num_tokens for group in groups for trajectory in group),
        turn_weight=turn_weight,
    )


def estimate_here(job, groups, workers=None):
    """Run the job as the workers that take the groups, one index for each; None: one takes all."""
    workers_G = np.zeros(len(groups), np.int64) if workers is None else np.array(workers)

    def call(method, arguments, num_columns):
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


def assert_same_bits(one, other):
    assert one[0].metric_values == other[0].metric_values
    assert one[0].scalars.keys() == other[0].scalars.keys()
    for name, values_N in one[0].scalars.items():
        assert values_N.tobytes() == other[0].scalars[name].tobytes()
    assert one[1].keys() == other[1].keys()
    for name, column in one[1].items():
        assert column.keys() == other[1][name].keys()
        for key, values in column.items():
            assert values.tobytes() == other[1][name][key].tobytes(), (name, key)
