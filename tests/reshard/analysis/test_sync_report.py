"""Reports, forecasts and computed traffic against closed forms, lower bounds, HybridFlow's tables, and plans."""

from dataclasses import fields, replace
from itertools import product

import pytest
from hypothesis import given, settings

from megarl.cli.tools.reshard_explain import explain_scenarios
from megarl.errors import ConfigError
from megarl.reshard.analysis import forecast as forecast_module
from megarl.reshard.analysis import sync_report
from megarl.reshard.analysis.forecast import compute_traffic, forecast, redundant_bytes
from megarl.reshard.analysis.nccl_progress import Stall
from megarl.reshard.analysis.scenario import STRATEGIES, arrange, even_nodes
from megarl.reshard.analysis.sync_clock import SyncTiming
from megarl.reshard.analysis.sync_report import explain
from megarl.reshard.layout.engine_ranks import can_place_strided, micro_dp_groups, resolve_strategy
from megarl.reshard.layout.layout import ShardPiece, TensorSpec, WeightLayout
from megarl.reshard.layout.topology import LinkRates, Topology
from megarl.reshard.planning.plan_cache import cached_plan, clear_plan_cache
from tests.errors import expect_error
from tests.reshard import simulate
from tests.reshard.planning.test_plan import worlds
from tests.reshard.synthetic import MODEL_BYTES, scenario

PLANNED_FIELDS = """strategy world train gen model bytes_total bytes_in_max bytes_in_mean bytes_in_bound_max
bytes_cross_node peak_extra_bytes redundant_bytes_after messages collectives plan_seconds_cold plan_seconds_cached"""
"""Fields that a report has without a run."""


def test_exact_moves_nothing_if_generation_shards_lie_in_training_shards():
    case = scenario(1, 2, 2, 4)
    report = explain("exact", case).report
    assert (report.bytes_total, report.bytes_in_bound_max, report.messages) == (0, 0, 0)
    with pytest.raises(ConfigError):
        explain("micro_dp", case)


def test_bytes_between_nodes():
    """Two stages on nodes of their own: half of the model enters each node, with micro_dp once for each engine."""
    across = scenario(2, 4, 1, 2, nodes=2)
    exact, micro = explain("exact", across), explain("micro_dp", across)
    assert exact.bytes_into_node_max == exact.bytes_into_node_bound_max == MODEL_BYTES / 2
    assert micro.bytes_into_node_max == 2 * MODEL_BYTES / 2
    wide = scenario(1, 8, 2, 4, nodes=2)
    exact, micro = explain("exact", wide).report, explain("micro_dp", wide).report
    assert (exact.bytes_total, exact.bytes_in_max, exact.bytes_cross_node) == (micro.bytes_total, MODEL_BYTES / 8, 0)
    assert exact.redundant_bytes_after == 0


def test_gather_hf_sends_the_full_model_to_every_rank():
    report = explain("gather_hf", scenario(1, 4, 1, 2)).report
    assert (report.bytes_total, report.bytes_in_max) == (4 * 0.75 * MODEL_BYTES, 0.75 * MODEL_BYTES)
    assert (report.messages, report.collectives) == (0, 4 * 48)


def test_small_buckets_need_more_messages_and_less_memory():
    few, many = (explain("micro_dp", scenario(1, 4, 2, 2, bucket_bytes=b)).report for b in (1 << 20, 1 << 14))
    assert few.bytes_total == many.bytes_total
    assert few.collectives < many.collectives
    assert many.peak_extra_bytes <= 2 << 14 < few.peak_extra_bytes


STRIDED = [(1, 4, 2, 2), (1, 8, 1, 8), (2, 2, 2, 2), (4, 2, 1, 1), (2, 4, 2, 2)]
OTHERS = [(1, 2, 2, 4), (1, 1, 4, 2), (1, 3, 2, 2), (3, 2, 1, 3), (2, 3, 1, 6)]


def fits(layout, nodes):
    """Return whether engines fit on nodes."""
    p, t, d, tg = layout
    return p * t * d % nodes == 0 and p * t * d // nodes // tg * nodes >= p * t * d // tg


CASES = [(layout, nodes) for layout in STRIDED + OTHERS for nodes in (1, 2, 4) if fits(layout, nodes)]


