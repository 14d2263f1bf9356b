"""The reshard benchmark on four real ranks; its verification detects errors."""

import io
import json
import os
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from benchmarks.reshard import __main__ as benchmark
from benchmarks.reshard import changed_weights
from benchmarks.reshard.__main__ import BOXES, CONTENDERS, POINT_TO_POINT
from benchmarks.reshard.contender import frozen_tensors
from benchmarks.reshard.content import Shard, content
from benchmarks.reshard.megatron_limits import megatron_grids, require_megatron_core_support
from benchmarks.reshard.show import COLUMNS, SUMMARY, LeftOut, left_out_rows, markdown, rows, summary_rows
from benchmarks.reshard.synthetic import engine_layouts, synthetic_model
from megarl.errors import ConfigError
from megarl.offline.reshard_explain import make_scenario
from megarl.placement.rank_grid import RankGrid
from megarl.reshard.analysis.scenario import STRATEGIES
from megarl.reshard.analysis.sync_report import RUN_ONLY_FIELDS, SyncReport, explain
from tests.megatron.ranks import run_ranks
from tests.reshard.analysis.test_sync_report import FIELDS
from tests.reshard.scenarios import scenario
from tests.time_limits import HANG_SECONDS

TORCHRUN = Path(sys.executable).with_name("torchrun")
LAYOUTS = {"1-4-1 -> 1-2": ("tp=4", "tp=2"), "1-1-4 -> 1-2": ("dp=4", "tp=2")}
COMMON = ("--model=synthetic:1", "--bucket-mb=0.25", "--repeats=3")


@dataclass(frozen=True)
class Done:
    returncode: int
    stdout: str
    stderr: str


def run(world, folder, *args):
    """Run the benchmark on ranks that are forked from a process with its imports, which take seconds."""
    return run_ranks(main, world, folder, args)


def main(args):
    """Run the benchmark as this rank; return the exit code and what it has printed."""
    sys.argv = ["benchmarks.reshard", *args]
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
        code = benchmark.main()
    return Done(code, out.getvalue(), err.getvalue())


def run_with_torchrun(world, *args):
    command = [str(TORCHRUN), "--standalone", "--nproc-per-node", str(world), "-m", "benchmarks.reshard", *args]
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        check=False,
    )


def json_lines(done):
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    trains, gens = zip(*LAYOUTS.values(), strict=True)
    return run(4, tmp_path_factory.mktemp("done"), *COMMON, "--nodes=2", "--json", "--train", *trains, "--gen", *gens)


@pytest.fixture(scope="module")
def reports(done):
    """Return the reports by layout and strategy."""
    assert done.returncode == 0, done.stderr
    found = [line for line in json_lines(done) if "left_out" not in line]
    return {layout: {r["strategy"]: r for r in found if f"{r['train']} -> {r['gen']}" == layout} for layout in LAYOUTS}


def test_json_has_stable_fields_and_all_bytes_match(reports):
    for of_layout in reports.values():
        for report in of_layout.values():
            assert list(report) == FIELDS.split()
            assert report["mismatched_bytes"] == 0
            assert 0 < report["sync_seconds_min"] <= report["sync_seconds_p50"] <= report["sync_seconds_max"]
            assert report["hand_over"] == "direct"


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
                counted = {field for field in report if "seconds" not in field} - set(RUN_ONLY_FIELDS)
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
    assert list(first) == [name for name in CONTENDERS if name != "nccl_m2n"]
    assert list(second) == [name for name in first if name != "micro_dp"]
    assert "1-1-4 -> 1-2: micro_dp left out: micro_dp needs the training sizes" in done.stderr
    left_out = [line for line in json_lines(done) if "left_out" in line]
    assert [(line["strategy"], line["train"]) for line in left_out] == [
        ("nccl_m2n", "1-4-1"),
        ("nccl_m2n", "1-1-4"),
        ("micro_dp", "1-1-4"),
    ]
    assert left_out[0]["left_out"].startswith("not installed: megatron-core ")


def test_the_plan_reaches_the_bound_of_either_placement(reports):
    of_layout = reports["1-4-1 -> 1-2"]
    for name in ("exact", "exact_consecutive"):
        assert of_layout[name]["bytes_in_max"] == of_layout[name]["bytes_in_bound_max"]
    assert of_layout["exact_consecutive"]["bytes_in_bound_max"] == of_layout["megatron_core"]["bytes_in_bound_max"]
    for name in ("gather_hf", "gather_hf_serial"):
        assert of_layout[name]["bytes_total"] == of_layout["gather_hf"]["bytes_total"]


def test_every_contender_hands_over_through_shared_memory(tmp_path):
    done = run(4, tmp_path, *COMMON, "--json", "--hand-over=shared-memory", "--train=tp=4", "--gen=tp=2")
    assert done.returncode == 0, done.stderr
    found = {line["strategy"]: line for line in json_lines(done) if "left_out" not in line}
    assert list(found) == [name for name in CONTENDERS if name != "nccl_m2n"]
    assert {(line["hand_over"], line["mismatched_bytes"]) for line in found.values()} == {("shared-memory", 0)}
    # on one node, the placement alone saves bytes
    assert found["exact"]["bytes_in_max"] < found["exact_consecutive"]["bytes_in_max"]


