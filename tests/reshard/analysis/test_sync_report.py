"""Reports against closed forms and lower bounds."""

from dataclasses import fields

import pytest

from megarl.errors import ConfigError
from megarl.reshard.analysis import forecast as forecast_module
from megarl.reshard.analysis import plan_agreement
from megarl.reshard.analysis.nccl_progress import Stall
from megarl.reshard.analysis.scenario import STRATEGIES, arrange, even_nodes
from megarl.reshard.analysis.sync_report import RUN_ONLY_FIELDS, SyncReport, explain, explain_auto
from megarl.reshard.layout.engine_ranks import can_place_strided
from megarl.reshard.layout.engine_stages import split_stages
from megarl.reshard.layout.layout import ShardPiece, TensorSpec, WeightLayout
from megarl.reshard.planning.plan_cache import cached_plan, clear_plan_cache
from tests.reshard.scenarios import scenario
from tests.reshard.synthetic import MODEL_BYTES

FIELDS = """strategy world train gen model bytes_total bytes_in_max bytes_in_mean bytes_in_bound_max bytes_cross_node
peak_extra_bytes redundant_bytes_after messages collectives plan_seconds_cold plan_seconds_cached hand_over
sync_seconds_p50 sync_seconds_min sync_seconds_max cpu_seconds_p50 mismatched_bytes trained_layers bytes_unchanged
mark_bytes changed_share"""


def test_report_fields():
    assert [f.name for f in fields(SyncReport)] == FIELDS.split()


def test_exact_moves_nothing_if_generation_shards_lie_in_training_shards():
    case = scenario(1, 2, 2, 1, 4)
    report = explain("exact", case).report
    assert (report.bytes_total, report.bytes_in_bound_max, report.messages) == (0, 0, 0)
    with pytest.raises(ConfigError):
        explain("micro_dp", case)


def test_bytes_between_nodes():
    """ds_chat on two nodes of one replica each: half of the model is owned by the other node."""
    explained = explain("ds_chat", scenario(1, 4, 2, 1, 2, nodes=2))
    assert explained.report.bytes_cross_node == 8 * MODEL_BYTES / 2
    assert explained.bytes_into_node_max == 4 * MODEL_BYTES / 2
    assert explained.bytes_into_node_bound_max == 0
    assert explain("hybridflow_v", scenario(1, 4, 2, 1, 2, nodes=2)).report.bytes_cross_node == 0
    wide = scenario(1, 8, 2, 1, 4, nodes=2)
    exact, micro = explain("exact", wide).report, explain("micro_dp", wide).report
    assert (exact.bytes_total, exact.bytes_in_max, exact.bytes_cross_node) == (micro.bytes_total, MODEL_BYTES / 8, 0)
    assert exact.redundant_bytes_after == 0


def test_gather_hf_sends_the_full_model_to_every_rank():
    report = explain("gather_hf", scenario(1, 4, 1, 1, 2)).report
    assert (report.bytes_total, report.bytes_in_max) == (4 * 0.75 * MODEL_BYTES, 0.75 * MODEL_BYTES)
    assert (report.messages, report.collectives) == (0, 4 * 48)


def test_small_buckets_need_more_messages_and_less_memory():
    few, many = (explain("micro_dp", scenario(1, 4, 2, 1, 2, bucket_bytes=b)).report for b in (1 << 20, 1 << 14))
    assert few.bytes_total == many.bytes_total
    assert few.collectives < many.collectives
    assert many.peak_extra_bytes <= 2 << 14 < few.peak_extra_bytes


AUTO = {
    (1, 4, 2, 1, 2): "micro_dp",
    (1, 8, 1, 1, 8): "micro_dp",
    (2, 2, 2, 1, 2): "micro_dp",
    (4, 2, 1, 2, 1): "micro_dp",
    (2, 4, 2, 2, 2): "micro_dp",
    (1, 2, 2, 1, 4): "exact",
    (1, 1, 4, 1, 2): "exact",
    (1, 3, 2, 1, 2): "exact",
    (3, 2, 1, 2, 1): "exact",
    (2, 3, 1, 1, 6): "exact",
}


def fits(layout, nodes):
    """Return whether engines fit on nodes."""
    p, t, d, pg, tg = layout
    return p * t * d % nodes == 0 and p * t * d // nodes // tg * nodes >= p * t * d // (pg * tg) * pg


