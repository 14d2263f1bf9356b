"""Placement of engines on slots, and which trainer rank sends what to which engine rank, without engines."""

import pytest

from megarl.cli.tools.reshard_explain import make_scenario
from megarl.cluster.placement.pool import Slot, SlotPool
from megarl.cluster.placement.rank_grid import RankGrid
from megarl.data.tiny_checkpoint import write_tiny_model
from megarl.engines.sglang.weight_layout import offline_trace
from megarl.errors import ConfigError, WeightSyncError
from megarl.megatron.families.load_architecture import load_architecture_and_dtype
from megarl.megatron.families.trainer_layouts import trainer_layouts
from megarl.reshard.analysis.scenario import arrange
from megarl.reshard.layout.engine_ranks import find_cross_node_group, resolve_strategy
from megarl.reshard.layout.layout import TensorSpec, WeightLayout, WeightNeeds
from megarl.run.remote.engine_group import gpu_environment, place_dedicated_engines, place_engines, pool_topology
from megarl.run.sync.sync_connections import make_sync_setup, make_transfer_spec
from tests.errors import expect_error
from tests.run.finished_groups import run_config

HEADS = 12


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("servers") / "model"
    write_tiny_model(folder, ["1 + 1 = 2"], seed=0, num_heads=HEADS, num_kv_heads=HEADS, head_dim=8, ffn_size=96)
    return str(folder)


def make_pool(nodes, per_node):
    """Return a pool whose node ids, like Ray's, are not in the order of the nodes."""
    slots = [Slot(i, 1.0, 0.0, f"{7 - i // per_node}f", None) for i in range(nodes * per_node)]
    return SlotPool(None, tuple(slots), "cpu")


def make_config(strategy, *, model="unused", nodes=1, per_node=1, tp=1, gen_tp=1, replicas=1, **placement):
    joined = nodes if per_node % tp else 1  # tensor-parallel groups over several nodes need NVLink between them
    placement |= {"nodes": nodes, "slots_per_node": per_node, "nvlink_domain_nodes": joined}
    sections = {"trainer": {"parallel": {"tp": tp}}, "weight_sync": {"strategy": strategy}, "placement": placement}
    return run_config({"type": "grpo"}, model={"path": model}, rollout={"tp": gen_tp, "replicas": replicas}, **sections)


@pytest.fixture
def traced_sizes(monkeypatch):
    """Replace the engine trace by the trainer's layouts of the same size; return the traced (tp, ep)."""
    sizes = []

    def layouts(path, *, tp, ep, options, device, dtype):
        assert (options, device, dtype) == ({}, "cpu", "float32")
        sizes.append((tp, ep))
        return trainer_layouts(load_architecture_and_dtype(path)[0], RankGrid(tp=tp), dtype)

    monkeypatch.setattr(offline_trace, "trace_layouts", layouts)
    return sizes


