"""The benchmark of the controller runs, and a replica fetches little more than its own samples."""

import json
import sys
from dataclasses import fields

import pytest

from benchmarks.controller import __main__ as program
from benchmarks.controller.measure import ControllerReport, Workload, measure
from benchmarks.controller.verl_run import add_verl
from megarl.errors import WorkerError
from tests.errors import expect_error


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
        "push_weights": 1.25,
        "offload": 2.5,
        "begin_save": 0.5,  # after steps 3 and 4, the last
        "is_save_written": 0.25,  # once for a save: training steps report it as well
        "wait_save_written": 0.25,
        "finish_save": 0.25,
    }
    assert report["dispatch_mb"] < 0.05 * report["sample_mb"]
    assert report["step_calibrated"] == report["step_cpu_seconds"] / report["calibration_cpu_seconds"]
    table = [line for line in (tmp_path / "page.md").read_text().splitlines() if line.startswith("|")]
    assert [line.count("|") for line in table] == [len(program.COLUMNS) + 1] * 3


def test_completions_do_not_pass_through_the_controller_whatever_their_size(cluster, tmp_path):
    work = Workload(ranks=16, trajectories=256, replicas=4, rollout_workers=4, response_tokens=500, steps=2)
    report = measure(work, tmp_path, 0.0)
    bytes_of_a_group = 8 * 8 * report.tokens_per_trajectory  # token ids and log-probabilities; the rest is compact
    assert 20_000 < bytes_of_a_group < 50_000
    assert report.dispatch_mb < 0.1 * report.sample_mb
    # the run is closed: no thread of it goes on writing in later tests
    assert json.loads((tmp_path / "run" / "heartbeat.json").read_text())["status"] == "ended"


def make_report(**values):
    return ControllerReport(**{each.name: 1 for each in fields(ControllerReport)} | values)


def test_verl_is_compared_by_the_bytes_that_pass_its_controller_and_its_cpu_time(tmp_path):
    work = Workload(ranks=64, trajectories=1024, replicas=8)
    found = [{"cpu_seconds": seconds, "bytes": 2 * 13 * 1024 * 1500} for seconds in (0.3, 0.1, 0.2)]
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho \"$2\" > {tmp_path}/spec\necho '{json.dumps(found)}'\n")
    python.chmod(0o755)
    report = add_verl(make_report(tokens_per_trajectory=1500, sample_mb=40.0), work, python, 2**30)
    spec = json.loads((tmp_path / "spec").read_text())
    assert (spec["ranks"], spec["trajectories_per_replica"], spec["tokens"]) == (64, 128, 1500)
    assert report.peer_dispatch_mb == pytest.approx(39.936)
    assert report.peer_dispatch_cpu_ms_per_mb == pytest.approx(5.0)
    python.write_text("#!/bin/sh\necho no module named verl\nexit 1\n")
    with expect_error(WorkerError, "exit code 1", "no module named verl"):
        add_verl(make_report(), work, python, 2**30)


@pytest.mark.parametrize("arguments", [["--ranks=64", "--ranks", "64", "128"], ["--response-tokens", "10", "20"]])
def test_sizes_need_equally_many_numbers(arguments, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["benchmarks.controller", *arguments])
    with expect_error(SystemExit, "equally", "numbers"):
        program.main()
