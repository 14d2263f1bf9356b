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
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

BALANCE_TOLERANCE = 5e-4
"""Swapping in a round ends once its most expensive micro-batch exceeds the mean by at most this fraction."""

SWAPS_PER_RANK = 4
"""Maximum number of swaps per rank and round; the first few achieve nearly all of the balance."""

ANY_LENGTH = 2**62
"""Room of an empty micro-batch, in tokens."""

_CLOSED = -ANY_LENGTH
"""Room of a micro-batch that was not begun yet, in tokens."""

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
    table = RankTable(lengths_N, costs_N, ranks)
    rounds = int(table.count_best_fit(max_tokens).max())
    targets = cost_targets(np.sort(costs_N)[::-1], rounds, dp)
    batches_R = balance_equal_targets(table.fill(targets, max_tokens), targets, lengths_N, costs_N, max_tokens)
    weighed = [[(float(costs_N[members].sum()), members) for members in batches] for batches in batches_R]
    for of_rank in weighed:
        of_rank.sort(key=lambda batch: -batch[0])  # most expensive first
    loads_RK = np.array([[load for load, _ in batches] for batches in weighed])
    slowest = loads_RK.max(axis=0).sum() if exchanges else loads_RK.sum(axis=1).max()
    if slowest > MAX_IMBALANCE * loads_RK.sum() / dp:
        return None
    return [[sorted(members) for _, members in batches] for batches in weighed]


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


class RankTable:
    """The sequences of R ranks in columns, so that all ranks pack their s-th longest sequence at the same time.

    Each rank gets what `best_fit` and `fill_to_targets` return for its sequences alone. Ranks are ordered by their
    number of sequences, most first: those that have an s-th one are the first `num_active[s]`.
    """

    def __init__(
        self, lengths_N: NDArray[np.int64], costs_N: NDArray[np.float64], ranks: Sequence[NDArray[np.intp]]
    ) -> None:
        """`ranks`: the sequences of each rank, longest first."""
        self._lengths_N, self._costs_N, self._ranks = lengths_N, costs_N, ranks
        sizes_R = np.array(list(map(len, ranks)))
        self._order_R = np.argsort(-sizes_R, kind="stable")
        indices_SR = np.zeros((max(1, int(sizes_R.max(initial=0))), len(ranks)), np.int64)
        for column, rank in enumerate(self._order_R.tolist()):
            indices_SR[: len(ranks[rank]), column] = ranks[rank]
        self._lengths_SR, self._costs_SR = lengths_N[indices_SR], costs_N[indices_SR]
        self._num_active = [int((sizes_R > s).sum()) for s in range(len(indices_SR))]

    def count_best_fit(self, max_tokens: int) -> NDArray[np.int64]:
        """Return the number of micro-batches that `best_fit` needs on each rank, [R] in the order of the table."""
        num_R, rows_R = np.zeros(len(self._ranks), np.int64), np.arange(len(self._ranks))
        rooms_RM = np.full((len(self._ranks), 1), _CLOSED)
        for lengths_R, num_active in zip(self._lengths_SR, self._num_active, strict=True):
            length_R1, rows = lengths_R[:num_active, None], rows_R[:num_active]
            found_R = np.where(rooms_RM[:num_active] >= length_R1, rooms_RM[:num_active], ANY_LENGTH).argmin(axis=1)
            rooms_R = rooms_RM[rows, found_R]
            opens_R = rooms_R < length_R1[:, 0]
            found_R[opens_R] = num_R[:num_active][opens_R]
            num_R[:num_active] += opens_R
            if (num_columns := int(num_R.max())) > rooms_RM.shape[1]:
                closed = ((0, 0), (0, num_columns - rooms_RM.shape[1]))
                rooms_RM = np.pad(rooms_RM, closed, constant_values=_CLOSED)
            rooms_RM[rows, found_R] = np.where(opens_R, max_tokens, rooms_R) - length_R1[:, 0]
        return num_R

    def fill(self, targets: Sequence[float], max_tokens: int) -> list[list[list[int]]]:
        """Return the micro-batches of each rank as `fill_to_targets` does, shortest sequence first.

        A rank whose micro-batches have too little room to be filled evenly has those of `best_fit`.

        Args:
            targets: cost of each round in the mean over the ranks, enough rounds for `best_fit`.
        """
        total, num_targets = sum(targets), len(targets)
        scales = [float(self._costs_N[own_n].sum()) / total for own_n in self._ranks]
        negative_RM = -(np.array(scales)[self._order_R, None] * np.array(targets))
        rooms_RM = np.full(negative_RM.shape, ANY_LENGTH)
        negative_C, rooms_C = negative_RM.reshape(-1), rooms_RM.reshape(-1)
        first_R = num_targets * np.arange(len(self._ranks))
        fits_R = np.ones(len(self._ranks), np.bool_)
        chosen_SR = np.zeros(self._lengths_SR.shape, np.int64)
        for s, num_active in enumerate(self._num_active):
            length_R, active = self._lengths_SR[s, :num_active], slice(num_active)
            is_roomy_RM = rooms_RM[active] >= length_R[:, None]
            chosen_SR[s, active] = np.where(is_roomy_RM, negative_RM[active], np.inf).argmin(axis=1)
            cells_R = first_R[active] + chosen_SR[s, active]
            rooms_R = rooms_C[cells_R]
            fits_R[active] &= rooms_R >= length_R
            negative_C[cells_R] += self._costs_SR[s, active]
            rooms_C[cells_R] = np.where(rooms_R == ANY_LENGTH, max_tokens, rooms_R) - length_R
        filled: list[list[list[int]]] = [[]] * len(self._ranks)
        for column, rank in enumerate(self._order_R.tolist()):
            own_n = self._ranks[rank]
            if fits_R[column]:
                chosen_n = chosen_SR[: len(own_n), column][::-1]
                members = own_n[::-1][np.argsort(chosen_n, kind="stable")].tolist()
                ends = [0, *np.cumsum(np.bincount(chosen_n, minlength=num_targets)).tolist()]
                filled[rank] = [members[a:b] for a, b in pairwise(ends)]
            else:
                tight = [members[::-1] for members in best_fit(self._lengths_N, own_n, max_tokens)]
                filled[rank] = tight + [[] for _ in range(num_targets - len(tight))]
        return filled


