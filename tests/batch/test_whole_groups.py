"""Plans in which ranks train on whole groups: valid, balanced, and with few groups per rank."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from megarl.batch.balance import QWEN2_5_7B, fill_to_targets, plan_micro_batches
from megarl.batch.whole_groups import MAX_IMBALANCE, plan_whole_groups

MAX_TOKENS, DP, NUM_GROUPS = 16_384, 16, 256

LENGTHS: dict[str, Callable[[np.random.Generator], NDArray[np.int64]]] = {
    "uniform": lambda rng: rng.integers(1100, 2100, 8 * NUM_GROUPS),
    "geometric": lambda rng: np.minimum(100 + rng.geometric(1 / 2000, 8 * NUM_GROUPS), 20_000),
    "lognormal": lambda rng: np.minimum(100 + rng.lognormal(7, 1, 8 * NUM_GROUPS).astype(np.int64), 20_000),
    "similar within a group": lambda rng: (
        100 + np.repeat(rng.geometric(1 / 1500, NUM_GROUPS), 8) + rng.integers(0, 100, 8 * NUM_GROUPS)
    ),
}
GROUPS = np.repeat(np.arange(NUM_GROUPS), 8)


def costs_of(lengths_N: NDArray[np.int64]) -> NDArray[np.float64]:
    return np.array(QWEN2_5_7B.flops_of_each(lengths_N), np.float64)


def num_pairs(plan: list[list[list[int]]]) -> int:
    """Return how many groups the ranks need, summed over the ranks."""
    return sum(len({GROUPS[i] for members in batches for i in members}) for batches in plan)


@pytest.mark.parametrize("kind", LENGTHS)
def test_ranks_are_balanced_and_need_few_groups(kind: str) -> None:
    lengths_N = LENGTHS[kind](np.random.default_rng(0))
    plan = plan_whole_groups(lengths_N, GROUPS, dp=DP, max_tokens=MAX_TOKENS, exchanges=False)
    assert plan is not None
    assert sorted(i for batches in plan for members in batches for i in members) == list(range(len(lengths_N)))
    assert len({len(batches) for batches in plan}) == 1
    assert all(lengths_N[members].sum() <= MAX_TOKENS or len(members) == 1 for batches in plan for members in batches)
    totals = [sum(costs_of(lengths_N)[members].sum() for members in batches) for batches in plan]
    assert max(totals) <= MAX_IMBALANCE * np.mean(totals)
    assert num_pairs(plan) < 1.3 * NUM_GROUPS
    anywhere = plan_micro_batches(lengths_N, dp=DP, max_tokens=MAX_TOKENS)
    assert num_pairs(anywhere) > 5 * NUM_GROUPS
    again = plan_whole_groups(lengths_N.copy(), GROUPS, dp=DP, max_tokens=MAX_TOKENS, exchanges=False)
    assert plan == again


def test_rounds_are_balanced_where_ranks_exchange_tokens() -> None:
    lengths_N = LENGTHS["uniform"](np.random.default_rng(0))
    plan = plan_whole_groups(lengths_N, GROUPS, dp=DP, max_tokens=MAX_TOKENS, exchanges=True)
    assert plan is not None
    costs_N = costs_of(lengths_N)
    loads_RK = np.array([[costs_N[members].sum() for members in batches] for batches in plan])
    assert loads_RK.max(axis=0).sum() <= MAX_IMBALANCE * costs_N.sum() / DP


def test_groups_are_split_where_whole_ones_cannot_be_balanced() -> None:
    """One sequence that costs more than a rank's share, and groups as few as the ranks."""
    equal_N, groups_N = np.full(1024, 100), np.repeat(np.arange(128), 8)
    few_N = np.repeat(np.arange(DP), 1024 // DP)
    long_N = np.array([200_000, *[100] * 1023], np.int64)
    for lengths_N, own_N in ((long_N, groups_N), (equal_N, few_N), (equal_N[:256], groups_N[:256])):
        assert plan_whole_groups(lengths_N, own_N, dp=DP, max_tokens=MAX_TOKENS, exchanges=False) is None


def fill_by_scan(
    lengths: list[int], costs: list[float], order: list[int], targets: list[float], max_tokens: int
) -> list[list[int]] | None:
    """Fill as `fill_to_targets` says, by looking at all micro-batches for each sequence."""
    filled: list[list[int]] = [[] for _ in targets]
    for i in order:
        roomy = [m for m, of in enumerate(filled) if not of or sum(lengths[j] for j in of) + lengths[i] <= max_tokens]
        if not roomy:
            return None
        missing = [targets[m] - sum(costs[j] for j in filled[m]) for m in roomy]
        filled[roomy[missing.index(max(missing))]].append(i)
    return filled


def test_filling_equals_a_scan_of_all_micro_batches() -> None:
    rng, num_refused = np.random.default_rng(1), 0
    for _ in range(200):
        lengths_N = rng.integers(1, 60, int(rng.integers(1, 50)))
        costs_N = lengths_N.astype(np.float64)  # sums of whole numbers: exact in any order
        targets_M = np.full(int(rng.integers(1, 8)), float(rng.integers(20, 120)))
        order_N, max_tokens = np.argsort(-lengths_N, kind="stable"), int(rng.integers(40, 150))
        expected = fill_by_scan(lengths_N.tolist(), costs_N.tolist(), order_N.tolist(), targets_M.tolist(), max_tokens)
        assert fill_to_targets(lengths_N, costs_N, order_N, targets_M, max_tokens) == expected
        num_refused += expected is None
    assert 20 < num_refused < 180
