"""The reshard benchmark on four real ranks; its verification detects errors."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.reshard.__main__ import CONTENDERS
from benchmarks.reshard.content import Shard, content
from benchmarks.reshard.megatron_limits import megatron_grids, require_megatron_core_support
from benchmarks.reshard.show import COLUMNS, SUMMARY, markdown, rows, summary_rows
from benchmarks.reshard.synthetic import engine_layouts, synthetic_model
from megarl.errors import ConfigError
from megarl.offline.reshard_explain import make_scenario
from megarl.placement.rank_grid import RankGrid
from megarl.reshard.analysis.scenario import STRATEGIES
from megarl.reshard.analysis.sync_report import SyncReport, explain
from tests.reshard.analysis.test_sync_report import FIELDS
from tests.reshard.scenarios import scenario

TORCHRUN = Path(sys.executable).with_name("torchrun")
LAYOUTS = {"1-4-1 -> 1-2": ("tp=4", "tp=2"), "1-1-4 -> 1-2": ("dp=4", "tp=2")}
COMMON = ("--model=synthetic:1", "--bucket-mb=0.25", "--repeats=3")


def run(world, *args):
    command = [str(TORCHRUN), "--standalone", "--nproc-per-node", str(world), "-m", "benchmarks.reshard", *args]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=180, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=False
    )


@pytest.fixture(scope="module")
def done():
    trains, gens = zip(*LAYOUTS.values(), strict=True)
    return run(4, *COMMON, "--nodes=2", "--json", "--train", *trains, "--gen", *gens)


@pytest.fixture(scope="module")
def reports(done):
    """Return the reports by layout and strategy."""
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {layout: {r["strategy"]: r for r in found if f"{r['train']} -> {r['gen']}" == layout} for layout in LAYOUTS}


def test_json_has_stable_fields_and_all_bytes_match(reports):
    for of_layout in reports.values():
        for report in of_layout.values():
            assert list(report) == FIELDS.split()
            assert report["mismatched_bytes"] == 0
            assert 0 < report["sync_seconds_p50"] <= report["sync_seconds_max"]


def test_counted_traffic_equals_the_plan(reports):
    model = synthetic_model(1)
    for layout, (train, gen) in LAYOUTS.items():
        case = make_scenario(
            "synthetic:1",
            model,
            "bfloat16",
            train=train,
            gen=gen,
            nodes=2,
            bucket_bytes=2**18,
            engine=lambda *x, **named: engine_layouts(model, *x, **named),
        )
        for name, report in reports[layout].items():
            if name in STRATEGIES:
                planned = explain(name, case).as_json()
                counted = {field for field in report if "seconds" not in field and field != "mismatched_bytes"}
                assert {n: report[n] for n in counted} == {n: planned[n] for n in counted}


def test_megatron_core_receives_at_least_the_bound_and_buffers_it(reports):
    peer, ours = (reports["1-4-1 -> 1-2"][name] for name in ("megatron_core", "exact"))
    assert peer["bytes_in_max"] >= peer["bytes_in_bound_max"] > 0
    assert peer["peak_extra_bytes"] >= peer["bytes_in_max"]
    assert peer["bytes_total"] >= ours["bytes_total"]
    assert peer["messages"] > ours["messages"]
    assert 0 < peer["bytes_cross_node"] < peer["bytes_total"]


def test_unsupported_strategies_are_skipped_with_a_reason(done, reports):
    first, second = reports.values()
    assert list(first) == list(CONTENDERS)
    assert list(second) == [name for name in CONTENDERS if name != "micro_dp"]
    assert "1-1-4 -> 1-2: micro_dp left out: micro_dp needs the training sizes" in done.stderr


def test_wrong_rank_count_is_refused_and_plot_is_written(tmp_path):
    assert (
        "--train takes 4 ranks, torchrun started 1"
        in run(1, *COMMON, "--skip=megatron_core", "--train=tp=4", "--gen=tp=2").stderr
    )
    picture = tmp_path / "out.png"
    args = ("--train=tp=1", "--gen=tp=1", "--strategies", "exact", "gather_hf", f"--plot={picture}")
    done = run(1, *COMMON, *args)
    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["strategy", "gather_hf", "exact"]
    assert picture.stat().st_size > 1000


MODEL = synthetic_model(1)
FEW_HEADS = replace(MODEL, attention=replace(MODEL.attention, num_kv_heads=2))
NARROW = replace(MODEL, mlp=replace(MODEL.mlp, ffn_size=3))


@pytest.mark.parametrize(
    ("model", "layout", "why"),
    [
        (MODEL, (1, 3, 1, 1, 2), r"every rank in an engine, got 3 ranks % \(gen pp 1 \* tp 2\) = 1"),
        (FEW_HEADS, (1, 2, 2, 1, 4), r"key-value heads of a Megatron model, got 2 % 4 = 2"),
        (replace(MODEL, vocab_size=300), (1, 4, 1, 1, 2), r"the same padded vocabulary on both sides, got 512 and 384"),
        (NARROW, (1, 3, 2, 1, 2), r"linear_fc1 to be split into 12 tiles, got 6 % 12"),
        (replace(MODEL, tie_embeddings=True), (2, 1, 1, 1, 1), r"does not support tied embeddings"),
    ],
)
def test_layouts_that_megatron_core_does_not_support_are_refused(model, layout, why):
    with pytest.raises(ConfigError, match=why):
        require_megatron_core_support(model, *megatron_grids(scenario(*layout)))


def test_megatron_core_supports_layouts_that_divide():
    train, gen = megatron_grids(scenario(2, 2, 2, 1, 2))
    assert (train, gen) == (RankGrid(pp=2, tp=2, dp=2), RankGrid(tp=2, dp=4))
    require_megatron_core_support(MODEL, train, gen)


def test_tables_compare_with_the_baselines_of_the_same_layout():
    def report(strategy, seconds, gen="1-2"):
        sizes = dict.fromkeys(FIELDS.split(), 0) | {"train": "1-4-2", "gen": gen, "strategy": strategy}
        return SyncReport(**{**sizes, "sync_seconds_p50": seconds, "bytes_in_max": seconds * 10**6})

    reports = [report("gather_hf", 8), report("micro_dp", 2), report("exact", 4), report("exact", 1, "1-4")]
    by_gather = COLUMNS.index("x gather_hf")
    assert [row[by_gather] for row in rows(reports)] == ["1.00", "4.00", "2.00", ""]
    first, second = summary_rows(reports)
    assert first[:5] == ["1-4-2 -> 1-2", "micro_dp", "2.000", "4.00", ""]
    assert first[5:8] == ["2.0", "8.0", ""]
    assert second[:4] == ["1-4-2 -> 1-4", "exact", "1.000", ""]
    assert markdown(SUMMARY, [first]).count("\n") == 3


@pytest.fixture
def shard():
    shard = Shard(engine_layouts(synthetic_model(1), 2, "bfloat16")[1])
    shard.fill(3)
    return shard


def test_verification_detects_one_bit_an_old_sync_and_nan(shard):
    assert shard.mismatched_bytes(3) == 0
    total = sum(t.nbytes for t in shard.tensors.values())
    assert shard.mismatched_bytes(2) > 0.99 * total
    weight = shard.tensors["model.layers.0.mlp.gate_up_proj.weight"]
    weight.view(torch.int16)[5, 7] ^= 1
    assert shard.mismatched_bytes(3) == 2
    shard.fill_nan()
    assert shard.mismatched_bytes(3) == total


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_content_depends_on_the_global_index_and_is_never_nan(dtype):
    whole = content("w", ((0, 60), (0, 40)), dtype, 1)
    assert torch.equal(content("w", ((7, 31), (11, 12)), dtype, 1), whole[7:31, 11:12])
    assert whole.isfinite().all()
    integers = whole.view(torch.int32 if dtype is torch.float32 else torch.int16)
    assert integers.unique().numel() > 0.95 * whole.numel()
    assert not torch.equal(content("v", ((0, 60), (0, 40)), dtype, 1), whole)
