from __future__ import annotations

import itertools

import pytest

from megarl.errors import ConfigError
from megarl.placement.rank_grid import Coordinates, RankGrid

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


WITH_EXPERTS = [
    RankGrid(tp=2, dp=4, ep=4, etp=1),
    RankGrid(tp=2, dp=4, ep=2),
    RankGrid(tp=4, dp=2, pp=2, ep=2, etp=2),
    RankGrid(tp=1, cp=2, dp=4, pp=3, ep=2, etp=2),
    RankGrid(tp=2, cp=2, dp=2, pp=2, ep=8, etp=1),
    RankGrid(tp=8, dp=16, pp=16, ep=64, etp=1),
]


@pytest.mark.parametrize("grid", WITH_EXPERTS, ids=repr)
def test_ranks_stand_where_megatron_core_puts_them(grid: RankGrid) -> None:
    from megatron.core.parallel_state import RankGenerator

    order, of_experts = "tp-cp-ep-dp-pp", {"tp": "etp", "ep": "ep", "dp": "dp", "pp": "pp"}
    dense = RankGenerator(tp=grid.tp, ep=1, dp=grid.dp, pp=grid.pp, cp=grid.cp, order=order)
    experts = RankGenerator(tp=grid.expert_tp, ep=grid.ep, dp=grid.expert_dp, pp=grid.pp, cp=1, order=order)
    assert dense.world_size == experts.world_size == grid.size
    for axis in ("tp", "cp", "dp", "pp"):
        for group in dense.get_ranks(axis):
            assert [getattr(grid.coordinates(rank), axis) for rank in group] == list(range(len(group)))
    for theirs, ours in of_experts.items():
        for group in experts.get_ranks(theirs):
            at = [grid.expert_coordinates(rank) for rank in group]
            assert [getattr(c, ours) for c in at] == list(range(len(group)))
            rest = {tuple(getattr(c, axis) for axis in of_experts.values() if axis != ours) for c in at}
            assert len(rest) == 1


def test_experts_are_split_as_everything_else_where_nothing_is_said() -> None:
    assert RankGrid(tp=4, dp=2, ep=2).expert_tp == 4
    assert RankGrid(tp=4, dp=2, ep=2, etp=1).expert_tp == 1


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"tp": 0}, "tp needs to be at least 1, got 0"),
        ({"tp": 2, "ep": -1}, "ep needs to be at least 1, got -1"),
        (
            {"tp": 8, "dp": 16, "pp": 16, "ep": 64},
            r"etp 8 \* ep 64 = 512 needs to divide the ranks of a pipeline stage, got tp 8 \* cp 1 \* dp 16 = 128; "
            "etp is tp where it is not given",
        ),
        ({"dp": 4, "ep": 3, "etp": 1}, r"etp 1 \* ep 3 = 3 needs to divide .* = 4$"),
    ],
)
def test_sizes_that_make_no_grid(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RankGrid(**sizes)