@pytest.mark.parametrize(("layout", "nodes"), CASES, ids=str)
def test_no_other_strategy_of_a_run_has_a_lower_maximum_than_auto(layout, nodes):
    _, _, _, tg = layout
    case = scenario(*layout, nodes=nodes)
    found = explain(resolve_strategy("auto", case.grid, case.topology, gen_tp=tg), case).report
    strided = can_place_strided(case.grid, case.topology, gen_tp=tg)
    groups = micro_dp_groups(case.grid, gen_tp=tg) if strided else []
    on_one_node = all(len({case.topology.nodes[rank] for rank in group}) == 1 for group in groups)
    assert found.strategy == ("micro_dp" if strided and on_one_node else "exact")
    for name in ("gather_hf", "exact", *(("micro_dp",) if strided else ())):
        assert found.bytes_in_max <= explain(name, case).report.bytes_in_max


def test_auto_reuses_known_explanations():
    case = scenario(1, 4, 2, 2)
    explained, _ = explain_scenarios(case, ["gather_hf", "micro_dp", "auto"], lambda _: None, LinkRates())
    assert explained["auto"] is explained["micro_dp"]


def test_json_has_the_fields_of_a_report():
    found = explain("exact", scenario(1, 4, 2, 2)).as_json()
    assert list(found)[: len(PLANNED_FIELDS.split())] == PLANNED_FIELDS.split()
    assert found["fraction_in_max"] == 0.25
    assert found["model_bytes"] == MODEL_BYTES


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_progress_under_nccl_is_proved_for_every_strategy(strategy, monkeypatch):
    case = scenario(2, 2, 2, 2, nodes=2)
    assert explain(strategy, case).as_json()["nccl_progress"] is True
    if strategy != "gather_hf":
        monkeypatch.setattr(forecast_module, "find_stalls", lambda _: [Stall(3, 0, "hop 1 of round 2", (1,))])
        stalled = explain(strategy, case)
        assert stalled.stalls == ("rank 3 waits in hop 1 of round 2 for rank 1",)
        assert stalled.as_json()["nccl_progress"] is False


@pytest.mark.parametrize(("found", "progress"), [([], True), (["ranks 0 and 1 disagree"], False), (None, None)])
def test_progress_of_too_many_ranks_to_plan_follows_from_some(found, progress, monkeypatch):
    case = scenario(1, 4, 2, 2)
    monkeypatch.setattr(sync_report, "MAX_PLANNED_PIECES", 0)
    assert explain("micro_dp", case).as_json()["nccl_progress"] is True
    monkeypatch.setattr(forecast_module, "compare_ends", lambda *_: found)
    if found is None:
        monkeypatch.setattr(forecast_module, "MAX_REPRESENTATIVES", 1)
    assert explain("micro_dp", case).as_json()["nccl_progress"] is progress


def test_error_for_non_dividing_nodes_shows_the_arithmetic():
    with expect_error(ConfigError, "8", "3 = 2", "--nodes", "divide"):
        even_nodes(8, 3)


def test_plans_are_cached():
    clear_plan_cache()
    case, same = scenario(1, 4, 2, 2), scenario(1, 4, 2, 2)
    plans = [cached_plan(c.sources, arrange("exact", c).needs, c.topology, 0, 1 << 20) for c in (case, same)]
    assert plans[0] is plans[1]
    other = scenario(1, 2, 4, 2)
    assert cached_plan(other.sources, arrange("exact", other).needs, other.topology, 0, 1 << 20) is not plans[0]


LAYOUTS = [(1, 4, 2, 2), (2, 4, 2, 4), (2, 4, 2, 2), (1, 3, 4, 2), (1, 2, 4, 4)]
TRAFFIC_CASES = [
    (strategy, layout, nodes)
    for strategy, layout, nodes in product(sorted({*STRATEGIES} - {"gather_hf"}), LAYOUTS, [1, 2])
    if strategy != "micro_dp" or layout[1] % layout[3] == 0
]


@pytest.mark.parametrize(("strategy", "layout", "nodes"), TRAFFIC_CASES, ids=str)
def test_traffic_equals_sum_of_all_plans(strategy, layout, nodes):
    case = scenario(*layout, nodes=nodes)
    arrangement = arrange(strategy, case)
    plan = forecast(arrangement, case)
    found = compute_traffic(case.sources, arrangement.needs, arrangement.groups, case.topology)
    assert found.into_ranks == tuple(stats.bytes_received for stats in plan.stats)
    group_spans_nodes = any(len({case.topology.nodes[rank] for rank in group}) > 1 for group in arrangement.groups)
    assert found.into_nodes == (None if group_spans_nodes else plan.traffic(case.topology).into_nodes)


