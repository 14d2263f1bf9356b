"""Distribution of arguments and collection of results."""

from __future__ import annotations

from megarl.placement.rank_grid import RankGrid
from megarl.workers.dispatch import BROADCAST, from_output_rank, from_rank0, to_all


def test_broadcast_sends_the_argument_to_all_and_returns_rank_0() -> None:
    grid = RankGrid(tp=2, dp=2)
    argument = object()
    assert BROADCAST.distribute(argument, grid) == to_all(argument, grid) == [argument] * 4
    assert BROADCAST.collect(["a", "b", "c", "d"], grid) == from_rank0(["a", "b", "c", "d"], grid) == "a"


def test_output_comes_from_the_last_stage() -> None:
    results = [f"rank {rank}" for rank in range(8)]
    assert from_output_rank(results, RankGrid(tp=2, dp=2, pp=2)) == "rank 4"
    assert from_output_rank(results, RankGrid(tp=2, pp=4)) == "rank 6"