def test_experts(tmp_path):
    args = ("--bucket-mb=0.25", "--repeats=3", "--json", "--train=tp=2,dp=2,ep=4,etp=1", "--gen=tp=2")
    done = run(4, tmp_path, "--model=synthetic-moe:4", *args, "--skip", "ds_chat", "hybridflow_v", "nccl_m2n")
    assert done.returncode == 0, done.stderr
    lines = json_lines(done)
    found = {line["strategy"]: line for line in lines if "left_out" not in line}
    assert {line["strategy"] for line in lines} - set(found) == {"megatron_core"}
    assert found["exact"]["bytes_in_max"] < found["gather_hf"]["bytes_in_max"]
    assert {line["mismatched_bytes"] for line in found.values()} == {0}


def test_messages_complete_in_nccl_order(tmp_path):
    """Every strategy that sends messages runs over gloo with NCCL's rules; a deadlock ends in a timeout."""
    args = ("--nodes=2", "--json", "--transport=nccl-order", "--train=tp=4", "--gen=tp=1")
    done = run(4, tmp_path, *COMMON, *args)
    assert done.returncode == 0, done.stderr
    reports = json_lines(done)
    assert [report["strategy"] for report in reports] == list(POINT_TO_POINT)
    assert {report["mismatched_bytes"] for report in reports} == {0}
    assert sum(report["messages"] for report in reports) > 0


def test_only_layers_that_change_are_sent(tmp_path):
    args = ("--json", "--delta=2", "--train=tp=2", "--gen=tp=1", "--transport=nccl-order")
    done = run(2, tmp_path, *COMMON, *args)
    assert done.returncode == 0, done.stderr
    found = {line["strategy"]: line for line in json_lines(done)}
    assert list(found) == list(BOXES)
    for name, report in found.items():
        whole = report["bytes_total"] - report["mark_bytes"] + report["bytes_unchanged"]
        assert (report["trained_layers"], report["mismatched_bytes"]) == (2, 0)
        assert 0 < report["mark_bytes"] < whole / 1000
        share = (report["bytes_total"] - report["mark_bytes"]) / whole
        assert 0.15 < report["changed_share"] < 0.3  # of 8 layers, embedding and head
        assert 0.15 < share < (0.6 if name == "micro_dp" else 0.3)


def test_frozen_tensors_are_all_but_those_of_the_last_layers():
    names = ["model.embed_tokens.weight", *(f"model.layers.{i}.mlp.weight" for i in range(11)), "lm_head.weight"]
    assert set(names) - frozen_tensors(names, 2) == {"model.layers.9.mlp.weight", "model.layers.10.mlp.weight"}
    assert frozen_tensors(names, 0) == set(names)


def test_an_adam_step_changes_few_weights_and_nearly_all_pieces():
    first, last = changed_weights.measure(1e-6, 4, torch.bfloat16, elements=1 << 18, std=0.02)
    assert (first.step, last.step) == (1, 4)
    for report in (first, last):
        assert 0.001 < report.changed_elements < 0.1
        assert report.indexed_bytes == pytest.approx(3 * report.changed_elements)
        assert report.changed_pieces[256 << 10] == 1.0
        shares = list(report.changed_pieces.values())
        assert shares == sorted(shares)
    (frozen,) = changed_weights.measure(0.0, 1, torch.bfloat16, elements=1 << 18, std=0.02)
    assert set(frozen.changed_pieces.values()) == {0.0}


def test_wrong_rank_count_is_refused_and_plot_is_written(tmp_path):
    assert (
        "--train takes 4 ranks, torchrun started 1"
        in run_with_torchrun(1, *COMMON, "--skip=megatron_core", "--train=tp=4", "--gen=tp=2").stderr
    )
    picture = tmp_path / "out.png"
    args = ("--train=tp=1", "--gen=tp=1", "--strategies", "exact", "gather_hf", f"--plot={picture}")
    done = run_with_torchrun(1, *COMMON, *args)
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
    def report(strategy, median, gen="1-2"):
        sizes = dict.fromkeys(FIELDS.split(), 0) | {"train": "1-4-2", "gen": gen, "strategy": strategy}
        seconds = {"sync_seconds_p50": median, "sync_seconds_min": median / 2, "sync_seconds_max": median * 2}
        return SyncReport(**{**sizes, **seconds, "bytes_in_max": median * 10**6})

    reports = [report("gather_hf", 8), report("micro_dp", 2), report("exact", 4), report("exact", 1, "1-4")]
    by_gather = COLUMNS.index("x gather_hf")
    assert [row[by_gather] for row in rows(reports)] == ["1.00", "4.00", "2.00", ""]
    first, second = summary_rows(reports)
    assert first[:6] == ["1-4-2 -> 1-2", "micro_dp", "2.000", "1.000..4.000", "4.00", ""]
    assert first[6:9] == ["2.0", "8.0", ""]
    assert second[:5] == ["1-4-2 -> 1-4", "exact", "1.000", "0.500..2.000", ""]
    (row,) = left_out_rows([LeftOut(strategy="nccl_m2n", train="1-4-2", gen="1-2", left_out="not installed")])
    assert row[:3] == ["nccl_m2n", "1-4-2 -> 1-2", "not installed"]
    assert len(row) == len(COLUMNS)
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
