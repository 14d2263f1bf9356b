"""Traffic computed from layouts against plans, and explanations without plans of all ranks."""

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.reshard.analysis import forecast as forecast_module
from megarl.reshard.analysis.forecast import forecast
from megarl.reshard.analysis.scenario import arrange
from megarl.reshard.analysis.sync_report import explain
from megarl.reshard.analysis.traffic import TrafficSpec, compute_traffic, make_traffic_spec
from tests.reshard import simulate
from tests.reshard.planning.test_plan import worlds
from tests.reshard.scenarios import scenario

LAYOUTS = [(1, 4, 2, 1, 2), (2, 4, 2, 1, 4), (2, 4, 2, 2, 2), (1, 3, 4, 1, 2), (1, 2, 4, 1, 4)]
STRATEGIES = ("ds_chat", "hybridflow_v", "micro_dp", "exact")
BY_PLANS = ("peak_extra_bytes", "messages", "collectives")


CASES = [
    (strategy, layout, nodes)
    for strategy, layout, nodes in product(STRATEGIES, LAYOUTS, [1, 2])
    if strategy != "micro_dp" or layout[1] % layout[4] == layout[0] % layout[3] == 0
]


@pytest.mark.parametrize(("strategy", "layout", "nodes"), CASES, ids=str)
def test_traffic_equals_sum_of_all_plans(strategy, layout, nodes):
    case = scenario(*layout, nodes=nodes)
    arrangement = arrange(strategy, case)
    plan = forecast(arrangement, case)
    found = compute_traffic(make_traffic_spec(arrangement, case), arrangement.groups, case.topology)
    assert found.into_ranks == tuple(stats.bytes_received for stats in plan.stats)
    group_spans_nodes = any(len({case.topology.nodes[rank] for rank in group}) > 1 for group in arrangement.groups)
    assert found.into_nodes == (None if group_spans_nodes else plan.bytes_into_nodes(case.topology))


@given(worlds(), st.booleans())
@settings(max_examples=100)
def test_traffic_equals_simulated_messages(case, relay):
    sources, needs, topology = case
    _, held, targets = simulate.make_tensors(sources, needs)
    messages = simulate.run(simulate.plans(sources, needs, topology, 256, relay=relay), held, targets)
    found = compute_traffic(TrafficSpec(sources=sources, needs=needs, relay=relay), (), topology)
    assert list(found.into_ranks) == [sum(n for _, to, n in messages if to == rank) for rank in range(len(sources))]
    entering = dict.fromkeys(topology.nodes, 0)
    for source, to, num_bytes in messages:
        entering[topology.nodes[to]] += 0 if topology.same_node(source, to) else num_bytes
    assert found.into_nodes == entering


@pytest.mark.parametrize("strategy", [*STRATEGIES, "gather_hf"])
def test_too_many_pieces_omit_numbers_that_need_every_plan(strategy, monkeypatch):
    case = scenario(1, 4, 2, 1, 2, nodes=2)
    planned = explain(strategy, case)
    monkeypatch.setattr(forecast_module, "MAX_PLANNED_PIECES", 0)
    summed = explain(strategy, case)
    left_out = () if strategy == "gather_hf" else BY_PLANS
    assert all((value is None) == (name in left_out) for name, value in summed.as_json().items())
    seconds = {name: getattr(summed.report, name) for name in ("plan_seconds_cold", "plan_seconds_cached")}
    rest = replace(planned.report, **dict.fromkeys(left_out), **seconds)
    assert summed == replace(planned, report=rest)


def test_stats_of_the_busiest_rank():
    explained = explain("exact", scenario(1, 3, 2, 1, 2))
    assert explained.busiest_rank_stats.bytes_received == explained.report.bytes_in_max
    assert 0 < explained.busiest_rank_stats.messages < explained.report.messages


def test_progress_is_reported():
    progress = []
    explain("exact", scenario(1, 2, 1, 1, 1), progress.append)
    assert progress == [
        "exact: placing engine ranks",
        "exact: planning 2 ranks",
        "exact: planning rank 0",
        "exact: bounds",
    ]


def test_engine_wider_than_a_node_is_explained():
    wide = explain("exact", scenario(2, 2, 2, 1, 4, nodes=4))
    assert wide.machines_per_tensor_group == 2
    assert wide.report.bytes_in_max == wide.report.bytes_in_bound_max
    assert wide.report.bytes_cross_node > 0
    assert explain("exact", scenario(2, 2, 2, 1, 4, nodes=2)).machines_per_tensor_group == 1
