"""The benchmark of the controller runs, and a replica fetches little more than its own samples."""

import json
import sys

from benchmarks.controller import __main__ as program
from benchmarks.controller.measure import measure


def test_report(cluster, tmp_path, monkeypatch, capsys):
    arguments = ["--ranks=64", "--trajectories=1024", "--replicas=8", "--steps=4", "--prompts=100", "--json"]
    monkeypatch.setattr(sys, "argv", ["benchmarks.controller", *arguments, f"--write={tmp_path}/page.md"])
    monkeypatch.setattr(program, "_measure_in_new_cluster", lambda work, size, _: measure(work, tmp_path, size))
    assert program.main() == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["ranks"], report["trajectories"], report["replicas"]) == (64, 1024, 8)
    assert 1 <= report["fetched_per_used"] <= 1.3
    assert 1100 < report["tokens_per_trajectory"] < 2100
    assert min(report[name] for name in ("dispatch_seconds", "step_seconds", "rank_calls_cpu_seconds")) > 0
    # a call of each rank to train, one to push, two to offload; the first push of the run counts in one of four steps
    assert report["calls_per_rank"] == {
        "train_step": 1.0,
        "prepare": 1 / 8,  # by the first rank of a replica
        "push_weights": 1.25,
        "offload": 2.5,
        "begin_save": 0.5,
        "is_save_written": 0.25,  # once for a save: training steps report it as well
        "finish_save": 0.25,
    }
    assert report["dispatch_mb"] < 0.05 * report["sample_mb"]
    assert report["step_calibrated"] == report["step_cpu_seconds"] / report["calibration_cpu_seconds"]
    table = [line for line in (tmp_path / "page.md").read_text().splitlines() if line.startswith("|")]
    assert [line.count("|") for line in table] == [len(program.COLUMNS) + 1] * 3
