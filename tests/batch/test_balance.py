"""Plans of micro-batches and of ranks with whole groups: valid, balanced (compared with exhaustive search), fast."""

import itertools
import time
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from megarl.batch.balance import (
    MAX_IMBALANCE,
    QWEN2_5_7B,
    SWAP_TOLERANCE,
    RankTable,
    SequenceCost,
    balance_equal_targets,
    best_fit,
    fill_to_targets,
    find_swaps,
    plan_micro_batches,
    plan_whole_groups,
)

SMALL = SequenceCost(matmul_parameters=400, attention_layers=2, attention_width=2)
"""Cost model whose attention costs as much as the rest at 200 tokens."""


def loads(plan: list[list[list[int]]], sizes: Sequence[int]) -> np.ndarray:
    """Return the total size of each micro-batch, [dp, rounds]."""
    return np.array([[sum(sizes[i] for i in micro_batch) for micro_batch in rank] for rank in plan])


def step_cost(plan: list[list[list[int]]], costs: Sequence[int]) -> int:
    return int(loads(plan, costs).max(axis=0).sum())


def long_tailed(count: int, seed: int) -> list[int]:
    return np.clip(np.random.default_rng(seed).lognormal(6.5, 1.0, count), 16, 8192).astype(int).tolist()


@pytest.mark.parametrize("num_tokens", [0, 1, 5, 6, 7, 40])
def test_cost_counts_every_multiplication(num_tokens):
    windows = {"windowed_layers": 2, "window": 6}
    cost = SequenceCost(matmul_parameters=11, attention_layers=5, attention_width=3, index_width=7, **windows)
    multiplications = 0
    for query in range(num_tokens):
        multiplications += 11
        for key in range(query + 1):
            multiplications += 3 * (5 if query - key < 6 else 3) + 7
    assert cost.flops(num_tokens) == 2 * multiplications


def test_the_default_cost_matches_qwen2_5_7b():
    embedding, biases, norms = 152064 * 3584, 28 * (3584 + 2 * 512), 57 * 3584
    assert QWEN2_5_7B.matmul_parameters == 7_615_616_512 - embedding - biases - norms
    attention = QWEN2_5_7B.flops(70_000) - 2 * QWEN2_5_7B.matmul_parameters * 70_000
    assert attention == pytest.approx(QWEN2_5_7B.flops(70_000) / 2, rel=0.01)


@pytest.mark.parametrize("sizes", [{"matmul_parameters": 0}, {"windowed_layers": 3}, {"windowed_layers": 1}])
def test_invalid_costs_are_refused(sizes):
    with pytest.raises(AssertionError):
        SequenceCost(**({"matmul_parameters": 1, "attention_layers": 2, "attention_width": 1} | sizes))


@pytest.mark.parametrize("seed", range(30))
def test_plans_are_deterministic_complete_and_within_the_budget(seed):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 400, size=int(rng.integers(1, 60))).tolist()
    dp, budget = int(rng.integers(1, 9)), int(rng.integers(100, 1000))
    plan = plan_micro_batches(lengths, dp=dp, max_tokens=budget, cost=SMALL)
    assert plan == plan_micro_batches(lengths, dp=dp, max_tokens=budget, cost=SMALL)
    assert len(plan) == dp
    assert len({len(rank) for rank in plan}) == 1
    micro_batches = list(itertools.chain(*plan))
    assert sorted(itertools.chain(*micro_batches)) == list(range(len(lengths)))
    assert all(micro_batch == sorted(micro_batch) for micro_batch in micro_batches)
    assert all(len(m) <= 1 or sum(lengths[i] for i in m) <= budget for m in micro_batches)
    in_rounds = loads(plan, [SMALL.flops(n) for n in lengths]).max(axis=0)
    assert (np.diff(in_rounds) <= in_rounds[:-1] * 1e-3).all()


def test_several_rounds_are_close_to_the_optimum():
    ratios, above = [], []
    for seed in range(40):
        rng = np.random.default_rng(seed)
        lengths = rng.integers(1, 300, size=7).tolist()
        costs = [SMALL.flops(n) for n in lengths]
        plan = plan_micro_batches(lengths, dp=2, max_tokens=600, cost=SMALL)
        rounds = len(plan[0])
        above.append(rounds - fewest_rounds(lengths, dp=2, max_tokens=600))
        best = min(
            np.sort(np.bincount(choice, costs, 2 * rounds))[::-2].sum()
            for choice in itertools.product(range(2 * rounds), repeat=len(lengths))
            if np.bincount(choice, lengths).max() <= 600
        )
        ratios.append(step_cost(plan, costs) / best)
    # Best-fit-decreasing is not optimal: it sometimes needs one more micro-batch.
    assert set(above) <= {0, 1}
    assert np.mean(above) <= 0.1
    assert min(ratios) >= 1 - 1e-9
    assert max(ratios) <= 1.1
    assert np.mean(ratios) <= 1.02


