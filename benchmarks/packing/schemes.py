"""Schemes that split one step over ranks and micro-batches: those of other frameworks, reimplemented, and ours.

A scheme plans with token counts or with a cost per sequence. All ranks get the same number of micro-batches, some of
which may be empty.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from benchmarks.packing.karmarkar_karp import partition, partition_equally
from megarl.batch.balance import SequenceCost, plan_micro_batches

Plan: TypeAlias = list[list[list[int]]]
"""Indices of sequences, as [dp rank][micro-batch][sequence]."""

Scheme: TypeAlias = Callable[[Sequence[int], int, int, SequenceCost], Plan]
"""Function of lengths, number of ranks, token budget and cost."""

PADDED = "padded"
OURS = "megarl"


def padded(lengths: Sequence[int], dp: int, max_tokens: int, _: SequenceCost) -> Plan:
    """Pad every sequence to the longest; fill micro-batches with rows in arrival order up to the budget."""
    rows = max(1, max_tokens // max(lengths))
    shares = [list(range(rank, len(lengths), dp)) for rank in range(dp)]
    return _pad_to_equal_count([[share[i : i + rows] for i in range(0, len(share), rows)] for share in shares])


def first_fit(lengths: Sequence[int], dp: int, max_tokens: int, _: SequenceCost) -> Plan:
    """Put each sequence, in arrival order, into the first pack with room; assign packs to ranks round-robin."""
    packs: list[list[int]] = []
    rooms: list[int] = []
    for i, length in enumerate(lengths):
        first = next((p for p, room in enumerate(rooms) if room >= length), len(packs))
        if first == len(packs):
            packs.append([])
            rooms.append(max_tokens)
        packs[first].append(i)
        rooms[first] -= length
    return _pad_to_equal_count([packs[rank::dp] for rank in range(dp)])


def karmarkar_karp(lengths: Sequence[int], dp: int, max_tokens: int, _: SequenceCost) -> Plan:
    """Partition by largest differencing on token counts, like verl."""
    return _partition_twice(lengths, lengths, dp, max_tokens)


def karmarkar_karp_cost(lengths: Sequence[int], dp: int, max_tokens: int, cost: SequenceCost) -> Plan:
    """Partition by largest differencing on costs, like later versions of verl with the cost of one fixed model."""
    return _partition_twice(lengths, [cost.flops(n) for n in lengths], dp, max_tokens)


def ours(lengths: Sequence[int], dp: int, max_tokens: int, cost: SequenceCost) -> Plan:
    """Plan with the planner of megarl, `megarl.batch.balance.plan_micro_batches`."""
    return plan_micro_batches(lengths, dp=dp, max_tokens=max_tokens, cost=cost)


SCHEMES: Mapping[str, Scheme] = {
    PADDED: padded,
    "first_fit": first_fit,
    "karmarkar_karp": karmarkar_karp,
    "karmarkar_karp_cost": karmarkar_karp_cost,
    OURS: ours,
}
"""Schemes by name, in the order of the reports."""


def _partition_twice(lengths: Sequence[int], sizes: Sequence[int], dp: int, max_tokens: int) -> Plan:
    """Give each rank equally many sequences and balanced sizes, then balance the sizes of each rank's micro-batches.

    The number of micro-batches is what the fullest rank needs if it fills them; none is limited to the budget.
    The micro-batches of a rank are in ascending order of size.
    """
    shares = partition_equally(sizes, dp)
    loads = [sum(lengths[i] for i in share) for share in shares]
    count = max(-(-load // max_tokens) for load in loads)
    plan = []
    for share in shares:
        parts = partition([sizes[i] for i in share], min(count, len(share)))
        plan.append([[share[i] for i in part] for part in parts])
    return _pad_to_equal_count(plan)


def _pad_to_equal_count(plan: Plan) -> Plan:
    count = max(map(len, plan))
    return [rank + [[] for _ in range(count - len(rank))] for rank in plan]
