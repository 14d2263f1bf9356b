"""The kernel benchmark: kernel and loops agree, the kernel is faster, and the report is complete."""

import json
import sys
import time

import pytest
import torch

from benchmarks.gae.__main__ import main
from benchmarks.gae.loops import gae_over_lists, gae_over_positions, gae_over_tensors, pad, unpad
from benchmarks.gae.measure import GAMMA, LOOPS, measure
from benchmarks.gae.show import COLUMNS
from benchmarks.gae.workload import LONGEST, TURN, make_kernel_workloads
from megarl.functional import gae

FIELDS = (
    "kernel loop workload tokens tokens_in_mask sequences longest pairs loop_ms vectorised_ms ratio ratio_worst "
    "largest_difference"
)
WORKLOADS = 3


def test_workloads_have_a_long_sequence_and_holes():
    whole, holes, lambdas = make_kernel_workloads(100_000, 0)
    assert int(whole.cu_seqlens_S.diff().max()) == LONGEST
    assert int(whole.cu_seqlens_S[-1]) == 100_000
    assert whole.mask_T.all()
    assert holes.mask_T[:TURN].all()
    assert not holes.mask_T[TURN : 2 * TURN].any()
    assert len(lambdas.lam) == len(lambdas.cu_seqlens_S) - 1


@pytest.mark.parametrize("workload", list(make_kernel_workloads(5000, 1)), ids=lambda workload: workload.name)
def test_kernel_and_loops_agree(workload):
    args = (workload.rewards_T, workload.values_T, workload.mask_T, workload.cu_seqlens_S)
    got = gae(*args, gamma=GAMMA, lam=workload.lam)
    for loop in (gae_over_tensors, gae_over_lists):
        for a, b in zip(got, loop(*args, gamma=GAMMA, lam=workload.lam), strict=True):
            assert torch.allclose(a, b, rtol=1e-4, atol=1e-4)
            assert b.any()
    *tokens, bounds = args
    padded = gae_over_positions(*(pad(x, bounds) for x in tokens), gamma=GAMMA, lam=workload.lam)
    for a, b in zip(got, padded, strict=True):
        assert torch.allclose(a, unpad(b, bounds), rtol=1e-4, atol=1e-4)


@pytest.fixture
def cpu_time(monkeypatch):
    """Measure the CPU time of this thread, which excludes time when it is descheduled on a busy node."""
    monkeypatch.setattr("benchmarks.gae.measure.perf_counter", time.thread_time)


def test_kernel_is_8_times_faster_than_a_loop_over_tensors(cpu_time):
    """Compares the best of several alternating runs, since other processes share the caches on a busy node."""
    workload = next(make_kernel_workloads(20_000, 0))
    measure(workload, loop="lists", pairs=1)
    reports = [measure(workload, loop="tensors", pairs=1) for _ in range(5)]
    assert min(r.loop_ms for r in reports) >= 8 * min(r.vectorised_ms for r in reports)
    assert all(r.largest_difference < 1e-5 for r in reports)


def test_kernel_is_5_times_faster_than_a_loop_over_python_numbers(cpu_time):
    """Requires a fifth of the ratio in `benchmarks/results/gae.md` for this workload, by the best of several."""
    _, holes, _ = make_kernel_workloads(1_000_000, 0)
    reports = [measure(holes, loop="lists", pairs=1) for _ in range(4)]
    assert min(r.loop_ms for r in reports) >= 5 * min(r.vectorised_ms for r in reports)
    assert all(r.largest_difference < 1e-6 for r in reports)


def run(monkeypatch, *args):
    monkeypatch.setattr(sys, "argv", ["benchmarks.gae", *map(str, args)])
    return main()


def test_json_has_stable_fields(monkeypatch, capsys):
    assert run(monkeypatch, "--json", "--tokens=2000", "--pairs=2") == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(found) == WORKLOADS * len(LOOPS)
    assert all(list(report) == FIELDS.split() for report in found)
    assert all(0 < report["ratio_worst"] <= report["ratio"] for report in found)
    assert all(report["largest_difference"] < 1e-5 for report in found)


def test_table_and_file(monkeypatch, capsys, tmp_path):
    file = tmp_path / "results" / "gae.md"
    assert run(monkeypatch, "--tokens=2000", "--pairs=1", "--loops=lists", "--write", file) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1 + WORKLOADS
    written = file.read_text()
    assert "python -m benchmarks.gae --tokens=2000 --pairs=1 --loops=lists" in written
    table = [line for line in written.splitlines() if line.startswith("|")]
    assert table[0] == "| " + " | ".join(COLUMNS) + " |"
    assert len(table) == 2 + WORKLOADS


@pytest.mark.parametrize("name", ["tokens", "pairs"])
def test_invalid_arguments_are_refused(monkeypatch, capsys, name):
    assert run(monkeypatch, f"--{name}=0") == 2
    assert f"--{name} needs at least 1, got 0" in capsys.readouterr().err
