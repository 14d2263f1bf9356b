"""The benchmark of stale samples: its targets on the small policy, and its reports."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.staleness.__main__ import main
from benchmarks.staleness.demo import DemoReport, read_run
from benchmarks.staleness.show import TOY_COLUMNS
from benchmarks.staleness.toy import CORRECTIONS, MAX_UNCORRECTED, MIN_CORRECTED, Toy, ToyProblem, final_reward

SEEDS = range(2)
FIELDS = "correction staleness reward reward_min over_fresh"


def mean_reward(correction: str, staleness: int) -> float:
    return sum(final_reward(Toy(), CORRECTIONS[correction], staleness, seed) for seed in SEEDS) / len(SEEDS)


def test_a_correction_makes_up_for_staleness() -> None:
    fresh = mean_reward("none", 0)
    assert fresh > 0.85
    assert mean_reward("token_tis", 8) >= MIN_CORRECTED * fresh
    assert mean_reward("none", 8) <= MAX_UNCORRECTED * fresh


def test_without_staleness_a_correction_changes_nothing() -> None:
    toy = Toy(num_steps=20)
    rewards = [final_reward(toy, algorithm, 0, seed=0) for algorithm in CORRECTIONS.values()]
    assert rewards == pytest.approx([rewards[0]] * len(rewards), abs=1e-6)


def test_expected_reward_is_the_share_of_right_tokens() -> None:
    toy = Toy(num_prompts=2, length=2, num_weights=3)
    problem = ToyProblem.draw(toy, torch.Generator().manual_seed(0))
    assert problem.expected_reward(torch.zeros(3)) == pytest.approx(1 / toy.vocabulary)
    assert problem.is_right_PLV.sum(-1).eq(1).all()


def run(monkeypatch: pytest.MonkeyPatch, *args: object) -> int:
    monkeypatch.setattr(sys, "argv", ["benchmarks.staleness", *map(str, args)])
    return main()


def test_json_and_file(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "staleness.md"
    small = ("--seeds=1", "--steps=20", "--staleness", 0, 1)
    assert run(monkeypatch, "--toy", "--json", *small, "--write", file) in (0, 1)
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(line["correction"], line["staleness"]) for line in found] == [(c, n) for c in CORRECTIONS for n in (0, 1)]
    assert all(list(line) == FIELDS.split() for line in found)
    assert next(line for line in file.read_text().splitlines() if line.startswith("|")) == (
        "| " + " | ".join(TOY_COLUMNS) + " |"
    )


@pytest.mark.parametrize(("name", "value", "least"), [("seeds", 0, 1), ("steps", 0, 1), ("staleness", -1, 0)])
def test_invalid_arguments_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str, value: int, least: int
) -> None:
    assert run(monkeypatch, f"--{name}={value}") == 2
    assert f"--{name} needs at least {least}, got {value}" in capsys.readouterr().err


def write_run(folder: Path, accuracy: float, ess: float) -> Path:
    rows = [
        {"step": step, "loss": 0.1, "staleness/mean": 2.0 * step, "staleness/max": step, "time/step_seconds": 1.5}
        | ({"drift/ess": ess} if step > 1 else {})
        for step in (1, 2)
    ]
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in [{"step": 0}, *rows]))
    (folder / "summary.json").write_text(json.dumps({"eval_after": accuracy}))
    return folder


def test_report_of_a_run(tmp_path: Path) -> None:
    report = read_run(write_run(tmp_path, 0.8, 0.9), 8, corrected=True)
    assert report == DemoReport(
        max_staleness=8,
        corrected=True,
        accuracy=0.8,
        mean_staleness=3.0,
        worst_staleness=2,
        min_ess=0.9,
        seconds=3.0,
    )
    assert report.reaches_target
    assert not read_run(tmp_path, 4, corrected=True).reaches_target
    assert read_run(tmp_path, 4, corrected=False).reaches_target
    assert not read_run(write_run(tmp_path, 0.9, 0.4), 4, corrected=True).reaches_target
