"""The benchmark itself on four real ranks, and that its verification can fail."""

import json
import os
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import torch

from benchmarks.reshard.content import Shard, content
from benchmarks.reshard.synthetic import engine_layouts, synthetic_model
from megarl.controller.resharding import make_scenario
from megarl.reshard.report import SyncReport, explain
from megarl.reshard.scenario import STRATEGIES

TORCHRUN = Path(sys.executable).with_name("torchrun")


def run(world, *args):
    command = [str(TORCHRUN), "--standalone", "--nproc-per-node", str(world), "-m", "benchmarks.reshard", *args]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=120, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=False
    )


def test_all_strategies_on_four_ranks(tmp_path):
    sizes = {"train": "tp=4", "gen": "tp=2", "nodes": 2}
    args = [f"--{name}={value}" for name, value in sizes.items()]
    picture = tmp_path / "out.png"
    done = run(4, "--model=synthetic:1", *args, "--bucket-mb=0.25", "--json", f"--plot={picture}")
    assert done.returncode == 0, done.stderr
    reports = [json.loads(line) for line in done.stdout.splitlines()]
    assert [r["strategy"] for r in reports] == list(STRATEGIES)
    model = synthetic_model(1)
    case = make_scenario(
        "synthetic:1", model, "bfloat16", **sizes, bucket_bytes=2**18, engine=lambda *x: engine_layouts(model, *x)
    )
    for report in reports:
        assert list(report) == [f.name for f in fields(SyncReport)]
        assert report["mismatched_bytes"] == 0
        assert 0 < report["sync_seconds_p50"] <= report["sync_seconds_max"]
        planned = explain(report["strategy"], case).as_json()
        counted = {name for name in report if "seconds" not in name and name != "mismatched_bytes"}
        assert {n: report[n] for n in counted} == {n: planned[n] for n in counted}
    assert picture.stat().st_size > 1000


def test_the_wrong_number_of_ranks_is_told():
    done = run(2, "--model=synthetic:1", "--train=tp=4", "--gen=tp=2")
    assert done.returncode != 0
    assert "--train takes 4 ranks, torchrun started 2" in done.stderr


@pytest.fixture
def shard():
    shard = Shard(engine_layouts(synthetic_model(1), 2, "bfloat16")[1])
    shard.fill(3)
    return shard


def test_verification_sees_one_bit_an_old_sync_and_poison(shard):
    assert shard.mismatched_bytes(3) == 0
    total = sum(t.nbytes for t in shard.tensors.values())
    assert shard.mismatched_bytes(2) > 0.99 * total
    weight = shard.tensors["model.layers.0.mlp.gate_up_proj.weight"]
    weight.view(torch.int16)[5, 7] ^= 1
    assert shard.mismatched_bytes(3) == 2
    shard.poison()
    assert shard.mismatched_bytes(3) == total


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_content_is_of_the_global_index_and_never_nan(dtype):
    whole = content("w", ((0, 60), (0, 40)), dtype, 1)
    assert torch.equal(content("w", ((7, 31), (11, 12)), dtype, 1), whole[7:31, 11:12])
    assert whole.isfinite().all()
    integers = whole.view(torch.int32 if dtype is torch.float32 else torch.int16)
    assert integers.unique().numel() > 0.95 * whole.numel()
    assert not torch.equal(content("v", ((0, 60), (0, 40)), dtype, 1), whole)
