from __future__ import annotations

from megarl.placement.rank_grid import RankGrid
from megarl.workers.dispatch import BROADCAST, from_first, from_output, to_all


def test_broadcast_hands_every_rank_the_same_and_reads_rank_0() -> None:
    grid = RankGrid(tp=2, dp=2)
    argument = object()
    assert BROADCAST.dispatch(argument, grid) == to_all(argument, grid) == [argument] * 4
    assert BROADCAST.collect(["a", "b", "c", "d"], grid) == from_first(["a", "b", "c", "d"], grid) == "a"


def test_the_output_is_read_where_the_last_stage_is() -> None:
    results = [f"rank {rank}" for rank in range(8)]
    assert from_output(results, RankGrid(tp=2, dp=2, pp=2)) == "rank 4"
    assert from_output(results, RankGrid(tp=2, pp=4)) == "rank 6"
