"""The reshard benchmark on real ranks, its verification, and its count of messages at scale."""

import io
import json
import math
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from benchmarks.reshard import __main__ as benchmark
from benchmarks.reshard import clock, scale
from benchmarks.reshard.__main__ import CONTENDERS
from benchmarks.reshard.content import Shard, content
from benchmarks.reshard.measure import MeasuredReport
from benchmarks.reshard.megatron_limits import megatron_grids, require_megatron_core_support
from benchmarks.reshard.published import QWEN3_8B
from benchmarks.reshard.show import COLUMNS, rows, summary_rows
from benchmarks.reshard.synthetic import engine_layouts, synthetic_model
from megarl.cli.tools.reshard_explain import make_scenario
from megarl.errors import ConfigError
from megarl.reshard.analysis.scenario import STRATEGIES
from megarl.reshard.analysis.sync_report import explain
from megarl.reshard.layout.topology import LinkRates
from megarl.reshard.planning import rounds as round_planning
from tests.megatron.ranks import run_ranks
from tests.reshard.analysis.test_sync_report import PLANNED_FIELDS
from tests.reshard.synthetic import scenario

FIELDS = f"""{PLANNED_FIELDS} hand_over sync_seconds_p50 sync_seconds_min sync_seconds_max cpu_seconds_p50
mismatched_bytes trained_layers bytes_unchanged count_bytes changed_share""".split()
MODEL = synthetic_model(1)
DENSE = "--model=synthetic:1 --train=tp=4 --gen=tp=2"
MOE = "--model=synthetic-moe:4 --train=tp=2,dp=2,ep=4,etp=1 --gen=tp=2 --skip ds_chat hybridflow_v"
DELTA = "--model=synthetic:1 --train=tp=2 --gen=tp=1 --delta=2 --changed-share=0.01 --transport=nccl-order"
GATHERS = "gather_hf_serial gather_hf nccl_m2n megatron_core"
RUNS = {
    f"{DENSE} --nodes=2": "nccl_m2n",
    DELTA: f"ds_chat hybridflow_v {GATHERS}",
    f"{DENSE} --hand-over=shared-memory": "nccl_m2n",
    "--model=synthetic:1 --train=dp=4 --gen=tp=2": "nccl_m2n micro_dp",
    MOE: "ds_chat hybridflow_v nccl_m2n megatron_core",
    f"{DENSE} --transport=nccl-order": GATHERS,
}
"""Arguments -> the strategies that do not support them."""


def run_module(main: Any, arguments: list[str]) -> tuple[int, list[dict[str, Any]], str]:
    """Run a command in this process; return its exit code, the JSON lines that it has printed, and its errors."""
    sys.argv = ["benchmarks.reshard", *arguments]
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
        code = main()
    return code, [json.loads(line) for line in out.getvalue().splitlines() if line.startswith("{")], err.getvalue()


@pytest.mark.parametrize(
    "arguments", [pytest.param(each, marks=[pytest.mark.slow] * (number > 1)) for number, each in enumerate(RUNS)]
)
def test_all_bytes_match_and_traffic_is_that_of_the_plan(arguments, tmp_path):
    common = ["--bucket-mb=0.25", "--repeats=3", "--json"]
    world = 2 if "--delta" in arguments else 4
    code, lines, errors = run_ranks(run_module, world, tmp_path, benchmark.main, [*arguments.split(), *common])
    assert code == 0, errors
    reports = {line["strategy"]: line for line in lines if "left_out" not in line}
    assert list(reports) == [name for name in CONTENDERS if name not in RUNS[arguments].split()]
    sizes = {"train": "tp=4", "gen": "tp=2", "nodes": 2, "bucket_bytes": 2**18}
    case = make_scenario("synthetic:1", MODEL, "bfloat16", engine=partial(engine_layouts, MODEL), **sizes)
    for name, report in reports.items():
        assert list(report) == FIELDS
        assert report["mismatched_bytes"] == 0
        assert 0 < report["sync_seconds_min"] <= report["sync_seconds_p50"] <= report["sync_seconds_max"]
        if name in STRATEGIES and "--nodes=2" in arguments:
            planned = explain(name, case).as_json()
            counted = {field for field in PLANNED_FIELDS.split() if "seconds" not in field}
            assert {n: report[n] for n in counted} == {n: planned[n] for n in counted}
        if "--delta" in arguments:  # two of 8 layers
            whole = report["bytes_total"] - report["count_bytes"] + report["bytes_unchanged"]
            assert 0.0015 < report["changed_share"] < 0.003
            sent = (report["bytes_total"] - report["count_bytes"]) / whole
            assert report["changed_share"] < sent < (6 if name == "micro_dp" else 3) * report["changed_share"]
    if "--nodes=2" in arguments:
        peer, ours = reports["megatron_core"], reports["exact"]
        assert ours["bytes_in_max"] == ours["bytes_in_bound_max"]
        assert peer["bytes_in_max"] >= peer["bytes_in_bound_max"] > 0
        # a rank receives in place but for the columns of the row-parallel weights, half of which it has with tp 2
        shapes = {name: spec.shape for name, spec in MODEL.tensors("bfloat16").items()}
        split = [shape for name, shape in shapes.items() if name.endswith(("o_proj.weight", "down_proj.weight"))]
        assert peer["peak_extra_bytes"] == 2 * sum(map(math.prod, split)) // 2
        assert peer["bytes_total"] >= ours["bytes_total"]
        assert (lines[5]["strategy"], "not installed" in lines[5]["left_out"]) == ("nccl_m2n", True)


