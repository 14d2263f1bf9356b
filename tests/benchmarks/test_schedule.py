"""The benchmark of schedules: its targets, its accounts against closed forms, and its report."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.schedule.__main__ import main
from benchmarks.schedule.accounts import Report
from benchmarks.schedule.cases import CASES, Case
from benchmarks.schedule.event_cost import event_microseconds
from benchmarks.schedule.show import COLUMNS
from benchmarks.schedule.simulate import simulate
from benchmarks.schedule.workload import TAILS, Tail, Workload
from megarl.schedule.policy import SchedulePolicy

FIELDS = (
    "tail schedule steps step_over_bound worst_staleness mean_staleness mean_group_staleness wasted_fraction "
    "masked_fraction group_steps_mean group_steps_max length_ratio open_groups"
)
STEPS = 200
MAX_STEP = 1.05
MAX_EVENT_US = 50
CONSTANT = Tail(sigma=1e-6, longest=2, slots=0.5)
"""Samples of equal length."""


def report(tail: str, schedule: str, num_steps: int = STEPS) -> Report:
    return simulate(CASES[schedule], Workload(tail=TAILS[tail], num_steps=num_steps)).report(tail, schedule)


def is_nothing_lost(found: Report) -> bool:
    return found.wasted_fraction == 0 and abs(found.length_ratio - 1) <= 0.002


@pytest.mark.parametrize("schedule", ["wait, L 3 eta 8", "wait, L 4 eta 4"])
def test_moderate_tail_without_waste(schedule: str) -> None:
    found = report("moderate", schedule)
    assert found.step_over_bound <= MAX_STEP
    assert found.worst_staleness <= CASES[schedule].policy.max_staleness
    assert is_nothing_lost(found)
    assert found.masked_fraction == 0
    assert found.open_groups <= (CASES[schedule].policy.lookahead + 1) * 32


def test_heavy_tail_with_masks() -> None:
    found = report("heavy", "mask, L 4 eta 4")
    assert found.step_over_bound <= MAX_STEP
    assert found.worst_staleness <= 4
    assert 0.02 < found.masked_fraction <= 0.08
    assert is_nothing_lost(found)


def test_baselines() -> None:
    assert report("moderate", "sync").step_over_bound >= 3
    assert report("moderate", "sync").worst_staleness == 0
    assert report("heavy", "count gate, L 4").worst_staleness > 8
    drop = report("heavy", "drop, L 4 eta 4")
    assert drop.worst_staleness <= 4
    assert drop.wasted_fraction > 0.05
    assert drop.length_ratio < 0.98


@pytest.mark.parametrize("tail", ["moderate", "heavy"])
def test_an_adapted_lookahead_makes_samples_younger_where_training_is_slower(tail: str) -> None:
    workload = Workload(tail=TAILS[tail], num_steps=STEPS, train_seconds=1.5)
    fixed, adapted = (
        simulate(CASES[schedule], workload).report(tail, schedule)
        for schedule in ("wait, L 3 eta 8", "wait, L 3 eta 8, adapts")
    )
    assert adapted.mean_staleness <= 0.9 * fixed.mean_staleness
    assert adapted.step_over_bound <= fixed.step_over_bound + 0.01
    assert is_nothing_lost(adapted)


def test_samples_of_equal_length_take_what_a_pipeline_takes() -> None:
    """All slots busy: generation takes 1, and so does training; a push takes 0.02."""
    workload = Workload(tail=CONSTANT, num_steps=20)
    sync = simulate(Case(policy=SchedulePolicy()), workload).report("", "")
    assert sync.step_over_bound == pytest.approx(2.02, abs=1e-3)
    assert sync.mean_staleness == 0
    ahead = simulate(Case(policy=SchedulePolicy(lookahead=2, max_staleness=2)), workload).report("", "")
    assert ahead.step_over_bound == pytest.approx(1.02, abs=1e-3)
    slow = Workload(tail=CONSTANT, num_steps=20, train_seconds=3.0)
    assert simulate(Case(policy=SchedulePolicy()), slow).report("", "").step_over_bound == pytest.approx(
        4.02 / 3, abs=1e-3
    )


@pytest.mark.parametrize("tail", list(TAILS.values()))
def test_lengths_have_mean_1_and_are_cut(tail: Tail) -> None:
    lengths = tail.lengths(50_000, 8, seed=1)
    assert lengths.mean() == pytest.approx(1, abs=0.01)
    assert lengths.max() == pytest.approx(tail.longest, rel=0.15)
    assert float((lengths == lengths.max()).mean()) < 0.02
    assert np.log(lengths[lengths < lengths.max()]).std() == pytest.approx(tail.sigma, rel=0.05)


@pytest.mark.parametrize("in_order", [False, True])
def test_events_are_cheap_with_10000_open_groups(in_order: bool) -> None:
    assert min(event_microseconds(10_000, 2, in_order=in_order) for _ in range(3)) <= MAX_EVENT_US


def run(monkeypatch: pytest.MonkeyPatch, *args: object) -> int:
    monkeypatch.setattr(sys, "argv", ["benchmarks.schedule", *map(str, args)])
    return main()


def test_json_has_stable_fields(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, "--simulate", "--json", "--steps=20") == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(line["tail"], line["schedule"]) for line in found] == [(tail, name) for tail in TAILS for name in CASES]
    assert all(list(line) == FIELDS.split() for line in found)
    assert run(monkeypatch, "--events", "--json") == 0
    assert json.loads(capsys.readouterr().out)["by_deadline_event_us"] <= MAX_EVENT_US


def test_table_and_file(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "schedule.md"
    assert run(monkeypatch, "--tails", "moderate", "--schedules", "sync", "--steps=10", "--write", file) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2
    text = file.read_text()
    assert "python -m benchmarks.schedule --tails moderate --schedules sync --steps=10" in text
    assert next(line for line in text.splitlines() if line.startswith("|")) == "| " + " | ".join(COLUMNS) + " |"


@pytest.mark.parametrize("name", ["steps", "groups-per-step", "group-size"])
def test_invalid_arguments_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    assert run(monkeypatch, f"--{name}=0") == 2
    assert f"--{name} needs at least 1, got 0" in capsys.readouterr().err
