"""Sets of ranks that hold, or need, the same boxes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from megarl.reshard.layout.layout import Boxes, Ints, WeightLayout, hash_rows, once_each
from megarl.reshard.layout.relay_tree import Ranks

HASH_BITS = 22
"""Leading hash bits compared first: enough that few of a million boxes collide by chance."""


def group_ranks(
    layouts: Sequence[WeightLayout], ranks: Sequence[int], key: Callable[[WeightLayout], bytes]
) -> list[tuple[WeightLayout, Ranks]]:
    """Return the first layout of each key with the ranks of all layouts that have it, in order of appearance."""
    found: dict[bytes, tuple[WeightLayout, list[int]]] = {}
    for layout, rank, of_layout in zip(layouts, ranks, once_each(key, layouts), strict=True):
        found.setdefault(of_layout, (layout, []))[1].append(rank)
    return [(layout, tuple(members)) for layout, members in found.values()]


def find_rank_sets(of_layout: Ints, starts: Ints, ranks: Sequence[Ranks]) -> tuple[Ints, list[Ranks]]:
    """Return, by run of `of_layout`, the index of the set of ranks of its layouts; and the sets."""
    if not len(starts):
        return np.zeros(0, np.int64), []
    mark = hash_rows([np.arange(1, len(ranks) + 1)])
    sums = np.add.reduceat(mark[of_layout], starts)  # the sum, modulo 2**64, is a hash of the set
    _, first, number = np.unique(sums, return_index=True, return_inverse=True)
    stops = np.r_[starts[1:], len(of_layout)]
    sets = []
    for run in first:
        members = set(of_layout[starts[run] : stops[run]].tolist())
        sets.append(tuple(sorted(rank for layout in members for rank in ranks[layout])))
    return number.reshape(-1).astype(np.int64), sets


def find_receiver_sets(tables: Sequence[Boxes], ranks: Sequence[Ranks]) -> tuple[list[Ints], list[Ranks]]:
    """Return, by class and box, the index of the set of ranks that need exactly this box; and the distinct sets.

    Args:
        tables: by class, the boxes that its ranks need.
        ranks: by class, its ranks.
    """
    of_class = np.repeat(np.arange(len(tables)), [len(t.tensor) for t in tables])
    every = Boxes.join(tables)
    keys = hash_rows([every.tensor, *every.start.T, *every.stop.T])
    receivers, sets = of_class.copy(), list(ranks)
    # most boxes are needed by one class only: sort just those whose short hash is shared
    short = (keys >> np.uint64(64 - HASH_BITS)).astype(np.int64)
    some = np.flatnonzero((np.bincount(short) > 1)[short])
    order = some[np.argsort(keys[some], kind="stable")]
    if len(order):
        first = np.r_[True, keys[order][1:] != keys[order][:-1]]
        found, more = find_rank_sets(of_class[order], np.flatnonzero(first), ranks)
        receivers[order] = len(sets) + found[np.cumsum(first) - 1]
        sets += more
    number: dict[Ranks, int] = {}
    receivers = np.array([number.setdefault(members, len(number)) for members in sets], np.int64)[receivers]
    return np.split(receivers, np.cumsum([len(t.tensor) for t in tables])[:-1]), list(number)
