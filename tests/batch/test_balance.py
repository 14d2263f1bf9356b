from __future__ import annotations

import itertools

import numpy as np
import pytest

from megarl.batch.balance import cost, partition, plan_micro_batches


@pytest.mark.parametrize("seed", range(20))
def test_partition_is_within_a_third_of_the_best_of_all_partitions(seed: int) -> None:
    rng = np.random.default_rng(seed)
    costs = rng.integers(1, 50, size=int(rng.integers(3, 9))).tolist()
    bins = int(rng.integers(2, 4))
    parts = partition(costs, bins)
    assert sorted(itertools.chain(*parts)) == list(range(len(costs)))
    largest = max(sum(costs[i] for i in part) for part in parts)
    best = min(
        max(sum(c for c, b in zip(costs, choice, strict=True) if b == k) for k in range(bins))
        for choice in itertools.product(range(bins), repeat=len(costs))
    )
    # Graham 1969: longest processing time first is at most 4/3 - 1/(3 bins) of the optimum
    assert best <= largest <= best * (4 / 3 - 1 / (3 * bins))


def test_partition_is_deterministic_and_copes_with_few_items() -> None:
    assert partition([5, 5, 5, 5], 2) == partition([5, 5, 5, 5], 2) == [[0, 2], [1, 3]]
    assert partition([1.0], 3) == [[0], [], []]
    assert partition([], 2) == [[], []]


def test_cost_counts_attention() -> None:
    assert cost(8192) == 2 * 8192
    assert cost(100) + cost(100) < cost(200)


@pytest.mark.parametrize("seed", range(30))
def test_every_sequence_once_equally_many_micro_batches_within_the_budget(seed: int) -> None:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 400, size=int(rng.integers(1, 60))).tolist()
    dp, budget = int(rng.integers(1, 9)), int(rng.integers(100, 1000))
    plan = plan_micro_batches(lengths, dp=dp, max_tokens=budget)
    assert len(plan) == dp
    assert len({len(rank) for rank in plan}) == 1
    assert sorted(i for rank in plan for micro in rank for i in micro) == list(range(len(lengths)))
    for micro in itertools.chain(*plan):
        assert len(micro) == 1 or sum(lengths[i] for i in micro) <= budget


def test_no_more_micro_batches_than_needed() -> None:
    assert plan_micro_batches([100] * 8, dp=2, max_tokens=400) == [[[0, 2, 4, 6]], [[1, 3, 5, 7]]]
    (rank,) = plan_micro_batches([100] * 8, dp=1, max_tokens=400)
    assert [len(micro) for micro in rank] == [4, 4]


def test_a_sequence_longer_than_the_budget_stands_alone() -> None:
    (rank,) = plan_micro_batches([10, 900, 10], dp=1, max_tokens=100)
    assert [1] in rank


def test_equal_lengths_are_spread_evenly() -> None:
    plan = plan_micro_batches([64] * 32, dp=4, max_tokens=10_000)
    assert [len(rank[0]) for rank in plan] == [8] * 4
