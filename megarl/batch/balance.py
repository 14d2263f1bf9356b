"""Load balancing: assign sequences to data-parallel ranks and micro-batches.

With expert parallelism, ranks exchange tokens in every micro-batch. A step therefore takes the sum, over micro-batch
indices, of the most expensive rank. Without it, data-parallel ranks meet once per update, which takes as long as the
rank with the largest total. The plan balances both. The micro-batches of one index form a *round*:

              rank 0    rank 1    rank 2
    round 0  [#######] [#######] [###### ]   most expensive round first
    round 1  [####   ] [####   ] [####   ]   balanced: no rank waits

1. Best-fit-decreasing bin packing finds a small number of rounds that hold all tokens.
2. The target cost of a round is that of its longest sequence or an even share of the remaining cost, whichever is
   larger: very long sequences share a round.
3. Longest first, each sequence goes to the micro-batch that is furthest below its target and has room for it.
4. Swaps balance each round.
5. The micro-batches of each round are assigned to ranks such that the ranks' totals are close.

Shapes: N sequences, M micro-batches (rounds * dp); a micro-batch is a list of indices, shortest sequence first.

Ranks that train on whole groups do so as far as their balance allows. A rank fetches a group's trajectories in one
object, which may hold further groups, and each object that a rank needs costs the controller a reference. "Group"
stands below for the sequences of one group, or of one object. Balanced without regard to groups, ranks need most groups
for one of their samples only.

1. Groups go to ranks, most expensive first, each to the rank with the lowest cost so far.
2. Single sequences move between ranks until these are balanced.
3. Each rank fills its micro-batches, longest sequence first, up to the target cost of the round, and balances those of
   equal targets by swaps.

Shapes: N sequences; `balance` explains rounds and targets.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

BALANCE_TOLERANCE = 5e-4
"""Swapping in a round ends once its most expensive micro-batch exceeds the mean by at most this fraction."""

SWAPS_PER_RANK = 4
"""Maximum number of swaps per rank and round; the first few achieve nearly all of the balance."""

ANY_LENGTH = 2**62
"""Room of an empty micro-batch, in tokens."""

MICRO_BATCHES_PER_CHUNK = 16
"""Full micro-batches per replica in one request over a long list: enough to balance replicas and to fill a pipeline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceCost:
    """Compute cost of a sequence: a term linear in its tokens, and a quadratic one for attention.

    PaLM (arXiv 2204.02311, appendix B) counts 2 floating-point operations per token and parameter, and 4 per token,
    head, dimension and attended position; causal attention attends to half of the positions.
    """

    matmul_parameters: int
    """Parameters that one token is multiplied with: active experts only, with the head, without the embedding."""
    attention_layers: int
    """Layers with softmax attention, windowed ones included."""
    attention_width: int
    """Query heads * (query-key dimension + value dimension) of one layer."""
    windowed_layers: int = 0
    """Of `attention_layers`, those with sliding-window attention."""
    window: int = 0
    """Maximum number of positions that a token of a windowed layer attends to, its own included."""
    index_width: int = 0
    """Multiplications of the indexers of all layers per position that they select from."""

    def __post_init__(self) -> None:
        assert self.matmul_parameters > 0, f"matmul_parameters needs to be positive, got {self.matmul_parameters}"
        assert 0 <= self.windowed_layers <= self.attention_layers, f"{self.windowed_layers} of {self.attention_layers}"
        assert self.window > 0 or not self.windowed_layers, f"{self.windowed_layers} layers have window {self.window}"

    def flops(self, num_tokens: int) -> int:
        """Return the floating-point operations of a sequence's forward pass; training takes three times as many."""
        full_layers = self.attention_layers - self.windowed_layers
        pairs = full_layers * _num_attended_pairs(num_tokens, num_tokens)
        pairs += self.windowed_layers * _num_attended_pairs(num_tokens, self.window)
        indexed = self.index_width * _num_attended_pairs(num_tokens, num_tokens)
        return 2 * (self.matmul_parameters * num_tokens + self.attention_width * pairs + indexed)

    def flops_of_each(self, lengths_N: NDArray[np.int64]) -> list[int]:
        """Return `flops` of N sequences, computed once for each length."""
        lengths_U, inverse_N = np.unique(lengths_N, return_inverse=True)
        by_length = [self.flops(n) for n in lengths_U.tolist()]
        return [by_length[i] for i in inverse_N.tolist()]

    def total_flops(self, lengths_N: NDArray[np.int64]) -> int:
        """Return the sum of `flops` over N sequences."""
        return sum(self.flops_of_each(lengths_N))


