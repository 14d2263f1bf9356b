"""Which trajectory goes to which data-parallel rank and micro-batch: equal work, equal numbers of micro-batches."""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def cost(num_tokens: int, *, attention_knee: int = 8192) -> float:
    """Relative time of one sequence: linear in tokens plus attention's square, equal at `attention_knee` tokens."""
    return num_tokens * (1 + num_tokens / attention_knee)


def partition(costs: Sequence[float], bins: int) -> list[list[int]]:
    """Indices in `bins` lists of nearly equal total cost (longest processing time first); deterministic.

    Bins differ in length by at most what the costs demand; with fewer items than bins some are empty.
    """
    heap = [(0.0, 0, b) for b in range(bins)]
    parts: list[list[int]] = [[] for _ in range(bins)]
    for index in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        total, count, b = heapq.heappop(heap)
        parts[b].append(index)
        heapq.heappush(heap, (total + costs[index], count + 1, b))
    return [sorted(part) for part in parts]


def plan_micro_batches(lengths: Sequence[int], *, dp: int, max_tokens: int) -> list[list[list[int]]]:
    """[dp][micro-batch] -> indices into `lengths`; every rank gets the same number of micro-batches.

    A micro-batch holds at most `max_tokens` tokens; a longer sequence stands alone.
    """
    ranks = partition([cost(n) for n in lengths], dp)
    loads = [sum(lengths[i] for i in part) for part in ranks]
    count = max(1, *(-(-load // max_tokens) for load in loads))
    while True:
        plan = [_split([lengths[i] for i in part], part, count) for part in ranks]
        if all(_fits(micro, lengths, max_tokens) for rank in plan for micro in rank):
            return plan
        count += 1


def _split(lengths: Sequence[int], indices: Sequence[int], count: int) -> list[list[int]]:
    return [[indices[i] for i in part] for part in partition([float(n) for n in lengths], count)]


def _fits(micro: Sequence[int], lengths: Sequence[int], max_tokens: int) -> bool:
    return len(micro) <= 1 or sum(lengths[i] for i in micro) <= max_tokens
