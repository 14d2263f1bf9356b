"""The exchange of layouts between trainer ranks: what every rank knows afterwards, how many bytes that takes."""

import pytest

from megarl.cluster.placement.rank_grid import RankGrid
from megarl.errors import WeightSyncError
from megarl.megatron.families.trainer_layouts import trainer_layouts
from megarl.reshard.analysis.scenario import arrange
from megarl.reshard.planning.plan_cache import cached_plan, clear_plan_cache
from megarl.reshard.transfer.process_groups import exchange_layouts
from tests.errors import expect_error
from tests.megatron.families.tiny import CONFIGS, tiny
from tests.reshard.synthetic import scenario

GRID = RankGrid(tp=2, dp=2, pp=2, ep=2)


def exchange(layouts):
    """Return what `exchange_layouts` returns on each rank."""
    sent = []

    def send(data):
        sent.append(data)
        return [data] * len(layouts)

    def receive(_):
        return sent

    def run(all_gather):
        return [exchange_layouts(layout, rank, all_gather) for rank, layout in enumerate(layouts)]

    run(send)
    return run(receive)


@pytest.mark.parametrize("name", CONFIGS)
def test_every_rank_knows_the_boxes_of_all_ranks_and_its_own_names(name):
    held = trainer_layouts(tiny(name), GRID, "float32")
    for rank, found in enumerate(exchange(held)):
        assert found[rank] == held[rank]
        for mine, theirs in zip(found, held, strict=True):
            assert mine.tensors == theirs.tensors
            assert mine.box_digest == theirs.box_digest
            assert [(p.tensor, p.box, p.local_box) for p in mine.pieces] == [
                (p.tensor, p.box, p.local_box) for p in theirs.pieces
            ]


def test_plans_from_exchanged_layouts_are_those_from_full_layouts():
    case = scenario(2, 2, 2, 4, nodes=2)
    needs = arrange("exact", case).needs
    for rank, found in enumerate(exchange(case.sources)):
        clear_plan_cache()
        expected = cached_plan(case.sources, needs, case.topology, rank, 1 << 16)
        clear_plan_cache()
        assert cached_plan(found, needs, case.topology, rank, 1 << 16) == expected


def test_ranks_that_hold_different_models_are_named_on_every_rank():
    held = trainer_layouts(tiny("qwen3_moe"), RankGrid(dp=3), "float32")
    other = trainer_layouts(tiny("qwen3_moe"), RankGrid(), "bfloat16")[0]
    with expect_error(WeightSyncError, "2", "0", "tensors", "those"):
        exchange([held[0], held[1], other])
