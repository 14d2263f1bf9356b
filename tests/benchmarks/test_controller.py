"""The benchmark of the controller runs, and a replica fetches little more than its own samples."""

import json
import sys

from benchmarks.controller import __main__ as program
from benchmarks.controller.measure import measure


def test_report(cluster, tmp_path, monkeypatch, capsys):
    arguments = ["--ranks=64", "--trajectories=1024", "--replicas=8", "--steps=2", "--prompts=100", "--json"]
    monkeypatch.setattr(sys, "argv", ["benchmarks.controller", *arguments, f"--write={tmp_path}/page.md"])
    monkeypatch.setattr(program, "_measure_in_new_cluster", lambda work, size, _: measure(work, tmp_path, size))
    assert program.main() == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["ranks"], report["trajectories"], report["replicas"]) == (64, 1024, 8)
    assert 1 <= report["fetched_per_used"] <= 1.3
    assert 1100 < report["tokens_per_trajectory"] < 2100
    assert min(report[name] for name in ("dispatch_seconds", "step_seconds", "rank_calls_cpu_seconds")) > 0
    table = [line for line in (tmp_path / "page.md").read_text().splitlines() if line.startswith("|")]
    assert [line.count("|") for line in table] == [len(program.COLUMNS) + 1] * 3