def test_the_controller_calls_each_process_a_fixed_number_of_times(tmp_path):
    arguments = "--model=qwen3-8b --train=pp=2,tp=2 --ranks=32 --gen=tp=4 --engine-ranks=16 --sample=4 --json"
    code, lines, errors = run_ranks(run_module, 1, tmp_path, scale.main, arguments.split())  # it forks
    assert code == 0, errors
    trainer, engines = 32, 4
    calls = {"colocated": trainer + 2 * engines + 1, "disaggregated": 2 * trainer + 2 * engines + 2}
    assert [line["arrangement"] for line in lines] == list(calls)
    for report in lines:
        assert (report["trainer_ranks"], report["engine_ranks"]) == (32, 16)
        assert (report["ray_calls_connect"], report["fan_outs_connect"]) == (calls[report["arrangement"]], 3)
        assert (report["ray_calls_sync"], report["fan_outs_sync"]) == (trainer + engines, 1)
        assert report["connect_message_mb_per_rank"] < 0.05
        assert report["egress_ratio_64_to_8_machines"] < 1.05
        assert 1 < report["buffer_buckets"] <= 2
    timed = clock.measure(clock.Case("qwen3-8b", "pp=2,tp=2,dp=8", "tp=4", engines=4), LinkRates())
    assert lines[1]["groups"] == timed.groups
    assert 0.99 * timed.p2p_calls < lines[1]["p2p_calls"] <= timed.p2p_calls  # the most of a sample of ranks


def changed(**parts):
    """Return MODEL with other attributes of a part of its layers."""
    layers = [replace(of, **{k: replace(getattr(of, k), **v) for k, v in parts.items()}) for of in MODEL.layers]
    return replace(MODEL, layers=tuple(layers))


@pytest.mark.parametrize(
    ("model", "layout", "why"),
    [
        (MODEL, (1, 3, 1, 2), r"every rank in an engine, got 3 ranks % gen tp 2 = 1"),
        (changed(attention={"num_kv_heads": 2}), (1, 2, 2, 4), r"got 2 % 4 = 2"),
        (replace(MODEL, vocab_size=300), (1, 4, 1, 2), r"the same padded vocabulary on both sides, got 512 and 384"),
        (changed(mlp={"ffn_size": 3}), (1, 3, 2, 2), r"split into 12 tiles, got 6 % 12"),
        (replace(MODEL, tie_embeddings=True), (2, 1, 1, 1), r"does not support tied embeddings"),
        (synthetic_model(4, is_moe=True), (1, 2, 1, 2), r"on dense models only, got Qwen3Moe"),
    ],
)
def test_layouts_that_megatron_core_does_not_support_are_refused(model, layout, why):
    require_megatron_core_support(MODEL, *megatron_grids(scenario(2, 2, 2, 2)))
    with pytest.raises(ConfigError, match=why):
        require_megatron_core_support(model, *megatron_grids(scenario(*layout)))


def test_tables_compare_with_the_baselines_of_the_same_layout():
    def report(strategy, median, gen="1-2"):
        sizes = dict.fromkeys(FIELDS, 0) | {"train": "1-4-2", "gen": gen, "strategy": strategy}
        seconds = {"sync_seconds_p50": median, "sync_seconds_min": median / 2, "sync_seconds_max": median * 2}
        return MeasuredReport(**{**sizes, **seconds, "bytes_in_max": median * 10**6})  # type: ignore[arg-type]

    reports = [report("gather_hf", 8), report("micro_dp", 2), report("exact", 4), report("exact", 1, "1-4")]
    assert [row[COLUMNS.index("x gather_hf")] for row in rows(reports)] == ["1.00", "4.00", "2.00", ""]
    first, second = summary_rows(reports)
    assert first[:9] == ["1-4-2 -> 1-2", "micro_dp", "2.000", "1.000..4.000", "4.00", "", "2.0", "8.0", ""]
    assert second[:5] == ["1-4-2 -> 1-4", "exact", "1.000", "0.500..2.000", ""]


def test_verification_detects_one_bit_an_old_sync_and_nan():
    shard = Shard(engine_layouts(MODEL, 2, "bfloat16")[1])
    shard.fill(3)
    total = sum(t.nbytes for t in shard.tensors.values())
    assert shard.mismatched_bytes(3) == 0
    assert shard.mismatched_bytes(2) > 0.99 * total
    shard.tensors["model.layers.0.mlp.gate_up_proj.weight"].view(torch.int16)[5, 7] ^= 1
    assert shard.mismatched_bytes(3) == 2
    shard.fill_nan()
    assert shard.mismatched_bytes(3) == total


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_content_depends_on_the_global_index_and_is_never_nan(dtype):
    whole = content("w", ((0, 60), (0, 40)), dtype, 1)
    assert torch.equal(content("w", ((7, 31), (11, 12)), dtype, 1), whole[7:31, 11:12])
    assert whole.isfinite().all()
    assert whole.unique().numel() > 0.95 * whole.numel()
    assert not torch.equal(content("v", ((0, 60), (0, 40)), dtype, 1), whole)


