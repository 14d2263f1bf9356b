"""Which trainer rank sends what to which engine rank, with fake engines."""

from __future__ import annotations

from typing import Any

import pytest

from megarl.config import RunConfig
from megarl.groups.weight_sync import make_sync_setup
from megarl.placement.pool import Slot, SlotPool
from megarl.placement.rank_grid import RankGrid
from megarl.reshard.layout.layout import TensorSpec, WeightLayout

GRID = RankGrid(tp=4, dp=2)
SPECS = {"norm": TensorSpec((4,), "float32")}


class FakeEngines:
    """Fake EngineGroup whose sinks are strings that name their destination."""

    def __init__(
        self, engine_slots: list[tuple[int, ...]], whole: tuple[str, ...], pool: SlotPool | None = None
    ) -> None:
        self.engine_slots, self._whole, self.pool = engine_slots, whole, pool
        self._layouts = [WeightLayout(SPECS, ()) for _ in engine_slots[0]]

    def layouts(self) -> list[WeightLayout]:
        return self._layouts

    def full_tensors(self) -> tuple[str, ...]:
        return self._whole

    def sinks(self) -> tuple[Any, ...]:
        return tuple(f"engine {i}" for i in range(len(self.engine_slots)))

    def rank_sink(self, replica: int, tp_rank: int) -> Any:
        return f"engine {replica} rank {tp_rank}"


def make_setup(strategy: str, engines: FakeEngines, *, nodes_used: int = 2, placement: Any = None) -> Any:
    config = RunConfig.model_validate(
        {
            "run_dir": "unused",
            "model": {"path": "unused"},
            "data": {"path": "unused"},
            "trainer": {"parallel": {"tp": 4}},
            "rollout": {"tp": 2, "replicas": len(engines.engine_slots)},
            "reward": {"terms": {"one": {"type": "format", "pattern": "1"}}},
            "weight_sync": {"strategy": strategy},
            "placement": {"nodes": 2, "slots_per_node": 4} | (placement or {}),
        }
    )
    slots = tuple(Slot(i, 1.0, 0.0, f"node {i * nodes_used // 8}", None) for i in range(8))
    return make_sync_setup(config, GRID, engines, SlotPool(None, slots, "cpu"))  # type: ignore[arg-type]


STRIDED = [(0, 2), (1, 3), (4, 6)]


@pytest.mark.parametrize("strategy", ["auto", "micro_dp", "exact"])
def test_colocated_engine_rank_receives_boxes_from_the_rank_on_its_slot(strategy: str) -> None:
    engines = FakeEngines(STRIDED, ())
    setup = make_setup(strategy, engines)
    assert setup.config.strategy == ("exact" if strategy == "exact" else "micro_dp")
    assert {rank: sinks.boxes for rank, sinks in setup.sinks.items()} == {
        0: "engine 0 rank 0",
        2: "engine 0 rank 1",
        1: "engine 1 rank 0",
        3: "engine 1 rank 1",
        4: "engine 2 rank 0",
        6: "engine 2 rank 1",
    }
    assert not any(sinks.full_tensors for sinks in setup.sinks.values())
    assert setup.needs.keys() == setup.sinks.keys()
    assert all(setup.needs[rank] is engines.layouts()[ranks.index(rank)] for ranks in STRIDED for rank in ranks)
    assert setup.nodes == (0, 0, 0, 0, 1, 1, 1, 1)
    assert bool(setup.groups) == (setup.config.strategy == "micro_dp")
    assert setup.full_tensors == ()


@pytest.mark.parametrize("strategy", ["micro_dp", "exact"])
def test_full_tensors_come_from_the_first_rank_of_each_engine(strategy: str) -> None:
    setup = make_setup(strategy, FakeEngines(STRIDED, ("norm",)))
    assert setup.full_tensors == ("norm",)
    assert {rank: sinks.full_tensors for rank, sinks in setup.sinks.items() if sinks.full_tensors} == {
        0: ("engine 0",),
        1: ("engine 1",),
        4: ("engine 2",),
    }
    assert all(sinks.boxes for sinks in setup.sinks.values())


def test_gather_hf_sends_only_full_tensors() -> None:
    setup = make_setup("gather_hf", FakeEngines([(0, 1), (2, 3)], ("norm",)))
    assert {rank: (sinks.full_tensors, sinks.boxes) for rank, sinks in setup.sinks.items()} == {
        0: (("engine 0",), None),
        2: (("engine 1",), None),
    }
    assert (setup.needs, setup.full_tensors) == ({}, ())


def test_auto_is_exact_if_strided_engines_would_span_nodes() -> None:
    setup = make_setup("auto", FakeEngines([(0, 1), (2, 3)], ()), nodes_used=4)
    assert setup.config.strategy == "exact"
    assert setup.groups == ()


@pytest.mark.parametrize("strategy", ["auto", "exact"])
def test_disaggregated_engine_ranks_follow_trainer_ranks_in_the_transfer_spec(strategy: str) -> None:
    """Two engines on nodes of their own, which leave one slot free, and one on a node of trainer ranks."""
    nodes = ["node 2"] * 3 + ["node 3"] * 3 + ["node 1"] * 2
    pool = SlotPool(None, tuple(Slot(i, 1.0, 0.0, node, None) for i, node in enumerate(nodes)), "cpu")
    engines = FakeEngines([(0, 1), (3, 4), (6, 7)], ("norm",), pool)
    placement = {"pools": {"b": {"nodes": 4, "slots_per_node": 2}}, "rollout": {"pool": "b"}}
    setup = make_setup(strategy, engines, placement=placement)
    transfer_spec = setup.transfer_spec
    assert (setup.sinks, setup.needs, setup.groups, setup.full_tensors) == ({}, {}, (), ())
    assert transfer_spec.nodes == (0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 3, 3, 1, 1)
    assert list(transfer_spec.needs) == engines.layouts()
    assert (transfer_spec.num_engines, transfer_spec.full_tensors, transfer_spec.sources) == (3, ("norm",), ())
