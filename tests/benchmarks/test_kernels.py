"""The benchmark of the ops: results are compared, bytes are counted, and the report is complete."""

import json
import os
import sys

import pytest
import torch

from benchmarks.kernels import rooflines
from benchmarks.kernels.__main__ import main
from benchmarks.kernels.cases import Case
from benchmarks.kernels.measure import count_bytes, measure
from benchmarks.kernels.show import COLUMNS

FIELDS = (
    "op workload implementation min_bytes counted_bytes flops peak_bytes milliseconds roofline_fraction "
    "largest_difference"
)
OPS = {
    "linear_logprob_entropy",
    "linear_logprob_entropy, backward",
    "logprob_entropy_, backward",
    "fp8_block_quantize",
    "fp8_block_dequantize",
    "copy_boxes",
    "segmented_reverse_scan",
}


def run(monkeypatch, *args):
    monkeypatch.setattr(sys, "argv", ["benchmarks.kernels", "--device=cpu", "--no-compile", *map(str, args)])
    return main()


def test_bytes_are_those_of_inputs_and_outputs_of_each_operation():
    a, b = torch.zeros(10, 4), torch.zeros(10, 4)
    assert count_bytes(lambda: a + b) == 3 * 160
    assert count_bytes(lambda: a.add_(b)) == 3 * 160
    assert count_bytes(lambda: a.t()[:2]) == 0
    assert count_bytes(lambda: torch.empty(10)) == 0
    assert count_bytes(lambda: (a + b).sum(0)) == 3 * 160 + 160 + 16


def test_results_agree_for_every_op(monkeypatch, capsys):
    assert run(monkeypatch, "--json", "--tokens=20", "--vocabulary=301") == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert all(list(report) == FIELDS.split() for report in found)
    assert {report["op"] for report in found} == OPS
    for op in OPS:
        of_op = {report["implementation"]: report for report in found if report["op"] == op}
        assert {"megarl (reference)", "torch"} <= of_op.keys()
        assert all(report["counted_bytes"] >= report["min_bytes"] > 0 for report in of_op.values())
    assert all(report["milliseconds"] is None and report["peak_bytes"] >= 0 for report in found)


def test_results_that_differ_are_an_error():
    functions = {"megarl": lambda: (torch.ones(3),), "torch": lambda: (torch.full((3,), 1.1),)}
    case = Case(op="op", workload="", implementations=functions, min_bytes=1, flops=0, tolerance=0.05)
    with pytest.raises(ArithmeticError, match=r"op, megarl: results differ from torch's by 9\.1e-02 of the largest"):
        list(measure(case, "cpu", None))
    assert "MEGARL_KERNELS" not in os.environ, "left set, it would turn off the kernels of later tests"


def test_table_and_file(monkeypatch, capsys, tmp_path):
    file = tmp_path / "results" / "kernels.md"
    assert run(monkeypatch, "--ops", "copy_boxes", "segmented_reverse_scan", "--write", file) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1 + 6
    written = file.read_text()
    assert "Measured on a CPU, torch " in written
    table = [line for line in written.splitlines() if line.startswith("|")]
    assert table[0] == "| " + " | ".join(COLUMNS) + " |"
    assert len(table) == 2 + 6


def test_roofline_is_the_slower_of_memory_and_compute():
    h100 = rooflines.Roofline(3.35e12, 0.989e15)
    assert h100.seconds(3_350_000_000, 0) == pytest.approx(1e-3)
    assert h100.seconds(1, 989_000_000_000) == pytest.approx(1e-3)


def test_gpu_is_found_by_its_name(monkeypatch):
    h100, pcie = rooflines.Roofline(3.35e12, 0.989e15), rooflines.Roofline(2.0e12, 0.756e15)
    for name, expected in {"NVIDIA H100 80GB HBM3": h100, "NVIDIA H100 PCIe": pcie, "NVIDIA L4": None}.items():
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda name=name: name)
        assert rooflines.find_roofline("cuda") == expected
    assert rooflines.find_roofline("cpu") is None