SMALL = QWEN3_8B | {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "vocab_size": 4096}


SHARE = 9
NINTH = QWEN3_8B | {"num_hidden_layers": 36 // SHARE, "vocab_size": 151_936 // SHARE // 128 * 128}


@pytest.mark.parametrize(
    ("train", "gen", "engines"),
    [
        ("pp=2,tp=4,dp=2", "tp=2", None),
        ("pp=4,tp=4,dp=2", "tp=4", None),  # the first and the last stage would send more than any node receives
        ("tp=8,dp=2", "tp=4", None),  # nothing crosses nodes
        ("tp=4,dp=2", "tp=2", 4),
        ("tp=8,dp=2", "tp=8", 8),
    ],
)
def test_planned_seconds_are_near_the_bound(train, gen, engines, monkeypatch):
    """A ninth of Qwen3-8B's layers and vocabulary over links of a ninth of the rate, bucket and messages likewise."""
    monkeypatch.setitem(clock.MODELS, "ninth", NINTH)
    monkeypatch.setattr(round_planning, "LARGE_MESSAGE_BYTES", round_planning.LARGE_MESSAGE_BYTES // SHARE)
    monkeypatch.setattr(clock, "BUCKET_BYTES", clock.BUCKET_BYTES // SHARE)
    monkeypatch.setattr(clock, "CASES", [clock.Case("ninth", train, gen, engines)])
    rates = ["--network-gb-per-second", str(50 / SHARE), "--nvlink-gb-per-second", str(400 / SHARE)]
    code, (report,), _ = run_module(partial(clock.main, ["--cases", "0", "--json", *rates]), [])
    assert code == 0
    assert report["auto_over_best"] <= 1.05
    assert report["holder_deviation"] <= 1.05
    assert report["ratio"] <= report["limit"]


@pytest.mark.parametrize(
    ("model", "train", "gen", "engines"),
    [
        (clock.DEEPSEEK, "pp=4,tp=8,dp=4,ep=8,etp=1", "tp=16", 4),  # ranks hold experts and parts of other tensors
        (clock.DEEPSEEK, "pp=4,tp=1,dp=16,ep=4,etp=1", "tp=16", 2),  # all ranks of an engine need some tensors in full
        (clock.DEEPSEEK, "pp=4,tp=1,dp=16,ep=4,etp=1", "tp=8", None),  # nodes that hold experts, and nodes that relay
        (clock.MOE, "pp=2,tp=2,dp=16,ep=8,etp=1", "tp=2", 1),  # 16 ranks send what one needs
        (clock.MOE, "pp=4,tp=8,dp=3,ep=4,etp=1", "tp=1", 8),  # 16 ranks each hold an equal part of what 8 need
        (clock.MOE, "tp=4,dp=2,ep=2,etp=1", "tp=2", None),  # on one machine, 4 ranks hold what 2 others need
        (clock.DENSE, "pp=2,tp=2,dp=2", "tp=4", None),  # likewise 2 ranks what one needs
    ],
)
def test_ranks_send_and_receive_evenly_in_each_round(model, train, gen, engines):
    found = clock.measure(clock.Case(model, train, gen, engines), LinkRates())
    assert found.holder_deviation <= 1.05
    assert found.auto_over_best <= 1.05
    assert found.ratio <= found.limit


def test_clock_of_a_layout_of_which_nothing_is_sent(monkeypatch):
    monkeypatch.setitem(clock.MODELS, "small", SMALL)
    found = clock.measure(clock.Case("small", "dp=8", "tp=1"), LinkRates())
    assert (found.seconds_planned, found.seconds_bound, found.ratio) == (0, 0, 1)


@pytest.mark.parametrize("engines", [None, 4])
def test_clock_of_a_layout(engines, monkeypatch):
    assert len(clock.CASES) == 20
    monkeypatch.setitem(clock.MODELS, "small", SMALL)
    monkeypatch.setattr(clock, "BUCKET_BYTES", 1 << 18)
    monkeypatch.setattr(clock, "CASES", [clock.Case("small", "pp=2,tp=4,dp=2", "tp=2", engines)])
    code, (report,), _ = run_module(partial(clock.main, ["--cases", "0", "--json"]), [])
    assert code == 0
    assert report["machines"] == (2 if engines is None else 3)
    assert report["ratio"] == pytest.approx(report["seconds_planned"] / report["seconds_bound"], rel=0.01)
    assert report["ratio"] >= 1
    assert report["holder_deviation"] >= 1
    assert list(report["seconds_by_strategy"]) == (["exact"] if engines else ["gather_hf", "micro_dp", "exact"])
    assert report["seconds_by_strategy"][report["strategy"]] == report["seconds_planned"]
