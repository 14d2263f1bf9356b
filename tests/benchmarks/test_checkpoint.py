"""The checkpoint benchmark: its report and its table."""

import json
import sys

from benchmarks.checkpoint.__main__ import COLUMNS, main


def test_report_and_table(tmp_path, monkeypatch, capsys):
    table = tmp_path / "results" / "checkpoint.md"
    arguments = ["--models", "demo", "--ranks", "1", "--repeats", "1", "--json", "--folder", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["benchmarks.checkpoint", *arguments, "--write", str(table)])
    assert main() == 0
    report = json.loads(capsys.readouterr().out)
    parameters = 2 * 320 * 64 + 64 + 2 * (2 * 64 + 2 * 32 + 64 * 16 * 32 + 8 * 32 * 64 + 3 * 64 * 256)
    assert report["bytes"] == report["staging_bytes"] == 3 * 4 * parameters
    assert report["bytes"] <= report["read_bytes"] < 1.5 * report["bytes"]
    assert report["ratio"] == report["asynchronous_seconds"] / report["synchronous_seconds"]
    *text, head, _, row = table.read_text().splitlines()
    assert any("--models demo --ranks 1" in line for line in text)
    assert head == f"| {COLUMNS} |"
    assert row.startswith("| demo | ")
    assert row.count("|") == head.count("|")