def balance_equal_targets(
    batches_R: Sequence[list[list[int]]],
    targets: Sequence[float],
    lengths_N: NDArray[np.int64],
    costs_N: NDArray[np.float64],
    max_tokens: int,
) -> list[list[list[int]]]:
    """Return the micro-batches of R ranks, those of each rank with the lowest target balanced by swaps among them.

    A swap is between the most and the least expensive one of a rank. All ranks swap at the same time.
    """
    long = sum(target > targets[-1] for target in targets)
    held = [batches[long:] for batches in batches_R]
    sizes_RB = np.array([[len(members) for members in batches] for batches in held])
    num_batches, costs = sizes_RB.shape[1], costs_N.tolist()
    # one more sequence, without cost and tokens, pads the members
    costs_P, lengths_P, padding = np.append(costs_N, 0.0), np.append(lengths_N, 0), len(lengths_N)
    members_RBM = np.full((*sizes_RB.shape, int(sizes_RB.max()) + 1), padding)
    is_member_RBM = np.arange(members_RBM.shape[2]) < sizes_RB[..., None]
    members_RBM[is_member_RBM] = [i for batches in held for members in batches for i in members]
    loads = [[sum([costs[i] for i in members]) for members in batches] for batches in held]
    bounds_R = np.array([sum(of_rank) / num_batches * (1 + SWAP_TOLERANCE) for of_rank in loads])
    loads_RB, active_R = np.array(loads, np.float64), np.arange(len(held))
    for _ in range(2 * num_batches):
        top_R, low_R = loads_RB[active_R].argmax(axis=1), loads_RB[active_R].argmin(axis=1)
        is_uneven_R = loads_RB[active_R, top_R] > bounds_R[active_R]
        active_R, top_R, low_R = active_R[is_uneven_R], top_R[is_uneven_R], low_R[is_uneven_R]
        if not len(active_R):
            break
        gap_R = loads_RB[active_R, top_R] - loads_RB[active_R, low_R]
        mine_RM, theirs_RM = members_RBM[active_R, top_R], members_RBM[active_R, low_R]
        num_mine_R, num_theirs_R = sizes_RB[active_R, top_R], sizes_RB[active_R, low_R]
        room_R = max_tokens - lengths_P[theirs_RM].sum(axis=1)
        given_R, taken_R, helps_R = find_swaps(
            (costs_P[mine_RM], lengths_P[mine_RM], num_mine_R),
            (costs_P[theirs_RM], lengths_P[theirs_RM], num_theirs_R),
            gap_R,
            room_R,
        )
        rows_R = np.flatnonzero(helps_R)
        active_R, top_R, low_R = active_R[rows_R], top_R[rows_R], low_R[rows_R]
        given_R, taken_R = given_R[rows_R], taken_R[rows_R]
        takes_R = taken_R >= 0
        given_ids_R = mine_RM[rows_R, given_R]
        taken_ids_R = np.where(takes_R, theirs_RM[rows_R, taken_R], padding)
        members_RBM[active_R, top_R] = _exchange(mine_RM[rows_R], num_mine_R[rows_R], given_R, taken_ids_R)
        members_RBM[active_R, low_R] = _exchange(theirs_RM[rows_R], num_theirs_R[rows_R], taken_R, given_ids_R)
        sizes_RB[active_R, top_R] -= ~takes_R
        sizes_RB[active_R, low_R] += ~takes_R
        moved_R = costs_P[given_ids_R] - costs_P[taken_ids_R]
        loads_RB[active_R, top_R] -= moved_R
        loads_RB[active_R, low_R] += moved_R
        if int(sizes_RB.max()) == members_RBM.shape[2]:
            members_RBM = np.pad(members_RBM, ((0, 0), (0, 0), (0, 1)), constant_values=padding)
    balanced = zip(batches_R, members_RBM.tolist(), sizes_RB.tolist(), strict=True)
    return [
        [*batches[:long], *(members[:size] for members, size in zip(own, sizes, strict=True))]
        for batches, own, sizes in balanced
    ]