def fewest_rounds(lengths: Sequence[int], *, dp: int, max_tokens: int) -> int:
    """Return the minimum number of rounds over all assignments; no length exceeds the budget."""
    for rounds in itertools.count(1):
        choices = itertools.product(range(dp * rounds), repeat=len(lengths))
        if any(np.bincount(choice, lengths).max() <= max_tokens for choice in choices):
            return rounds
    raise AssertionError


@pytest.mark.parametrize("seed", range(3))
def test_ranks_are_balanced_with_the_minimum_number_of_micro_batches(seed):
    lengths = long_tailed(1000, seed)
    plan = plan_micro_batches(lengths, dp=8, max_tokens=16384)
    assert len(plan[0]) == -(-sum(lengths) // (8 * 16384))
    costs = [QWEN2_5_7B.flops(n) for n in lengths]
    per_rank = loads(plan, costs).sum(axis=1)
    assert per_rank.max() <= 1.001 * per_rank.mean()
    assert step_cost(plan, costs) <= 1.002 * per_rank.mean()


def test_plans_balance_cost_rather_than_tokens():
    lengths = [300, *[20] * 40]
    plan = plan_micro_batches(lengths, dp=2, max_tokens=10_000, cost=SMALL)
    costs = loads(plan, [SMALL.flops(n) for n in lengths])
    assert costs.max() <= 1.03 * costs.mean()
    tokens = loads(plan, lengths)
    assert tokens.max() > 1.3 * tokens.min()


def test_long_sequences_share_the_first_round():
    lengths = [10] * 60 + [390] * 3
    plan = plan_micro_batches(lengths, dp=3, max_tokens=400, cost=SMALL)
    assert len(plan[0]) == 2
    assert all(any(lengths[i] == 390 for i in rank[0]) for rank in plan)


@pytest.mark.parametrize(
    ("lengths", "dp", "max_tokens", "plan"),
    [
        ([100] * 8, 2, 400, [[[0, 2, 4, 6]], [[1, 3, 5, 7]]]),  # as few micro-batches as possible
        ([10, 900, 10], 1, 100, [[[1], [0, 2]]]),  # longer than the budget: a micro-batch of its own
        ([], 2, 100, [[[]], [[]]]),
        ([7], 3, 100, [[[0]], [[]], [[]]]),
        ([5, 6], 2, 100, [[[1]], [[0]]]),
    ],
)
def test_small_plans(lengths, dp, max_tokens, plan):
    assert plan_micro_batches(lengths, dp=dp, max_tokens=max_tokens) == plan


@pytest.mark.parametrize(
    ("lengths", "dp", "max_tokens", "sizes"),
    [
        # Filling longest first by missing cost gives [6, 3] and [5, 4], and 2 does not fit.
        ([4, 6, 5, 3, 2], 2, 10, [[10], [10]]),
        ([100] * 8, 1, 400, [[400, 400]]),
        ([200, 300, 400], 2, 100, [[300, 200], [400, 0]]),
        ([64] * 32, 4, 10_000, [[512]] * 4),
    ],
)
def test_sizes_of_micro_batches(lengths, dp, max_tokens, sizes):
    assert loads(plan_micro_batches(lengths, dp=dp, max_tokens=max_tokens), lengths).tolist() == sizes


def test_planning_time_grows_in_proportion_to_the_sequences():
    """16 times the sequences for 16 times the ranks: a look at every micro-batch for each would take 256 times."""

    def cpu_seconds(count, dp, repeats):
        lengths, times = long_tailed(count, 0), []
        for _ in range(3):
            started = time.process_time()
            for _ in range(repeats):
                plan_micro_batches(lengths, dp=dp, max_tokens=16384)
            times.append((time.process_time() - started) / repeats)
        return min(times)

    assert cpu_seconds(16_000, 128, 1) < 80 * cpu_seconds(1000, 8, 10)


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
def test_ranks_are_balanced_and_need_few_groups(kind):
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


def test_rounds_are_balanced_where_ranks_exchange_tokens():
    lengths_N = LENGTHS["uniform"](np.random.default_rng(0))
    plan = plan_whole_groups(lengths_N, GROUPS, dp=DP, max_tokens=MAX_TOKENS, exchanges=True)
    assert plan is not None
    costs_N = costs_of(lengths_N)
    loads_RK = np.array([[costs_N[members].sum() for members in batches] for batches in plan])
    assert loads_RK.max(axis=0).sum() <= MAX_IMBALANCE * costs_N.sum() / DP


def test_groups_are_split_where_whole_ones_cannot_be_balanced():
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


def test_filling_equals_a_scan_of_all_micro_batches():
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


def search_swap(mine, theirs, gap, max_tokens):
    """Try all swaps one after another."""
    room = max_tokens - sum(length for _, length, _ in theirs)
    best, off = None, gap / 2
    for given in mine:
        for taken in (None, *theirs):
            cost, length = (0.0, 0) if taken is None else taken[:2]
            distance = abs(given[0] - cost - gap / 2)
            if distance < off and given[1] - length <= room:
                best, off = (given, taken), distance
    return best


def pad_members(of_ranks):
    """Return costs and lengths of the sequences of each rank in arrays, and their numbers."""
    size = max(map(len, of_ranks)) + 2
    rows = [[*members, *[(0.0, 0, -1)] * (size - len(members))] for members in of_ranks]
    costs_RM, lengths_RM = (np.array([[each[i] for each in row] for row in rows]) for i in range(2))
    return costs_RM, lengths_RM, np.array(list(map(len, of_ranks)))


def test_swaps_are_those_of_a_search_through_all_of_them():
    """Ties included: costs are a few integers."""
    rng = np.random.default_rng(0)
    found = []
    for _ in range(100):
        ranks = []
        for _ in range(5):
            sizes, highest = rng.integers([1, 0], 8, 2), int(rng.integers(2, 40))
            mine, theirs = ([(float(n), int(n), i) for i, n in enumerate(rng.integers(1, highest, m))] for m in sizes)
            ranks.append((mine, theirs, float(rng.integers(1, 20)) / 2, int(rng.integers(-3, 20))))
        all_mine, all_theirs, gaps, rooms = zip(*ranks, strict=True)
        swaps = find_swaps(pad_members(all_mine), pad_members(all_theirs), np.array(gaps), np.array(rooms))
        for (mine, theirs, gap, room), given, taken, helps in zip(ranks, *swaps, strict=True):
            max_tokens = sum(n for _, n, _ in theirs) + room
            found.append(search_swap(mine, theirs, gap, max_tokens))
            swap = (mine[given], theirs[taken] if taken >= 0 else None) if helps else None
            assert swap == found[-1]
    assert {None, True, False} == {swap if swap is None else swap[1] is None for swap in found}


def balance_by_search(batches, lengths, costs, max_tokens):
    """Swap as `balance_equal_targets` says, on one rank, with a search through all swaps."""
    held = [[(costs[i], lengths[i], i) for i in members] for members in batches]
    loads = [sum(cost for cost, *_ in members) for members in held]
    bound = sum(loads) / len(loads) * (1 + SWAP_TOLERANCE)
    num_swaps = 0
    for _ in range(2 * len(held)):
        top, low = loads.index(max(loads)), loads.index(min(loads))
        swap = None if loads[top] <= bound else search_swap(held[top], held[low], loads[top] - loads[low], max_tokens)
        if swap is None:
            break
        num_swaps += 1
        given, taken = swap
        held[top] = [each for each in held[top] if each != given] + ([] if taken is None else [taken])
        held[low] = [each for each in [*held[low], given] if each != taken]
        loads[top] -= given[0] - (0.0 if taken is None else taken[0])
        loads[low] += given[0] - (0.0 if taken is None else taken[0])
    return [[i for *_, i in members] for members in held], num_swaps


def test_ranks_packed_at_the_same_time_have_what_each_has_alone():
    """Counts, filling, packing where filling fails, and swaps, on ranks of different sizes, one of them without any."""
    num_failed = num_swaps = 0
    for seed in range(20):
        rng = np.random.default_rng(seed)
        lengths_N = rng.integers(1, 60, 150)
        costs_N = (lengths_N * rng.integers(1, 3)).astype(np.float64)  # sums of whole numbers: exact in any order
        ends = np.sort(rng.integers(0, 150, 5))
        ranks = [own_n[np.argsort(-lengths_N[own_n], kind="stable")] for own_n in np.split(rng.permutation(150), ends)]
        ranks.append(np.zeros(0, np.intp))
        max_tokens = int(rng.integers(61, 150))
        table = RankTable(lengths_N, costs_N, ranks)
        packed = [best_fit(lengths_N, own_n, max_tokens) for own_n in ranks]
        assert sorted(table.count_best_fit(max_tokens).tolist()) == sorted(map(len, packed))
        targets = [float(costs_N.max())] + [float(costs_N.sum()) / 6] * max(map(len, packed))
        filled = table.fill(targets, max_tokens)
        for own_n, own_packed, batches in zip(ranks, packed, filled, strict=True):
            own_targets = float(costs_N[own_n].sum()) / sum(targets) * np.array(targets)
            expected = fill_to_targets(lengths_N, costs_N, own_n, own_targets, max_tokens)
            if expected is None:
                num_failed += 1
                expected = own_packed + [[] for _ in range(len(targets) - len(own_packed))]
            assert [members[::-1] for members in batches] == expected
        balanced = balance_equal_targets(filled, targets, lengths_N, costs_N, max_tokens)
        long = 0 if targets[0] <= targets[-1] else 1
        for batches, own in zip(filled, balanced, strict=True):
            swapped, of_rank = balance_by_search(batches[long:], lengths_N.tolist(), costs_N.tolist(), max_tokens)
            assert own == [*batches[:long], *swapped]
            num_swaps += of_rank
    assert num_failed
    assert num_swaps