def _num_attended_pairs(num_tokens: int, window: int) -> int:
    """Return the number of (query, key) position pairs of one layer."""
    growing = min(num_tokens, window)
    return growing * (growing + 1) // 2 + (num_tokens - growing) * window


QWEN2_5_7B = SequenceCost(
    matmul_parameters=28 * (2 * 3584 * 3584 + 2 * 3584 * 512 + 3 * 3584 * 18944) + 3584 * 152064,
    attention_layers=28,
    attention_width=28 * (128 + 128),
)
"""Default for an unknown model: attention costs as much as the rest at 70,000 tokens."""


def plan_micro_batches(
    lengths: Sequence[int] | NDArray[np.int64], *, dp: int, max_tokens: int, cost: SequenceCost = QWEN2_5_7B
) -> list[list[list[int]]]:
    """Return the plan `[dp][micro-batch]`: ascending indices into `lengths`, equally many micro-batches per rank.

    A micro-batch holds at most `max_tokens` tokens, or one longer sequence. Micro-batches with the same index cost
    nearly the same on all ranks, the most expensive come first. With few sequences some micro-batches are empty. The
    plan is deterministic.

    Args:
        lengths: tokens of each sequence.
        dp: number of data-parallel ranks.
        cost: compute cost of a sequence by its length.
    """
    lengths_N = np.array(lengths, np.int64)
    costs_N = np.array(cost.flops_of_each(lengths_N), np.float64)
    descending_N = np.argsort(-lengths_N, kind="stable")
    fewest = best_fit(lengths_N, descending_N, max_tokens)
    rounds = max(1, -(-len(fewest) // dp))
    targets_M = np.repeat(cost_targets(costs_N[descending_N], rounds, dp), dp)
    micro_batches = fill_to_targets(lengths_N, costs_N, descending_N, targets_M, max_tokens)
    if micro_batches is None:
        micro_batches = fewest + [[] for _ in range(rounds * dp - len(fewest))]
    micro_batches = [micro_batch[::-1] for micro_batch in micro_batches]
    micro_batches.sort(key=lambda micro_batch: -costs_N[micro_batch].sum())
    for first in range(0, rounds * dp, dp):
        members = slice(first, first + dp)
        micro_batches[members] = balance_round(micro_batches[members], lengths_N, costs_N, max_tokens)
    return _assign_to_ranks(micro_batches, costs_N, dp)


def best_fit(lengths_N: NDArray[np.int64], descending_N: NDArray[np.intp], max_tokens: int) -> list[list[int]]:
    """Return a small number of micro-batches that hold all sequences, by best-fit-decreasing bin packing."""
    micro_batches: list[list[int]] = []
    rooms: list[tuple[int, int]] = []
    for i, length in zip(descending_N.tolist(), lengths_N[descending_N].tolist(), strict=True):
        tightest = bisect_left(rooms, (length, -1))
        if tightest < len(rooms):
            room, m = rooms.pop(tightest)
        else:
            room, m = max_tokens, len(micro_batches)
            micro_batches.append([])
        micro_batches[m].append(i)
        insort(rooms, (room - length, m))
    return micro_batches


def cost_targets(descending_costs_N: NDArray[np.float64], rounds: int, dp: int) -> list[float]:
    """Return, for each round, the target cost of each of its micro-batches."""
    left = float(descending_costs_N.sum())
    targets = []
    for k in range(rounds):
        longest = float(descending_costs_N[k * dp]) if k * dp < len(descending_costs_N) else 0.0
        targets.append(max(longest, left / ((rounds - k) * dp)))
        left = max(left - dp * targets[-1], 0.0)
    return targets


def fill_to_targets(
    lengths_N: NDArray[np.int64],
    costs_N: NDArray[np.float64],
    descending_N: NDArray[np.intp],
    targets_M: NDArray[np.float64],
    max_tokens: int,
) -> list[list[int]] | None:
    """Fill micro-batches close to their target costs, longest sequence first; None if a sequence does not fit."""
    micro_batches: list[list[int]] = [[] for _ in targets_M]
    # heaps of (-missing cost, index, room) and, of those without room for the last sequence, (-room, index, missing)
    roomy = [(-target, m, ANY_LENGTH) for m, target in enumerate(targets_M.tolist())]
    full: list[tuple[int, int, float]] = []
    heapq.heapify(roomy)
    ordered = zip(descending_N.tolist(), lengths_N[descending_N].tolist(), costs_N[descending_N].tolist(), strict=True)
    for i, length, cost in ordered:
        while full and -full[0][0] >= length:
            room, m, missing = heapq.heappop(full)
            heapq.heappush(roomy, (-missing, m, -room))
        while roomy and roomy[0][2] < length:
            negative, m, space = heapq.heappop(roomy)
            heapq.heappush(full, (-space, m, -negative))
        if not roomy:
            return None
        negative, m, space = roomy[0]
        heapq.heapreplace(roomy, (negative + cost, m, (space if micro_batches[m] else max_tokens) - length))
        micro_batches[m].append(i)
    return micro_batches


def balance_round(
    micro_batches: Sequence[list[int]],
    lengths_N: NDArray[np.int64],
    costs_N: NDArray[np.float64],
    max_tokens: int,
    tolerance: float = BALANCE_TOLERANCE,
) -> list[list[int]]:
    """Return a round after swaps between its most expensive micro-batch and the cheapest one that gains from it.

    Args:
        micro_batches: shortest sequence first.
        tolerance: swapping ends once the most expensive one exceeds the mean by at most this fraction.
    """
    held = [np.array(micro_batch, np.intp) for micro_batch in micro_batches]
    loads = np.array([costs_N[indices].sum() for indices in held])
    for _ in range(SWAPS_PER_RANK * len(held)):
        top = int(loads.argmax())
        if loads[top] <= loads.mean() * (1 + tolerance):
            break
        for other in np.argsort(loads, kind="stable").tolist():
            room = max_tokens - int(lengths_N[held[other]].sum())
            swap = _best_swap(held[top], held[other], lengths_N, costs_N, room)
            if swap is not None:
                break
        else:
            break
        given, taken = swap
        for m, without, plus in ((top, given, taken), (other, taken, given)):
            indices = np.array([*(i for i in held[m].tolist() if i not in without), *plus], np.intp)
            held[m] = indices[np.argsort(lengths_N[indices], kind="stable")]
            loads[m] = costs_N[held[m]].sum()
    return [indices.tolist() for indices in held]


def _best_swap(
    mine: NDArray[np.intp],
    theirs: NDArray[np.intp],
    lengths_N: NDArray[np.int64],
    costs_N: NDArray[np.float64],
    room: int,
) -> tuple[list[int], list[int]] | None:
    """Return the sequence to give and the one (or none) to take that best equalize both loads; None if none helps."""
    gap = costs_N[mine].sum() - costs_N[theirs].sum()
    # Index 0 of `theirs` stands for no sequence.
    lengths = np.concatenate([[0], lengths_N[theirs]])
    costs = np.concatenate([[0.0], costs_N[theirs]])
    fitting = np.searchsorted(lengths, lengths_N[mine] - room)
    ideal = np.searchsorted(costs, costs_N[mine] - gap / 2)
    place = np.maximum(np.stack([ideal - 1, ideal]), fitting)
    difference = costs_N[mine] - costs[np.minimum(place, len(theirs))]
    gains = (
        (place <= len(theirs)) & (difference > gap * BALANCE_TOLERANCE) & (difference < gap * (1 - BALANCE_TOLERANCE))
    )
    if not gains.any():
        return None
    best = int(np.where(gains, abs(difference - gap / 2), np.inf).argmin())
    taken = int(place.flat[best])
    return [int(mine[best % len(mine)])], [] if taken == 0 else [int(theirs[taken - 1])]


def _assign_to_ranks(
    micro_batches: Sequence[list[int]], costs_N: NDArray[np.float64], dp: int
) -> list[list[list[int]]]:
    """Return the plan `[dp][round]`.

    The most expensive micro-batch of a round goes to the rank with the lowest total so far, in order of the most
    uneven rounds first.
    """
    loads_KR = np.array([costs_N[micro_batch].sum() for micro_batch in micro_batches]).reshape(-1, dp)
    plan: list[list[list[int]]] = [[[] for _ in loads_KR] for _ in range(dp)]
    totals_R = np.zeros(dp)
    for k in np.argsort(-np.ptp(loads_KR, axis=1), kind="stable").tolist():
        ranks = np.argsort(totals_R, kind="stable")
        members = np.argsort(-loads_KR[k], kind="stable")
        totals_R[ranks] += loads_KR[k][members]
        for rank, member in zip(ranks.tolist(), members.tolist(), strict=True):
            plan[rank][k] = sorted(micro_batches[k * dp + member])
    return plan


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
        swap = None if loads[top] <= bound else find_swap(held[top], held[low], loads[top] - loads[low], max_tokens)
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


def find_swap(
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
