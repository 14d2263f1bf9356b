"""Number partitioning by largest differencing (Karmarkar and Karp 1982) into several parts.

Every partial solution is a tuple of parts. The two solutions with the largest differences between their parts are
merged, largest part with smallest, until one is left.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeAlias


class _Part(NamedTuple):
    total: int
    indices: tuple[int, ...]


_Solution: TypeAlias = tuple[float, int, list[_Part]]
"""(smallest minus largest total, creation number as a tie-breaker, parts in ascending order)."""


def partition(sizes: Sequence[int], parts: int) -> list[list[int]]:
    """Return the indices of `sizes` in `parts` lists of nearly equal total size."""
    nothing = [_Part(0, ())] * (parts - 1)
    return _merge([*nothing, _Part(size, (i,))] for i, size in enumerate(sizes))


def partition_equally(sizes: Sequence[int], parts: int) -> list[list[int]]:
    """Partition with equally many indices in each list; `parts` must divide their number."""
    assert len(sizes) % parts == 0, f"{len(sizes)} % {parts} = {len(sizes) % parts}"
    order = sorted(range(len(sizes)), key=lambda i: sizes[i])
    return _merge([_Part(sizes[i], (i,)) for i in order[k : k + parts]] for k in range(0, len(order), parts))


def _merge(solutions: Iterable[list[_Part]]) -> list[list[int]]:
    heap: list[_Solution] = [(parts[0].total - parts[-1].total, made, parts) for made, parts in enumerate(solutions)]
    heapq.heapify(heap)
    made = len(heap)
    while len(heap) > 1:
        widest, next_widest = heapq.heappop(heap)[2], heapq.heappop(heap)[2]
        pairs = zip(widest, reversed(next_widest), strict=True)
        merged = sorted(_Part(a.total + b.total, a.indices + b.indices) for a, b in pairs)
        heapq.heappush(heap, (merged[0].total - merged[-1].total, made, merged))
        made += 1
    return [list(part.indices) for part in heap[0][2]]