CASES = [(layout, nodes) for layout in AUTO for nodes in (1, 2, 4) if fits(layout, nodes)]


@pytest.mark.parametrize(("layout", "nodes"), CASES, ids=str)
def test_no_other_strategy_of_a_run_has_a_lower_maximum_than_auto(layout, nodes):
    _, _, _, pg, tg = layout
    case = scenario(*layout, nodes=nodes)
    found = explain_auto(case).report
    strided = can_place_strided(case.grid, case.topology, gen_tp=tg, gen_pp=pg)
    assert found.strategy == (AUTO[layout] if nodes == 1 or strided else "exact")
    for name in ("gather_hf", "exact", *(("micro_dp",) if strided else ())):
        assert found.bytes_in_max <= explain(name, case).report.bytes_in_max


def test_auto_reuses_known_explanations():
    case = scenario(1, 4, 2, 1, 2)
    known = [explain(name, case) for name in ("gather_hf", "micro_dp")]
    assert explain_auto(case, known) is known[1]


def test_json_omits_fields_that_need_a_run():
    found = explain("exact", scenario(1, 4, 2, 1, 2)).as_json()
    assert set(FIELDS.split()) - set(found) == set(RUN_ONLY_FIELDS)
    assert found["fraction_in_max"] == 0.25
    assert found["model_bytes"] == MODEL_BYTES


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_progress_under_nccl_is_proved_for_every_strategy(strategy, monkeypatch):
    case = scenario(2, 2, 2, 1, 2, nodes=2)
    assert explain(strategy, case).as_json()["nccl_progress"] is True
    if strategy != "gather_hf":
        monkeypatch.setattr(forecast_module, "find_stalls", lambda _: [Stall(3, 0, "hop 1 of round 2", (1,))])
        stalled = explain(strategy, case)
        assert stalled.stalls == ("rank 3 waits in hop 1 of round 2 for rank 1",)
        assert stalled.as_json()["nccl_progress"] is False


@pytest.mark.parametrize(("found", "progress"), [([], True), (["ranks 0 and 1 disagree"], False), (None, None)])
def test_progress_of_too_many_ranks_to_plan_follows_from_some(found, progress, monkeypatch):
    case = scenario(1, 4, 2, 1, 2)
    monkeypatch.setattr(forecast_module, "MAX_PLANNED_PIECES", 0)
    assert explain("micro_dp", case).as_json()["nccl_progress"] is True
    monkeypatch.setattr(forecast_module, "find_disagreements", lambda _: found)
    if found is None:
        monkeypatch.setattr(plan_agreement, "MAX_REPRESENTATIVES", 1)
    assert explain("micro_dp", case).as_json()["nccl_progress"] is progress


def test_error_for_non_dividing_nodes_shows_the_arithmetic():
    with pytest.raises(ConfigError, match=r"--nodes needs to divide the ranks, got 8 % 3 = 2"):
        even_nodes(8, 3)


def test_plans_are_cached():
    clear_plan_cache()
    case, same = scenario(1, 4, 2, 1, 2), scenario(1, 4, 2, 1, 2)
    plans = [cached_plan(c.sources, arrange("exact", c).needs, c.topology, 0, 1 << 20) for c in (case, same)]
    assert plans[0] is plans[1]
    other = scenario(1, 2, 4, 1, 2)
    assert cached_plan(other.sources, arrange("exact", other).needs, other.topology, 0, 1 << 20) is not plans[0]


@pytest.mark.parametrize("tied", [False, True])
def test_split_stages(tied):
    names = [f"model.{n}.weight" for n in ("embed_tokens", *(f"layers.{i}.a" for i in range(4)), "norm")]
    names += [] if tied else ["lm_head.weight"]
    tensors = {name: TensorSpec((2,), "float32") for name in names}
    layout = WeightLayout(tensors, tuple(ShardPiece(n, ((0, 2),), n, ((0, 2),)) for n in names))
    assert split_stages(layout, 1) == [layout]
    first, last = ([p.local for p in stage.pieces] for stage in split_stages(layout, 2))
    assert first == names[:3]
    assert set(last) == {*names[3:], "lm_head.weight"}
    with pytest.raises(ConfigError, match=r"got 4 % 3 = 1"):
        split_stages(layout, 3)
