"""Splitting of train requests over ranks, and merging of results."""

from __future__ import annotations

from typing import Any

from megarl.megatron.requests import PUSH, PushRequest, PushResult
from megarl.placement.rank_grid import RankGrid
from megarl.reshard.planning.strategy import SyncStats
from megarl.workers.dispatch import BROADCAST


def test_results_of_a_push_are_combined_over_ranks() -> None:
    first = SyncStats(bytes_sent=3, bytes_received=1, bytes_delivered=4, buckets=2, peak_extra_bytes=10, messages=1)
    second = SyncStats(bytes_sent=1, bytes_received=3, bytes_delivered=5, buckets=3, peak_extra_bytes=7, collectives=2)
    results = [PushResult(stats=first), PushResult(stats=second, undelivered=("engine 0 rank 1 is lost",))]
    stats = SyncStats(
        bytes_sent=4, bytes_received=4, bytes_delivered=9, buckets=3, peak_extra_bytes=10, messages=1, collectives=2
    )
    combined = PUSH.collect(results, RankGrid(dp=2))
    assert combined == PushResult(stats=stats, undelivered=("engine 0 rank 1 is lost",))


def test_ranks_get_only_their_own_sinks() -> None:
    sink: Any = "engine 1"
    request = PushRequest(sinks={1: (sink,)}, skipped=frozenset({0}))
    without = PushRequest(skipped=frozenset({0}))
    assert PUSH.distribute(request, RankGrid(dp=3)) == [without, request, without]
    assert PUSH.distribute(None, RankGrid(dp=3)) == [None] * 3


def test_ranks_may_do_unequal_work_in_a_push() -> None:
    """In a push of weights or an export, rank 0 may have most of the work."""
    assert not PUSH.equal_work
    assert not BROADCAST.equal_work