_Members = tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.int64]]
"""Padded costs and lengths of the sequences of a micro-batch of each of R ranks, [R, M] each, and their number, [R]."""


def find_swaps(
    mine: _Members, theirs: _Members, gap_R: NDArray[np.float64], room_R: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]:
    """Return the swap of each rank that best equalizes both loads, the first one of equally good ones.

    Returns:
        Index of the sequence to give, index of the one to take, -1 for none, and whether the swap helps, [R] each.

    Args:
        gap_R: the cost of `mine` minus that of `theirs`.
        room_R: tokens by which `theirs` may grow.
    """
    (costs_RM, lengths_RM, num_mine_R), (costs_RT, lengths_RT, num_theirs_R) = mine, theirs
    none_R1 = np.zeros((len(gap_R), 1), np.int64)  # stands for no sequence to take
    costs_RT, lengths_RT = np.hstack([none_R1, costs_RT]), np.hstack([none_R1, lengths_RT])
    num_taken = costs_RT.shape[1]
    off_RMT = np.abs(costs_RM[:, :, None] - costs_RT[:, None] - (gap_R / 2)[:, None, None])
    off_RMT[lengths_RM[:, :, None] - lengths_RT[:, None] > room_R[:, None, None]] = np.inf
    off_RMT[np.arange(costs_RM.shape[1]) >= num_mine_R[:, None]] = np.inf
    np.swapaxes(off_RMT, 1, 2)[np.arange(num_taken) > num_theirs_R[:, None]] = np.inf
    best_R = off_RMT.reshape(len(gap_R), -1).argmin(axis=1)
    given_R, taken_R = np.divmod(best_R, num_taken)
    return given_R, taken_R - 1, off_RMT[np.arange(len(gap_R)), given_R, taken_R] < gap_R / 2


def _exchange(
    members_RM: NDArray[np.int64], num_R: NDArray[np.int64], dropped_R: NDArray[np.int64], added_R: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return the members of a micro-batch of each of R ranks without one, the others in order, and with one at the end.

    Args:
        num_R: number of members; there is room for one more.
        dropped_R: index of the one that leaves; -1: none does.
        added_R: the one that is added; padding: none.
    """
    drops_R = dropped_R >= 0
    shift_RM = drops_R[:, None] & (np.arange(members_RM.shape[1]) >= dropped_R[:, None])
    places_RM = np.minimum(np.arange(members_RM.shape[1]) + shift_RM, members_RM.shape[1] - 1)
    left_RM = np.take_along_axis(members_RM, places_RM, axis=1)
    left_RM[np.arange(len(num_R)), num_R - drops_R] = added_R
    return left_RM
