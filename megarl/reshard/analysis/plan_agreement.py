"""Agreement of plans about the step of every operation, for plans of too many ranks to simulate all of them.

A step is one hop of one round, or its all-gathers. Every rank passes through the same steps in the same order and posts
one group in each (`nccl_progress.posted_groups`). If both ends of every operation are in the same step, the plan makes
progress: consider the first step that some rank does not end. All ranks have ended the steps before it, so all that
have operations in it have started them, and all these operations have met.

Both ends of a message derive its step from the same tables (`SyncIndex`): the round from the tensor part, the hop from
`SourceSelector.sources`, of which `sends` is the inverse. What a rank derives for itself is which tensor parts it
all-gathers, and hence does not send. That depends only on what the members of its group hold and need, so it is
compared on one group of each kind. The messages between the compared ranks are compared too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from megarl.reshard.layout.box_index import SyncIndex
from megarl.reshard.layout.boxes import Ints
from megarl.reshard.planning.plan import Moves, RankPlan, plan_rank

MAX_REPRESENTATIVES = 128
"""Limit on the ranks that are planned: planning one takes up to two seconds for the largest models."""


def representative_plans(index: SyncIndex) -> list[RankPlan] | None:
    """Return the plans of some ranks, whose agreement implies that of all; None if these are too many to plan.

    With all-gather groups these are the members of one group of each kind, otherwise the first, the middle and the last
    rank that receives, each with the first and the last of its sources in each hop.
    """
    if not index.groups:
        receivers = sorted(index.class_of)
        plans = {rank: plan_rank(index, rank) for rank in {receivers[i * (len(receivers) - 1) // 2] for i in range(3)}}
        sources = {source for plan in plans.values() for source in _outer_sources(plan)}
        return [*plans.values(), *(plan_rank(index, rank) for rank in sorted(sources - set(plans)))]
    kinds: dict[tuple[tuple[int, int | None], ...], tuple[int, ...]] = {}
    for group in index.groups:
        members = tuple(sorted(group))
        kinds.setdefault(tuple((id(index.sources[rank]), index.class_of.get(rank)) for rank in members), members)
    ranks = [rank for members in kinds.values() for rank in members]
    return [plan_rank(index, rank) for rank in ranks] if len(ranks) <= MAX_REPRESENTATIVES else None


def _outer_sources(plan: RankPlan) -> Iterator[int]:
    moves = plan.receives
    for hop in np.unique(moves.hop):
        peers = np.unique(moves.peer[(moves.hop == hop) & (moves.peer != plan.rank)])
        yield from peers[[0, -1]].tolist() if len(peers) else ()


def find_disagreements(plans: Sequence[RankPlan]) -> list[str]:
    """Return one sentence for each pair of ranks whose plans disagree about a step; empty if all agree."""
    found = (_disagreement(one, other) for one in plans for other in plans if one.rank != other.rank)
    return [problem for problem in found if problem is not None]


def _disagreement(one: RankPlan, other: RankPlan) -> str | None:
    """Return how what `one` receives from `other` differs from what `other` sends, or their all-gathers; else None."""
    receives, sends = one.receives, other.sends
    received = _steps(receives, (receives.peer == other.rank) & ~one.gathered)
    difference = _first_difference(received, _steps(sends, sends.peer == one.rank))
    if difference is not None:
        step = f"hop {difference[1]} of round {difference[0]}"
        return f"ranks {other.rank} and {one.rank} disagree about what the first sends the other in {step}"
    if other.rank in one.group:
        difference = _first_difference(_steps(receives, one.gathered), _steps(other.receives, other.gathered))
        if difference is not None:
            return f"ranks {one.rank} and {other.rank} disagree about the all-gathers of round {difference[0]}"
    return None


def _steps(moves: Moves, rows: Ints) -> Ints:
    """Return [N, 4] round, hop, tensor part and bytes of the moves in `rows`, sorted."""
    table = np.column_stack([moves.round, moves.hop, moves.item, moves.num_bytes])[rows]
    order: Ints = np.lexsort(table[:, ::-1].T)
    return table[order]


def _first_difference(a: Ints, b: Ints) -> tuple[int, ...] | None:
    """Return the first row that only one of two sorted tables has at its place, or None if they are equal."""
    common = min(len(a), len(b))
    differs = np.flatnonzero((a[:common] != b[:common]).any(axis=1))
    if len(differs):
        at = int(differs[0])
        return min(tuple(a[at].tolist()), tuple(b[at].tolist()))
    longer = a if len(a) > common else b
    return tuple(longer[common].tolist()) if len(longer) > common else None
