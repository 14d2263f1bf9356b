"""Micro-batches of data-parallel ranks that train on whole groups, as far as the balance of the ranks allows.

A rank fetches a group's trajectories in one object, which may hold further groups, and each object that a rank needs
costs the controller a reference. "Group" stands below for the sequences of one group, or of one object.
Balanced without regard to groups, ranks need most groups for one of their samples only.

1. Groups go to ranks, most expensive first, each to the rank with the lowest cost so far.
2. Single sequences move between ranks until these are balanced.
3. Each rank fills its micro-batches, longest sequence first, up to the target cost of the round, and balances those of
   equal targets by swaps.

Shapes: N sequences; `balance` explains rounds and targets.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from megarl.batch.balance import (
    QWEN2_5_7B,
    SequenceCost,
    balance_round,
    best_fit,
    cost_targets,
    fill_to_targets,
)

MIN_SEQUENCES = 512
"""With fewer sequences, references cost less than the balance that whole groups give up."""

MAX_IMBALANCE = 1.01
"""Cost of the most expensive rank over the mean up to which a plan with whole groups is used."""

SWAP_TOLERANCE = 2e-3
"""Swapping ends once the most expensive micro-batch exceeds the mean by at most this fraction."""


def plan_whole_groups(
    lengths_N: NDArray[np.int64],
    groups_N: NDArray[np.int64],
    *,
    dp: int,
    max_tokens: int,
    exchanges: bool,
    cost: SequenceCost = QWEN2_5_7B,
) -> list[list[list[int]]] | None:
    """Return a plan as `plan_micro_batches` does, in which ranks share few groups; None if it would not be balanced.

    Args:
        lengths_N: tokens of each sequence.
        groups_N: number of its group.
        dp: number of data-parallel ranks.
        exchanges: whether ranks exchange tokens in every micro-batch, as with expert parallelism. Then every round has
            to be balanced, and else the sum over the rounds.
    """
    if dp == 1 or len(lengths_N) < MIN_SEQUENCES:
        return None
    costs_N = np.array(cost.flops_of_each(lengths_N), np.float64)
    ranks = _assign_groups(lengths_N, costs_N, groups_N, dp)
    if ranks is None:
        return None
    rounds = max(len(best_fit(lengths_N, own_n, max_tokens)) for own_n in ranks)
    targets = cost_targets(np.sort(costs_N)[::-1], rounds, dp)
    plan = [_fill_rank(lengths_N, costs_N, own_n, targets, max_tokens) for own_n in ranks]
    loads_RK = np.array([[costs_N[members].sum() for members in batches] for batches in plan])
    slowest = loads_RK.max(axis=0).sum() if exchanges else loads_RK.sum(axis=1).max()
    if slowest > MAX_IMBALANCE * loads_RK.sum() / dp:
        return None
    return [[sorted(members) for members in batches] for batches in plan]


def _assign_groups(
    lengths_N: NDArray[np.int64], costs_N: NDArray[np.float64], groups_N: NDArray[np.int64], dp: int
) -> list[NDArray[np.intp]] | None:
    """Return the sequences of each rank, longest first; None if there are too few groups."""
    numbers_G, inverse_N = np.unique(groups_N, return_inverse=True)
    if len(numbers_G) < 2 * dp:
        return None
    costs_G = np.bincount(inverse_N, costs_N)
    rank_of_G = np.empty(len(numbers_G), np.int64)
    loads = [(0.0, rank) for rank in range(dp)]
    for group in np.argsort(-costs_G, kind="stable").tolist():
        load, rank = loads[0]
        rank_of_G[group] = rank
        heapq.heapreplace(loads, (load + float(costs_G[group]), rank))
    rank_N = rank_of_G[inverse_N]
    order_N = np.lexsort((lengths_N, rank_N))  # by rank, shortest first
    held = np.split(order_N, np.cumsum(np.bincount(rank_N, minlength=dp))[:-1])
    unlimited = int(lengths_N.sum())
    balanced = balance_round([own_n.tolist() for own_n in held], lengths_N, costs_N, unlimited, SWAP_TOLERANCE)
    return [np.array(own[::-1], np.intp) for own in balanced]


def _fill_rank(
    lengths_N: NDArray[np.int64],
    costs_N: NDArray[np.float64],
    own_n: NDArray[np.intp],
    targets: Sequence[float],
    max_tokens: int,
) -> list[list[int]]:
    """Return the micro-batches of one rank, most expensive first.

    Args:
        own_n: the rank's sequences, longest first.
        targets: cost of each round, of which there are enough for best-fit packing.
    """
    scale = float(costs_N[own_n].sum()) / sum(targets)
    filled = fill_to_targets(lengths_N, costs_N, own_n, scale * np.array(targets), max_tokens)
    if filled is None:  # the micro-batches have too little room to be filled evenly
        filled = best_fit(lengths_N, own_n, max_tokens)
        filled += [[] for _ in range(len(targets) - len(filled))]
    long = sum(target > targets[-1] for target in targets)
    batches = [members[::-1] for members in filled[:long]]
    batches += _balance([members[::-1] for members in filled[long:]], lengths_N, costs_N, max_tokens)
    return sorted(batches, key=lambda members: -float(costs_N[members].sum()))


def _balance(
    batches: list[list[int]], lengths_N: NDArray[np.int64], costs_N: NDArray[np.float64], max_tokens: int
) -> list[list[int]]:
    """Balance a few small micro-batches by swaps between the most and the least expensive one."""
    held = [[(float(costs_N[i]), int(lengths_N[i]), i) for i in members] for members in batches]
    loads = [sum(cost for cost, _, _ in members) for members in held]
    bound = sum(loads) / max(1, len(loads)) * (1 + SWAP_TOLERANCE)
    for _ in range(2 * len(held)):
        top = max(range(len(loads)), key=loads.__getitem__)
        low = min(range(len(loads)), key=loads.__getitem__)
        swap = None if loads[top] <= bound else _find_swap(held[top], held[low], loads[top] - loads[low], max_tokens)
        if swap is None:
            break
        given, taken = swap
        held[top].remove(given)
        held[low].append(given)
        if taken is not None:
            held[low].remove(taken)
            held[top].append(taken)
        moved = given[0] - (0.0 if taken is None else taken[0])
        loads[top] -= moved
        loads[low] += moved
    return [[i for _, _, i in members] for members in held]


_Sequence = tuple[float, int, int]
"""Cost, length and index of a sequence."""


def _find_swap(
    mine: Sequence[_Sequence], theirs: Sequence[_Sequence], gap: float, max_tokens: int
) -> tuple[_Sequence, _Sequence | None] | None:
    """Return the sequence to give and the one (or none) to take that best equalize both loads; None if none helps."""
    room = max_tokens - sum(length for _, length, _ in theirs)
    takeable = [(0.0, 0), *((cost, length) for cost, length, _ in theirs)]
    costs_M1, lengths_M1 = (np.array(column)[:, None] for column in zip(*((c, n) for c, n, _ in mine), strict=True))
    costs_T, lengths_T = map(np.array, zip(*takeable, strict=True))
    off_MT = np.abs(costs_M1 - costs_T - gap / 2)
    off_MT[lengths_M1 - lengths_T > room] = np.inf
    given, taken = divmod(int(off_MT.argmin()), len(takeable))  # the first of equally good ones
    if not off_MT[given, taken] < gap / 2:
        return None
    return mine[given], theirs[taken - 1] if taken else None