CASES = {
    "strided": ({"nodes": 1, "per_node": 4, "tp": 4, "gen_tp": 2, "replicas": 2}, [(0, 2), (1, 3)]),
    "one of two": ({"nodes": 1, "per_node": 4, "tp": 4, "gen_tp": 2, "replicas": 1}, [(0, 2)]),
    "strided on each node": (
        {"nodes": 2, "per_node": 4, "tp": 4, "gen_tp": 2, "replicas": 4},
        [(0, 2), (1, 3), (4, 6), (5, 7)],
    ),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("strategy", ["auto", "micro_dp", "exact"])
def test_engines_are_strided_without_a_trace_if_sizes_divide(case, strategy, model, traced_sizes):
    sizes, expected = CASES[case]
    run = make_config(strategy, model=model, **sizes)
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
def test_other_placements_match_reshard_explain(sizes, strategy, model, traced_sizes):
    run = make_config(strategy, model=model, **sizes)
    slots = make_pool(sizes["nodes"], sizes["per_node"])
    found = place_engines(run, slots, RankGrid(tp=sizes["tp"], dp=run.dp))
    engine = run.rollout.engine.model_copy(update={"extra_args": {"ep_size": sizes["gen_tp"]}})
    with_ep = run.model_copy(update={"rollout": run.rollout.model_copy(update={"engine": engine})})
    place_engines(with_ep, slots, RankGrid(tp=sizes["tp"], dp=run.dp))
    assert traced_sizes == [(sizes["gen_tp"], 1), (sizes["gen_tp"], sizes["gen_tp"])], "a rank needs whole experts"
    assert find_cross_node_group(found, pool_topology(slots)) is None
    decoder, _ = load_architecture_and_dtype(model)
    scenario = make_scenario(
        "tiny",
        decoder,
        "float32",
        train=f"tp={sizes['tp']},dp={run.dp}",
        gen=f"tp={sizes['gen_tp']}",
        nodes=sizes["nodes"],
        bucket_bytes=1 << 20,
        engine=lambda tp, dtype, *, ep=1, dp=1: trainer_layouts(decoder, RankGrid(tp=tp), dtype),
    )
    assert resolve_strategy("auto", scenario.grid, scenario.topology, gen_tp=scenario.gen_tp) == "exact"
    assert found == arrange("exact", scenario).placements


@pytest.mark.parametrize("strategy", ["micro_dp", "gather_hf"])
def test_engine_across_two_nodes_is_rejected(strategy):
    sizes, split, ranks = {"nodes": 2, "per_node": 3, "tp": 3, "gen_tp": 3, "replicas": 1}, (3, 2), r"\[0, 1, 2\]"
    if strategy == "micro_dp":
        sizes, split, ranks = {"nodes": 2, "per_node": 2, "tp": 4, "gen_tp": 2, "replicas": 2}, (2, 2), r"\[0, 2\]"
    run = make_config(strategy, **sizes)
    message = rf"^weight_sync\.strategy: {strategy} puts engine 0 on the slots of trainer ranks {ranks}, which are on 2"
    with pytest.raises(ConfigError, match=f"{message} "):
        place_engines(run, make_pool(*split), RankGrid(tp=sizes["tp"], dp=run.dp))


def test_micro_dp_is_rejected_if_sizes_do_not_divide():
    run = make_config("micro_dp", per_node=4, tp=2, gen_tp=4)
    with expect_error(ConfigError, "2", "4 = 2"):
        place_engines(run, make_pool(1, 4), RankGrid(tp=2, dp=2))


def dedicated(*, nodes, per_node, gen_tp, replicas):
    """Place engines in a pool of their own."""
    pools = {"engines": {"nodes": nodes, "slots_per_node": per_node}}
    config = make_config("auto", gen_tp=gen_tp, replicas=replicas, pools=pools, rollout={"pool": "engines"})
    return place_dedicated_engines(config, make_pool(nodes, per_node))


@pytest.mark.parametrize(
    ("nodes", "per_node", "gen_tp", "first_slots"),
    [(1, 4, 1, [0, 1]), (2, 3, 2, [0, 3]), (2, 4, 2, [0, 2, 4, 6]), (2, 3, 6, [0]), (5, 3, 6, [0, 6]), (3, 3, 9, [0])],
)
def test_dedicated_engines_use_consecutive_slots_of_one_node_or_all_slots_of_several(
    nodes, per_node, gen_tp, first_slots
):
    found = dedicated(nodes=nodes, per_node=per_node, gen_tp=gen_tp, replicas=len(first_slots))
    assert found == [tuple(range(first, first + gen_tp)) for first in first_slots]


def test_more_engines_than_the_pool_holds_are_rejected():
    run = make_config("auto", nodes=2, per_node=3, gen_tp=2, replicas=3)
    with expect_error(ConfigError, "rollout.replicas: ", "rollout.tp = 2", "2 engines", "got 3"):
        place_dedicated_engines(run, make_pool(2, 3))


def test_cuda_visible_devices_lists_gpus_in_rank_order():
    assert gpu_environment([3, 0, 5]) == {"CUDA_VISIBLE_DEVICES": "3,0,5"}
    assert gpu_environment([None, None]) == {}


GRID = RankGrid(tp=4, dp=2)
SPECS = {"norm": TensorSpec((4,), "float32")}


def make_needs(slots, whole=()):
    return WeightNeeds(layouts=tuple(WeightLayout(SPECS, ()) for _ in slots[0]), full_tensors=whole)


def sync_config(strategy, slots, **placement):
    return make_config(strategy, nodes=2, per_node=4, tp=4, gen_tp=2, replicas=len(slots), **placement)


def trainer_pool(nodes_used=2):
    return SlotPool(None, tuple(Slot(i, 1.0, 0.0, f"node {i * nodes_used // 8}", None) for i in range(8)), "cpu")


def make_setup(strategy, slots, needs, *, nodes_used=2, compares=True):
    def find_needs():
        assert needs is not None, "the strategy does not plan from what engines need"
        return needs

    config = sync_config(strategy, slots)
    if not compares:
        weight_sync = config.weight_sync.model_copy(update={"verify": None})
        config = config.model_copy(update={"weight_sync": weight_sync})
    return make_sync_setup(config, GRID, slots, trainer_pool(nodes_used), find_needs)


STRIDED = [(0, 2), (1, 3), (4, 6)]


@pytest.mark.parametrize("strategy", ["auto", "micro_dp", "exact"])
def test_colocated_engine_rank_receives_boxes_from_the_rank_on_its_slot(strategy):
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


@pytest.mark.parametrize("strategy", ["micro_dp", "exact"])
def test_full_tensors_are_received_from_the_rank_on_the_slot(strategy):
    setup = make_setup(strategy, STRIDED, make_needs(STRIDED, ("norm",)))
    assert setup.senders == ()
    assert [[piece.box for piece in need.pieces] for need in setup.needs.values()] == [[((0, 4),)]] * 6
    assert [list(layout.pieces) for layout in setup.engine] == [[], []]


@pytest.mark.parametrize("compares", [False, True])
def test_gather_hf_sends_only_full_tensors(compares):
    """What engines need is asked for to compare it only."""
    slots = [(0, 1), (2, 3)]
    needs = make_needs(slots) if compares else None
    setup = make_setup("gather_hf", slots, needs, compares=compares)
    assert setup.senders == (0, 2)
    assert (setup.receivers, setup.needs) == ({}, {})
    assert setup.engine == (() if needs is None else needs.layouts)


def test_engines_whose_weights_cannot_be_compared_need_the_comparison_off():
    def find_needs():
        raise WeightSyncError("SGLang repacks the weights of 2 modules")

    slots = [(0, 1), (2, 3)]
    with expect_error(WeightSyncError, "weight_sync.verify: null", "repacks"):
        make_sync_setup(sync_config("gather_hf", slots), GRID, slots, trainer_pool(2), find_needs)


def test_auto_is_exact_if_strided_engines_would_span_nodes():
    slots = [(0, 1), (2, 3)]
    setup = make_setup("auto", slots, make_needs(slots), nodes_used=4)
    assert setup.config.strategy == "exact"
    assert setup.groups == ()


@pytest.mark.parametrize("strategy", ["auto", "exact"])
def test_disaggregated_engine_ranks_follow_trainer_ranks_in_the_transfer_spec(strategy):
    """Two engines on nodes of their own, which leave one slot free, and one on a node of trainer ranks."""
    nodes = ["node 2"] * 3 + ["node 3"] * 3 + ["node 1"] * 2
    pool = SlotPool(None, tuple(Slot(i, 1.0, 0.0, node, None) for i, node in enumerate(nodes)), "cpu")
    engine_slots = [(0, 1), (3, 4), (6, 7)]
    placement = {"pools": {"b": {"nodes": 4, "slots_per_node": 2}}, "rollout": {"pool": "b"}}
    needs = make_needs(engine_slots, ("norm",))
    config = sync_config(strategy, engine_slots, **placement)
    transfer_spec = make_transfer_spec(config, engine_slots, pool, trainer_pool(), needs)
    assert transfer_spec.nodes == (0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 3, 3, 1, 1)
    assert transfer_spec.needs == needs.received()
    assert (transfer_spec.num_engines, transfer_spec.sources) == (3, ())