@given(worlds())
@settings(max_examples=100)
def test_traffic_equals_simulated_messages(case):
    sources, needs, topology = case
    _, held, targets = simulate.make_tensors(sources, needs)
    messages = simulate.run(simulate.plans(sources, needs, topology, 256), held, targets)
    found = compute_traffic(sources, needs, (), topology)
    assert list(found.into_ranks) == [sum(n for _, to, n in messages if to == rank) for rank in range(len(sources))]
    if found.into_nodes is None:
        assert any(len(need.pieces) > len({(p.tensor, p.box) for p in need.pieces}) for need in needs.values())
    else:
        assert found.into_nodes == simulate.bytes_into_nodes(messages, topology)


def test_traffic_into_a_node_is_unknown_if_its_ranks_need_a_box_unequally_often():
    """Rank 2 fetches and relays to rank 1, or rank 1 fetches twice: only the plan knows which."""
    spec, box = {"t": TensorSpec((2,), "float32")}, ((0, 2),)
    pieces = [ShardPiece("t", box, f"t/{i}", box) for i in range(2)]
    sources = [WeightLayout(spec, tuple(pieces[:held])) for held in (1, 0, 0)]
    once, twice = (WeightLayout(spec, tuple(pieces[:count])) for count in (1, 2))
    for needs, into in [({1: twice, 2: once}, None), ({1: twice, 2: twice}, 16), ({1: twice}, 16), ({2: once}, 8)]:
        found = compute_traffic(sources, needs, (), Topology((0, 1, 1)))
        assert found.into_ranks == tuple(8 * len(needs[rank].pieces) if rank in needs else 0 for rank in range(3))
        assert found.into_nodes == (None if into is None else {0: 0, 1: into})


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_too_many_pieces_omit_numbers_that_need_every_plan(strategy, monkeypatch):
    case = scenario(1, 4, 2, 2, nodes=2)
    planned = explain(strategy, case)
    monkeypatch.setattr(sync_report, "MAX_PLANNED_PIECES", 0)
    summed = explain(strategy, case)
    left_out = () if strategy == "gather_hf" else ("peak_extra_bytes", "messages", "collectives")
    timed = [field.name for field in fields(SyncTiming)] if left_out else ["nic_share"]  # nothing leaves its node
    assert {name for name, value in summed.as_json().items() if value is None} == {*left_out, *timed}
    seconds = {name: getattr(summed.report, name) for name in ("plan_seconds_cold", "plan_seconds_cached")}
    rest = replace(planned.report, **dict.fromkeys(left_out), **seconds)
    assert summed == replace(planned, report=rest, timing=None if left_out else planned.timing)


def test_stats_of_the_busiest_rank():
    explained = explain("exact", scenario(1, 3, 2, 2))
    assert explained.busiest_rank_stats.bytes_received == explained.report.bytes_in_max
    assert 0 < explained.busiest_rank_stats.messages < explained.report.messages


def test_progress_is_reported():
    progress = []
    explain("exact", scenario(1, 2, 1, 1), progress.append)
    steps = ("placing engine ranks", "planning 2 ranks", "planning rank 0", "bounds")
    assert progress == [f"exact: {step}" for step in steps]


def test_engine_wider_than_a_node_is_explained():
    wide = explain("exact", scenario(2, 2, 2, 4, nodes=4))
    assert wide.machines_per_tensor_group == 2
    assert wide.report.bytes_in_max == wide.report.bytes_in_bound_max
    assert wide.report.bytes_cross_node > 0
    assert explain("exact", scenario(2, 2, 2, 4, nodes=2)).machines_per_tensor_group == 1


TABLE = {(1, 4, 2, 2): 1 / 4, (1, 8, 2, 4): 1 / 8, (2, 8, 2, 4): 3 / 16, (8, 8, 2, 8): 7 / 64}
"""p-t-d -> 1-t_g: fraction of the model that every rank receives."""


@pytest.mark.parametrize(("layout", "received"), TABLE.items())
def test_received_and_redundant_bytes_of_micro_dp_are_those_of_the_paper(layout, received):
    """The row of HybridFlow's engine in table 2; `benchmarks.reshard.full_gather` has the rows of the baselines."""
    case = scenario(*layout)
    arrangement = arrange("micro_dp", case)
    assert {of_rank.bytes_received for of_rank in forecast(arrangement, case).stats} == {received * MODEL_BYTES}
    assert redundant_bytes(arrangement, case.sources) == 0
