"""Splitting of train requests over ranks, and merging of results."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from megarl.batch.balance import QWEN2_5_7B
from megarl.functional.losses import Denominators
from megarl.megatron.requests import (
    SUM_SYNC_STATS,
    MiniBatch,
    SampleRef,
    TrainRequest,
    TrainStats,
    forward_dispatch,
    split_by_dp,
    train_dispatch,
)
from megarl.placement.rank_grid import RankGrid
from megarl.reshard.planning.strategy import SyncStats
from megarl.workers.dispatch import BROADCAST

GRIDS = [
    RankGrid(),
    RankGrid(dp=2),
    RankGrid(tp=2),
    RankGrid(dp=3, pp=2),
    RankGrid(tp=2, dp=4),
    RankGrid(tp=2, dp=2, pp=2),
]
MAX_TOKENS = 300


def make_request(num_mini_batches: int = 3, seed: int = 0) -> TrainRequest:
    rng = np.random.default_rng(seed)
    batches = []
    for number in range(num_mini_batches):
        lengths = rng.integers(2, 350, size=int(rng.integers(1, 40))).tolist()
        samples = tuple(
            SampleRef(payload=number, index=i, num_tokens=n, scalars={"advantages": float(i)})
            for i, n in enumerate(lengths)
        )
        batches.append(MiniBatch(samples=samples, denominators=Denominators(num_tokens=99, num_sequences=len(samples))))
    return TrainRequest(mini_batches=tuple(batches), payloads=(), max_tokens_per_micro_batch=MAX_TOKENS)


@pytest.mark.parametrize("grid", GRIDS, ids=repr)
@pytest.mark.parametrize("seed", range(5))
def test_micro_batches_cover_each_sample_once_within_max_tokens(grid: RankGrid, seed: int) -> None:
    request = make_request(seed=seed)
    requests = split_by_dp(request, grid)
    assert len(requests) == grid.size
    replicas = [requests[grid.output_rank(dp)] for dp in range(grid.dp)]
    for number, batch in enumerate(request.mini_batches):
        replica_batches = [replica.mini_batches[number] for replica in replicas]
        assert len({len(replica_batch.micro_batches) for replica_batch in replica_batches}) == 1
        indices = [i for replica_batch in replica_batches for micro in replica_batch.micro_batches for i in micro]
        assert sorted(indices) == list(range(len(batch.samples)))
        for micro in itertools.chain(*(replica_batch.micro_batches for replica_batch in replica_batches)):
            assert len(micro) <= 1 or sum(batch.samples[i].num_tokens for i in micro) <= MAX_TOKENS
        assert all(
            replica_batch.samples == batch.samples and replica_batch.denominators == batch.denominators
            for replica_batch in replica_batches
        )


@pytest.mark.parametrize("grid", GRIDS, ids=repr)
def test_ranks_of_one_replica_get_the_same_request(grid: RankGrid) -> None:
    requests = split_by_dp(make_request(), grid)
    for rank in range(grid.size):
        assert requests[rank] == requests[grid.output_rank(grid.coordinates(rank).dp)]


def test_tokens_are_balanced_over_replicas() -> None:
    rng = np.random.default_rng(4)
    samples = tuple(SampleRef(payload=0, index=i, num_tokens=int(n)) for i, n in enumerate(rng.integers(50, 200, 64)))
    batch = MiniBatch(samples=samples, denominators=Denominators(num_tokens=1, num_sequences=64))
    request = TrainRequest(mini_batches=(batch,), payloads=(), max_tokens_per_micro_batch=1000)
    loads = [
        sum(samples[i].num_tokens for micro in one.mini_batches[0].micro_batches for i in micro)
        for one in split_by_dp(request, RankGrid(dp=4))
    ]
    assert max(loads) - min(loads) <= 0.05 * max(loads)


def test_train_result_comes_from_the_last_stage_of_the_first_replica() -> None:
    grid = RankGrid(tp=2, dp=2, pp=2)
    results = [TrainStats(metrics={"rank": rank}, num_tokens=1) for rank in range(8)]
    assert train_dispatch(QWEN2_5_7B).collect(results, grid).metrics == {"rank": 4}


def test_sync_stats_are_summed_over_ranks():
    first = SyncStats(bytes_sent=3, bytes_received=1, bytes_delivered=4, buckets=2, peak_extra_bytes=10, messages=1)
    second = SyncStats(bytes_sent=1, bytes_received=3, bytes_delivered=5, buckets=3, peak_extra_bytes=7, collectives=2)
    assert SUM_SYNC_STATS.collect([first, second], RankGrid(dp=2)) == SyncStats(
        bytes_sent=4, bytes_received=4, bytes_delivered=9, buckets=3, peak_extra_bytes=10, messages=1, collectives=2
    )


def test_ranks_do_equal_work_in_passes_over_samples_only() -> None:
    """In a push of weights or an export, rank 0 may have most of the work."""
    assert train_dispatch(QWEN2_5_7B).equal_work
    assert forward_dispatch(QWEN2_5_7B).equal_work
    assert not SUM_SYNC_STATS.equal_work
    assert not BROADCAST.equal_work
