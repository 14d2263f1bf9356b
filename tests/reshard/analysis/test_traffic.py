"""Sums from layouts alone against plans, and what is told where plans are too many."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.reshard.analysis import forecast as forecast_module
from megarl.reshard.analysis.forecast import forecast
from megarl.reshard.analysis.scenario import arrange
from megarl.reshard.analysis.sync_report import explain
from megarl.reshard.analysis.traffic import Wanted, find_traffic, wanted
from tests.reshard import simulate
from tests.reshard.planning.test_plan import fill, worlds
from tests.reshard.scenarios import scenario

LAYOUTS = [(1, 4, 2, 1, 2), (2, 4, 2, 1, 4), (2, 4, 2, 2, 2), (1, 3, 4, 1, 2), (1, 2, 4, 1, 4)]
STRATEGIES = ("ds_chat", "hybridflow_v", "micro_dp", "exact")
BY_PLANS = ("peak_extra_bytes", "messages", "collectives")


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_sums_are_those_of_all_plans(strategy, layout, nodes):
    if strategy == "micro_dp" and (layout[1] % layout[4] or layout[0] % layout[3]):
        pytest.skip("sizes do not divide")
    case = scenario(*layout, nodes=nodes)
    arrangement = arrange(strategy, case)
    plan = forecast(arrangement, case)
    found = find_traffic(wanted(arrangement, case), arrangement.groups, case.topology)
    assert found.into_ranks == tuple(stats.bytes_received for stats in plan.stats)
    over_machines = any(len({case.topology.nodes[rank] for rank in group}) > 1 for group in arrangement.groups)
    assert found.into_nodes == (None if over_machines else plan.bytes_into_nodes(case.topology))


@given(worlds(), st.booleans())
@settings(max_examples=100, deadline=None)
def test_sums_are_what_crosses_the_wire(case, relay):
    sources, needs, topology = case
    _, held, targets = fill(sources, needs)
    wire = simulate.run(simulate.plans(sources, needs, topology, 256, relay=relay), held, targets)
    found = find_traffic(Wanted(sources=sources, needs=needs, relay=relay), (), topology)
    assert list(found.into_ranks) == [sum(n for _, to, n in wire if to == rank) for rank in range(len(sources))]
    entering = dict.fromkeys(topology.nodes, 0)
    for source, to, num_bytes in wire:
        entering[topology.nodes[to]] += 0 if topology.same_node(source, to) else num_bytes
    assert found.into_nodes == entering


@pytest.mark.parametrize("strategy", [*STRATEGIES, "gather_hf"])
def test_too_many_pieces_leave_out_what_takes_every_plan(strategy, monkeypatch):
    case = scenario(1, 4, 2, 1, 2, nodes=2)
    planned = explain(strategy, case)
    monkeypatch.setattr(forecast_module, "PLANNED_PIECES", 0)
    summed = explain(strategy, case)
    left_out = () if strategy == "gather_hf" else BY_PLANS
    assert all((value is None) == (name in left_out) for name, value in summed.as_json().items())
    seconds = {name: getattr(summed.report, name) for name in ("plan_seconds_cold", "plan_seconds_cached")}
    rest = replace(planned.report, **dict.fromkeys(left_out), **seconds)
    assert summed == replace(planned, report=rest)


def test_the_busiest_rank_speaks_for_itself():
    explained = explain("exact", scenario(1, 3, 2, 1, 2))
    assert explained.of_busiest_rank.bytes_received == explained.report.bytes_in_max
    assert 0 < explained.of_busiest_rank.messages < explained.report.messages


def test_what_is_done_is_told():
    told = []
    explain("exact", scenario(1, 2, 1, 1, 1), told.append)
    assert told == ["exact: placing engine ranks", "exact: planning 2 ranks", "exact: planning rank 0", "exact: bounds"]


def test_an_engine_that_is_wider_than_a_machine_has_a_price():
    wide = explain("exact", scenario(2, 2, 2, 1, 4, nodes=4))
    assert wide.machines_per_tensor_group == 2
    assert wide.report.bytes_in_max == wide.report.bytes_in_bound_max
    assert wide.report.bytes_cross_node > 0
    assert explain("exact", scenario(2, 2, 2, 1, 4, nodes=2)).machines_per_tensor_group == 1
