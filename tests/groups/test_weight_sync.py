"""Which trainer rank sends what to which engine rank."""

from __future__ import annotations

from typing import Any

import pytest

from megarl.config import RunConfig
from megarl.groups.sync_connections import make_sync_setup, make_transfer_spec
from megarl.placement.pool import Slot, SlotPool
from megarl.placement.rank_grid import RankGrid
from megarl.reshard.layout.layout import TensorSpec, WeightLayout, WeightNeeds

GRID = RankGrid(tp=4, dp=2)
SPECS = {"norm": TensorSpec((4,), "float32")}
Slots = list[tuple[int, ...]]


def make_needs(slots: Slots, whole: tuple[str, ...] = ()) -> WeightNeeds:
    return WeightNeeds(layouts=tuple(WeightLayout(SPECS, ()) for _ in slots[0]), full_tensors=whole)


def make_config(strategy: str, slots: Slots, placement: Any = None) -> RunConfig:
    return RunConfig.model_validate(
        {
            "run_dir": "unused",
            "model": {"path": "unused"},
            "data": {"path": "unused"},
            "trainer": {"parallel": {"tp": 4}},
            "rollout": {"tp": 2, "replicas": len(slots)},
            "reward": {"terms": {"one": {"type": "format", "pattern": "1"}}},
            "weight_sync": {"strategy": strategy},
            "placement": {"nodes": 2, "slots_per_node": 4} | (placement or {}),
        }
    )


def trainer_pool(nodes_used: int = 2) -> SlotPool:
    return SlotPool(None, tuple(Slot(i, 1.0, 0.0, f"node {i * nodes_used // 8}", None) for i in range(8)), "cpu")


def make_setup(strategy: str, slots: Slots, needs: WeightNeeds | None, *, nodes_used: int = 2) -> Any:
    def find_needs() -> WeightNeeds:
        assert needs is not None, "the strategy does not plan from what engines need"
        return needs

    return make_sync_setup(make_config(strategy, slots), GRID, slots, trainer_pool(nodes_used), find_needs)


STRIDED = [(0, 2), (1, 3), (4, 6)]


@pytest.mark.parametrize("strategy", ["auto", "micro_dp", "exact"])
def test_colocated_engine_rank_receives_boxes_from_the_rank_on_its_slot(strategy: str) -> None:
    needs = make_needs(STRIDED)
    setup = make_setup(strategy, STRIDED, needs)
    assert setup.config.strategy == ("exact" if strategy == "exact" else "micro_dp")
    ranks = {slot: (engine, rank) for engine, slots in enumerate(STRIDED) for rank, slot in enumerate(slots)}
    assert setup.receivers == {slot: f"engine {engine} rank {rank}" for slot, (engine, rank) in ranks.items()}
    assert setup.senders == ()
    assert setup.needs.keys() == setup.receivers.keys()
    assert all(setup.needs[slot] is needs.layouts[rank] for slot, (_, rank) in ranks.items())
    assert setup.nodes == (0, 0, 0, 0, 1, 1, 1, 1)
    assert bool(setup.groups) == (setup.config.strategy == "micro_dp")
    assert setup.full_tensors == ()


@pytest.mark.parametrize("strategy", ["micro_dp", "exact"])
def test_full_tensors_come_from_the_first_rank_of_each_engine(strategy: str) -> None:
    setup = make_setup(strategy, STRIDED, make_needs(STRIDED, ("norm",)))
    assert setup.full_tensors == ("norm",)
    assert setup.senders == (0, 1, 4)
    assert len(setup.receivers) == 6


def test_gather_hf_sends_only_full_tensors() -> None:
    setup = make_setup("gather_hf", [(0, 1), (2, 3)], None)
    assert setup.senders == (0, 2)
    assert (setup.receivers, setup.needs, setup.full_tensors) == ({}, {}, ())


def test_auto_is_exact_if_strided_engines_would_span_nodes() -> None:
    slots = [(0, 1), (2, 3)]
    setup = make_setup("auto", slots, make_needs(slots), nodes_used=4)
    assert setup.config.strategy == "exact"
    assert setup.groups == ()


@pytest.mark.parametrize("strategy", ["auto", "exact"])
def test_disaggregated_engine_ranks_follow_trainer_ranks_in_the_transfer_spec(strategy: str) -> None:
    """Two engines on nodes of their own, which leave one slot free, and one on a node of trainer ranks."""
    nodes = ["node 2"] * 3 + ["node 3"] * 3 + ["node 1"] * 2
    pool = SlotPool(None, tuple(Slot(i, 1.0, 0.0, node, None) for i, node in enumerate(nodes)), "cpu")
    engine_slots: Slots = [(0, 1), (3, 4), (6, 7)]
    placement = {"pools": {"b": {"nodes": 4, "slots_per_node": 2}}, "rollout": {"pool": "b"}}
    needs = make_needs(engine_slots, ("norm",))
    config = make_config(strategy, engine_slots, placement)
    transfer_spec = make_transfer_spec(config, engine_slots, pool, trainer_pool(), needs)
    assert transfer_spec.nodes == (0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 3, 3, 1, 1)
    assert transfer_spec.needs == needs.layouts
    assert (transfer_spec.num_engines, transfer_spec.full_tensors, transfer_spec.sources) == (3, ("norm",), ())
