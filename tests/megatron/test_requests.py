"""How a step's work is split over ranks."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from megarl.batch.balance import QWEN2_5_7B
from megarl.functional.losses import Denominators
from megarl.megatron.requests import ADD_UP, MiniBatch, SampleRef, TrainStats, TrainWork, split_by_dp, train_transfer
from megarl.placement.rank_grid import RankGrid
from megarl.reshard.planning.strategy import SyncStats

GRIDS = [
    RankGrid(),
    RankGrid(dp=2),
    RankGrid(tp=2),
    RankGrid(dp=3, pp=2),
    RankGrid(tp=2, dp=4),
    RankGrid(tp=2, dp=2, pp=2),
]
BUDGET = 300


def make_work(num_mini_batches: int = 3, seed: int = 0) -> TrainWork:
    rng = np.random.default_rng(seed)
    batches = []
    for b in range(num_mini_batches):
        lengths = rng.integers(2, 350, size=int(rng.integers(1, 40))).tolist()
        samples = tuple(
            SampleRef(payload=b, index=i, num_tokens=n, scalars={"advantages": float(i)}) for i, n in enumerate(lengths)
        )
        batches.append(MiniBatch(samples=samples, denominators=Denominators(num_tokens=99, num_sequences=len(samples))))
    return TrainWork(mini_batches=tuple(batches), payloads=(), max_tokens_per_micro_batch=BUDGET)


@pytest.mark.parametrize("grid", GRIDS, ids=repr)
@pytest.mark.parametrize("seed", range(5))
def test_each_sample_once_in_equally_many_micro_batches_within_the_budget(grid: RankGrid, seed: int) -> None:
    work = make_work(seed=seed)
    works = split_by_dp(work, grid)
    assert len(works) == grid.size
    replicas = [works[grid.output_rank(dp)] for dp in range(grid.dp)]
    for b, batch in enumerate(work.mini_batches):
        mine = [replica.mini_batches[b] for replica in replicas]
        assert len({len(m.micro_batches) for m in mine}) == 1
        indices = [i for m in mine for micro in m.micro_batches for i in micro]
        assert sorted(indices) == list(range(len(batch.samples)))
        for micro in itertools.chain(*(m.micro_batches for m in mine)):
            assert len(micro) <= 1 or sum(batch.samples[i].num_tokens for i in micro) <= BUDGET
        assert all(m.samples == batch.samples and m.denominators == batch.denominators for m in mine)


@pytest.mark.parametrize("grid", GRIDS, ids=repr)
def test_ranks_of_one_replica_get_the_same_work(grid: RankGrid) -> None:
    works = split_by_dp(make_work(), grid)
    for rank in range(grid.size):
        assert works[rank] == works[grid.output_rank(grid.coordinates(rank).dp)]


def test_replicas_get_nearly_the_same_number_of_tokens() -> None:
    rng = np.random.default_rng(4)
    samples = tuple(SampleRef(payload=0, index=i, num_tokens=int(n)) for i, n in enumerate(rng.integers(50, 200, 64)))
    batch = MiniBatch(samples=samples, denominators=Denominators(num_tokens=1, num_sequences=64))
    work = TrainWork(mini_batches=(batch,), payloads=(), max_tokens_per_micro_batch=1000)
    loads = [
        sum(samples[i].num_tokens for micro in one.mini_batches[0].micro_batches for i in micro)
        for one in split_by_dp(work, RankGrid(dp=4))
    ]
    assert max(loads) - min(loads) <= 0.05 * max(loads)


def test_the_answer_is_that_of_the_first_replicas_last_stage() -> None:
    grid = RankGrid(tp=2, dp=2, pp=2)
    results = [TrainStats(metrics={"rank": rank}, num_tokens=1) for rank in range(8)]
    assert train_transfer(QWEN2_5_7B).collect(results, grid).metrics == {"rank": 4}


def test_what_ranks_counted_in_a_push_is_added_up():
    first = SyncStats(bytes_sent=3, bytes_received=1, bytes_delivered=4, buckets=2, peak_extra_bytes=10, messages=1)
    second = SyncStats(bytes_sent=1, bytes_received=3, bytes_delivered=5, buckets=3, peak_extra_bytes=7, collectives=2)
    assert ADD_UP.collect([first, second], RankGrid(dp=2)) == SyncStats(
        bytes_sent=4, bytes_received=4, bytes_delivered=9, buckets=3, peak_extra_bytes=10, messages=1, collectives=2
    )
