"""Placement of engines on slots, without starting engines."""

from __future__ import annotations

from typing import Any

import pytest

from megarl.config import RunConfig
from megarl.data.tiny_checkpoint import write_tiny_model
from megarl.errors import ConfigError
from megarl.groups.engine_group import gpu_environment
from megarl.groups.engine_placement import place_dedicated_engines, place_engines, pool_topology
from megarl.megatron.families.load_architecture import load_architecture_and_dtype
from megarl.megatron.families.trainer_layouts import trainer_layouts
from megarl.offline.reshard_explain import make_scenario
from megarl.placement.pool import Slot, SlotPool
from megarl.placement.rank_grid import RankGrid
from megarl.reshard.analysis.scenario import arrange
from megarl.reshard.analysis.sync_report import explain_auto
from megarl.reshard.layout.engine_ranks import find_cross_node_group
from megarl.reshard.layout.layout import WeightLayout
from megarl.rollout.sglang.weight_layout import offline_trace

HEADS = 12


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("servers") / "model"
    write_tiny_model(folder, ["1 + 1 = 2"], seed=0, num_heads=HEADS, num_kv_heads=HEADS, head_dim=8, ffn_size=96)
    return str(folder)


def make_pool(nodes: int, per_node: int) -> SlotPool:
    """Return a pool whose node ids, like Ray's, are not in the order of the nodes."""
    slots = [Slot(i, 1.0, 0.0, f"{7 - i // per_node}f", None) for i in range(nodes * per_node)]
    return SlotPool(None, tuple(slots), "cpu")


def make_config(
    model: str, strategy: str, *, nodes: int, per_node: int, tp: int, gen_tp: int, replicas: int
) -> RunConfig:
    joined = nodes if per_node % tp else 1  # tensor-parallel groups over several nodes need NVLink between them
    return RunConfig.model_validate(
        {
            "run_dir": "unused",
            "model": {"path": model},
            "data": {"path": "unused"},
            "trainer": {"parallel": {"tp": tp}},
            "rollout": {"tp": gen_tp, "replicas": replicas},
            "reward": {"terms": {"one": {"type": "format", "pattern": "1"}}},
            "weight_sync": {"strategy": strategy},
            "placement": {"nodes": nodes, "slots_per_node": per_node, "nvlink_domain_nodes": joined},
        }
    )


@pytest.fixture
def traced_sizes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Replace the engine trace by the trainer's layouts of the same size; return the traced (tp, ep)."""
    sizes: list[tuple[int, int]] = []

    def layouts(path: str, *, tp: int, ep: int, device: str, dtype: str) -> list[WeightLayout]:
        assert (device, dtype) == ("cpu", "float32")
        sizes.append((tp, ep))
        return trainer_layouts(load_architecture_and_dtype(path)[0], RankGrid(tp=tp), dtype)

    monkeypatch.setattr(offline_trace, "trace_layouts", layouts)
    return sizes


