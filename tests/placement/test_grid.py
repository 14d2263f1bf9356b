from __future__ import annotations

import itertools

import pytest

from megarl.placement.grid import Coordinates, RankGrid

GRIDS = [
    RankGrid(tp=tp, cp=cp, dp=dp, pp=pp) for tp, cp, dp, pp in itertools.product((1, 2, 4), (1, 2), (1, 3), (1, 2, 4))
]


@pytest.mark.parametrize("grid", GRIDS, ids=repr)
def test_ranks_are_numbered_with_the_tensor_axis_innermost_and_the_pipeline_outermost(grid: RankGrid) -> None:
    want = [
        Coordinates(tp=tp, cp=cp, dp=dp, pp=pp)
        for pp in range(grid.pp)
        for dp in range(grid.dp)
        for cp in range(grid.cp)
        for tp in range(grid.tp)
    ]
    assert grid.size == len(want)
    assert [grid.coordinates(rank) for rank in range(grid.size)] == want


@pytest.mark.parametrize("grid", GRIDS, ids=repr)
def test_the_answer_of_a_replica_comes_from_the_first_rank_of_its_last_stage(grid: RankGrid) -> None:
    for dp in range(grid.dp):
        where = grid.coordinates(grid.output_rank(dp))
        assert where == Coordinates(tp=0, cp=0, dp=dp, pp=grid.pp - 1)
