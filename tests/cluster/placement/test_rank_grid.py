"""The grid of ranks."""

import itertools

import pytest

from megarl.cluster.placement.rank_grid import Coordinates, RankGrid
from megarl.errors import ConfigError

GRIDS = [
    RankGrid(tp=tp, cp=cp, dp=dp, pp=pp) for tp, cp, dp, pp in itertools.product((1, 2, 4), (1, 2), (1, 3), (1, 2, 4))
]


@pytest.mark.parametrize("grid", GRIDS, ids=repr)
def test_tensor_axis_is_innermost_and_pipeline_axis_outermost(grid):
    expected = [
        Coordinates(tp=tp, cp=cp, dp=dp, pp=pp)
        for pp in range(grid.pp)
        for dp in range(grid.dp)
        for cp in range(grid.cp)
        for tp in range(grid.tp)
    ]
    assert grid.size == len(expected)
    assert [grid.coordinates(rank) for rank in range(grid.size)] == expected


@pytest.mark.parametrize("grid", GRIDS, ids=repr)
def test_output_rank_is_the_first_rank_of_the_last_stage(grid):
    for dp in range(grid.dp):
        coordinates = grid.coordinates(grid.output_rank(dp))
        assert coordinates == Coordinates(tp=0, cp=0, dp=dp, pp=grid.pp - 1)


WITH_EXPERTS = [
    RankGrid(tp=2, dp=4, ep=4, etp=1),
    RankGrid(tp=2, dp=4, ep=2),
    RankGrid(tp=4, dp=2, pp=2, ep=2, etp=2),
    RankGrid(tp=1, cp=2, dp=4, pp=3, ep=2, etp=2),
    RankGrid(tp=2, cp=2, dp=2, pp=2, ep=8, etp=1),
    RankGrid(tp=8, dp=16, pp=16, ep=64, etp=1),
]


@pytest.mark.parametrize("grid", WITH_EXPERTS, ids=repr)
def test_coordinates_agree_with_megatron_core(grid):
    from megatron.core.parallel_state import RankGenerator

    order, of_experts = "tp-cp-ep-dp-pp", {"tp": "etp", "ep": "ep", "dp": "dp", "pp": "pp"}
    dense = RankGenerator(tp=grid.tp, ep=1, dp=grid.dp, pp=grid.pp, cp=grid.cp, order=order)
    experts = RankGenerator(tp=grid.expert_tp, ep=grid.ep, dp=grid.expert_dp, pp=grid.pp, cp=1, order=order)
    assert dense.world_size == experts.world_size == grid.size
    for axis in ("tp", "cp", "dp", "pp"):
        for group in dense.get_ranks(axis):
            assert [getattr(grid.coordinates(rank), axis) for rank in group] == list(range(len(group)))
    for megatron_axis, axis_name in of_experts.items():
        for group in experts.get_ranks(megatron_axis):
            coordinates_of_group = [grid.expert_coordinates(rank) for rank in group]
            assert [getattr(c, axis_name) for c in coordinates_of_group] == list(range(len(group)))
            rest = {
                tuple(getattr(c, axis) for axis in of_experts.values() if axis != axis_name)
                for c in coordinates_of_group
            }
            assert len(rest) == 1


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"tp": 0}, "tp needs to be at least 1, got 0"),
        ({"tp": 2, "ep": -1}, "ep needs to be at least 1, got -1"),
        (
            {"tp": 8, "dp": 16, "pp": 16, "ep": 64},
            r"etp 8 \* ep 64 = 512 needs to divide the ranks of a pipeline stage, got tp 8 \* cp 1 \* dp 16 = 128; "
            "etp defaults to tp",
        ),
        ({"dp": 4, "ep": 3, "etp": 1}, r"etp 1 \* ep 3 = 3 needs to divide .* = 4$"),
    ],
)
def test_invalid_sizes_are_rejected(sizes, message):
    with pytest.raises(ConfigError, match=message):
        RankGrid(**sizes)