CASES: dict[str, tuple[dict[str, Any], list[tuple[int, ...]]]] = {
    "strided": ({"nodes": 1, "per_node": 4, "tp": 4, "gen_tp": 2, "replicas": 2}, [(0, 2), (1, 3)]),
    "one of two": ({"nodes": 1, "per_node": 4, "tp": 4, "gen_tp": 2, "replicas": 1}, [(0, 2)]),
    "strided on each node": (
        {"nodes": 2, "per_node": 4, "tp": 4, "gen_tp": 2, "replicas": 4},
        [(0, 2), (1, 3), (4, 6), (5, 7)],
    ),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("strategy", ["auto", "micro_dp", "exact"])
def test_engines_are_strided_without_a_trace_if_sizes_divide(
    case: str, strategy: str, model: str, traced_sizes: list[tuple[int, int]]
) -> None:
    sizes, expected = CASES[case]
    run = make_config(model, strategy, **sizes)
    found = place_engines(run, make_pool(sizes["nodes"], sizes["per_node"]), RankGrid(tp=sizes["tp"], dp=run.dp))
    assert found == expected
    assert traced_sizes == []


OVERLAP_CASES = [
    {"nodes": 1, "per_node": 6, "tp": 3, "gen_tp": 2, "replicas": 3},
    {"nodes": 1, "per_node": 4, "tp": 2, "gen_tp": 4, "replicas": 1},
    {"nodes": 2, "per_node": 4, "tp": 2, "gen_tp": 4, "replicas": 2},
    {"nodes": 2, "per_node": 2, "tp": 4, "gen_tp": 2, "replicas": 2},
    {"nodes": 4, "per_node": 3, "tp": 4, "gen_tp": 3, "replicas": 4},
]


@pytest.mark.parametrize("sizes", OVERLAP_CASES, ids=str)
@pytest.mark.parametrize("strategy", ["auto", "exact"])
def test_other_placements_match_reshard_explain(
    sizes: dict[str, int], strategy: str, model: str, traced_sizes: list[tuple[int, int]]
) -> None:
    run = make_config(model, strategy, **sizes)
    slots = make_pool(sizes["nodes"], sizes["per_node"])
    found = place_engines(run, slots, RankGrid(tp=sizes["tp"], dp=run.dp))
    engine = run.rollout.engine.model_copy(update={"extra_args": {"ep_size": sizes["gen_tp"]}})
    with_ep = run.model_copy(update={"rollout": run.rollout.model_copy(update={"engine": engine})})
    place_engines(with_ep, slots, RankGrid(tp=sizes["tp"], dp=run.dp))
    assert traced_sizes == [(sizes["gen_tp"], 1), (sizes["gen_tp"], sizes["gen_tp"])], "a rank needs whole experts"
    assert find_cross_node_group([(group,) for group in found], pool_topology(slots)) is None
    decoder, _ = load_architecture_and_dtype(model)
    scenario = make_scenario(
        "tiny",
        decoder,
        "float32",
        train=f"tp={sizes['tp']},dp={run.dp}",
        gen=f"tp={sizes['gen_tp']}",
        nodes=sizes["nodes"],
        bucket_bytes=1 << 20,
        engine=lambda tp, dtype, *, ep=1: trainer_layouts(decoder, RankGrid(tp=tp), dtype),
    )
    assert explain_auto(scenario).report.strategy == "exact"
    places = arrange("exact", scenario).places
    assert {(i, tp): rank for i, group in enumerate(found) for tp, rank in enumerate(group)} == {
        (place.replica, place.tp): rank for rank, place in places.items()
    }


@pytest.mark.parametrize("strategy", ["micro_dp", "gather_hf"])
def test_engine_across_two_nodes_is_rejected(strategy: str, model: str) -> None:
    sizes, split, ranks = {"nodes": 2, "per_node": 3, "tp": 3, "gen_tp": 3, "replicas": 1}, (3, 2), r"\[0, 1, 2\]"
    if strategy == "micro_dp":
        sizes, split, ranks = {"nodes": 2, "per_node": 2, "tp": 4, "gen_tp": 2, "replicas": 2}, (2, 2), r"\[0, 2\]"
    run = make_config(model, strategy, **sizes)
    message = (
        rf"^weight_sync\.strategy: {strategy} puts engine 0 on the slots of trainer ranks {ranks}, which are on 2 "
    )
    with pytest.raises(ConfigError, match=message):
        place_engines(run, make_pool(*split), RankGrid(tp=sizes["tp"], dp=run.dp))


def test_micro_dp_is_rejected_if_sizes_do_not_divide(model: str) -> None:
    run = make_config(model, "micro_dp", nodes=1, per_node=4, tp=2, gen_tp=4, replicas=1)
    with pytest.raises(ConfigError, match=r"tp 2 % 4 = 2"):
        place_engines(run, make_pool(1, 4), RankGrid(tp=2, dp=2))


def dedicated(model: str, *, nodes: int, per_node: int, gen_tp: int, replicas: int) -> list[tuple[int, ...]]:
    """Place engines in a pool of their own."""
    tree = make_config(model, "auto", nodes=1, per_node=1, tp=1, gen_tp=1, replicas=1).model_dump()
    pools = {"engines": {"nodes": nodes, "slots_per_node": per_node}}
    tree["placement"] = {"pools": pools, "rollout": {"pool": "engines"}}
    tree["rollout"] |= {"tp": gen_tp, "replicas": replicas}
    return place_dedicated_engines(RunConfig.model_validate(tree), make_pool(nodes, per_node))


@pytest.mark.parametrize(
    ("nodes", "per_node", "gen_tp", "first_slots"),
    [(1, 4, 1, [0, 1]), (2, 3, 2, [0, 3]), (2, 4, 2, [0, 2, 4, 6]), (2, 3, 6, [0]), (5, 3, 6, [0, 6]), (3, 3, 9, [0])],
)
def test_dedicated_engines_use_consecutive_slots_of_one_node_or_all_slots_of_several(
    nodes: int, per_node: int, gen_tp: int, first_slots: list[int], model: str
) -> None:
    sizes: dict[str, int] = {"nodes": nodes, "per_node": per_node, "gen_tp": gen_tp}
    found = dedicated(model, **sizes, replicas=len(first_slots))
    assert found == [tuple(range(first, first + gen_tp)) for first in first_slots]


def test_more_engines_than_the_pool_holds_are_rejected(model: str) -> None:
    run = make_config(model, "auto", nodes=2, per_node=3, tp=1, gen_tp=2, replicas=3)
    message = r"^rollout\.replicas: each engine needs rollout\.tp = 2 slots of one node, .* has for 2 engines, got 3$"
    with pytest.raises(ConfigError, match=message):
        place_dedicated_engines(run, make_pool(2, 3))


def test_cuda_visible_devices_lists_gpus_in_rank_order() -> None:
    assert gpu_environment([3, 0, 5]) == {"CUDA_VISIBLE_DEVICES": "3,0,5"}
    assert gpu_environment([None, None]) == {}
