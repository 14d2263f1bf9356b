"""The benchmark of agents that wait for a tool: its latencies, what its two runs have in common, and its report."""

from __future__ import annotations

import asyncio
import json
import math
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from benchmarks.async_agents import __main__ as program
from benchmarks.async_agents.compare import Comparison
from benchmarks.async_agents.run import ROOT, ScheduleReport, Setup, read_report
from benchmarks.async_agents.slow_calculator import SlowCalculator
from megarl.batch.trajectory import Prompt
from megarl.config import RunConfig, load_config
from megarl.rollout.environments.calculator import Calculator
from megarl.rollout.environments.environment import Step, Task

PROMPT = Prompt(prompt_id="train.jsonl:0", text="", token_ids=(1,), row={}, answer="6")
REPLIES = ("calc(1/0)", "calc(2*3)", "#### 6")


@pytest.fixture
def sleeps(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    found: list[float] = []

    async def sleep(seconds: float) -> None:
        found.append(seconds)

    monkeypatch.setattr("benchmarks.async_agents.slow_calculator.asyncio.sleep", sleep)
    return found


def play(seed: int, *, sigma: float = 1.0) -> list[Step]:
    async def run() -> list[Step]:
        environment = SlowCalculator(mean_seconds=0.3, sigma=sigma)
        await environment.reset(Task(prompt=PROMPT, messages=(), seed=seed, shared={}))
        steps = [await environment.step(reply) for reply in REPLIES]
        await environment.close()
        return steps

    return asyncio.run(run())


def test_it_answers_as_the_calculator_does(sleeps: list[float]) -> None:
    calculator = Calculator()
    calculator.reset(Task(prompt=PROMPT, messages=(), seed=0, shared={}))
    assert play(0) == [calculator.step(reply) for reply in REPLIES]
    assert len(sleeps) == 2  # an answer has no latency


def test_latencies_are_log_normal_and_those_of_the_seed(sleeps: list[float]) -> None:
    for seed in range(1000):
        play(seed, sigma=0.5)
    logarithms = statistics.NormalDist.from_samples([math.log(seconds) for seconds in sleeps])
    assert statistics.mean(sleeps) == pytest.approx(0.3, abs=0.015)
    assert logarithms.stdev == pytest.approx(0.5, abs=0.03)
    first, sleeps[:] = sleeps[:2], []
    play(0, sigma=0.5)
    assert sleeps == first


def differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> set[str]:
    return {key for key in one.keys() | other.keys() if one.get(key) != other.get(key)}


def test_the_runs_differ_in_their_schedule_and_its_correction() -> None:
    configs = [
        load_config(
            RunConfig,
            ROOT / "yaml/agents/calculator.yaml",
            [f"{key}={value}" for key, value in Setup(seed=3).overrides(schedule).items()],
        ).model_dump()
        for schedule in ("sync", "async")
    ]
    assert differing(*configs) == {"schedule", "algorithm"}
    assert differing(*(config["algorithm"] for config in configs)) == {"rollout_is"}  # a default of the schedule
    assert [config["schedule"]["type"] for config in configs] == ["sync", "async"]
    assert (configs[0]["seed"], configs[0]["rollout"]["env"]["kwargs"]) == (3, {"mean_seconds": 0.3, "sigma": 1.0})


def make_report(schedule: str, step_seconds: float, held_out: float) -> ScheduleReport:
    steps = [
        {
            "step": step,
            "time/step_seconds": step_seconds,
            "time/rollout_seconds": step_seconds / 2,
            "time/train_seconds": 0.25,
            "reward/mean": step / 10,
        }
        | ({"staleness/mean": 2.0} if schedule == "async" else {})
        for step in range(1, 11)
    ]
    rows = [{"step": 0, "eval/game": 0.0}, *steps, {"step": 10, "eval/game": held_out}]
    return read_report(schedule, rows, held_out=held_out, own={"trainer": 0.3, "scheduler": 0.2}, machine=0.75)


def test_report_of_a_run() -> None:
    assert make_report("async", 0.5, 0.9) == ScheduleReport(
        schedule="async",
        steps=10,
        steps_per_second=2.0,
        held_out=0.9,
        sampled=pytest.approx(0.8),
        mean_staleness=2.0,
        waiting_seconds=0.25,
        training_seconds=0.25,
        own_cpu_seconds=0.5,
        other_cpu_seconds=0.25,
    )


@pytest.mark.parametrize(
    ("seconds", "held_out", "reaches"), [(1.0, 0.91, True), (1.2, 0.91, False), (1.0, 0.94, False), (1.0, 0.86, False)]
)
def test_targets(seconds: float, held_out: float, reaches: bool) -> None:
    comparison = Comparison(sync=make_report("sync", 2.0, 0.9), asynchronous=make_report("async", seconds, held_out))
    assert comparison.ratio == pytest.approx(2.0 / seconds)
    assert comparison.reward_difference == pytest.approx(held_out - 0.9)
    assert comparison.reaches_target is reaches


def test_json_and_file(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    ran: list[tuple[str, Setup]] = []

    def run_schedule(folder: Path, schedule: str, setup: Setup) -> ScheduleReport:
        ran.append((schedule, setup))
        return make_report(schedule, 2.0 if schedule == "sync" else 1.0, 0.9)

    monkeypatch.setattr(program, "prepare_model", lambda folder, notify: None)
    monkeypatch.setattr(program, "run_schedule", run_schedule)
    file = tmp_path / "async-agents.md"
    assert program.main(["--json", "--folder", str(tmp_path), "--steps", "10", "--write", str(file)]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["ratio"], report["reward_difference"], report["steps"]) == (2.0, 0.0, 10)
    assert [run["schedule"] for run in report["runs"]] == ["sync", "async"] == [schedule for schedule, _ in ran]
    assert {setup for _, setup in ran} == {Setup(steps=10)}
    assert "ones: 2.00 (target: at least 1.8)" in file.read_text()
    monkeypatch.setattr(program, "run_schedule", lambda folder, schedule, setup: make_report(schedule, 1.0, 0.9))
    assert program.main(["--folder", str(tmp_path)]) == 1
    assert "steps/s" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "value", "least"), [("steps", 0, "at least 1"), ("latency-seconds", 0, "to be above 0")]
)
def test_invalid_arguments_are_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str, value: int, least: str
) -> None:
    assert program.main([f"--{name}={value}", "--folder", str(tmp_path)]) == 2
    assert f"--{name} needs {least}, got {value}" in capsys.readouterr().err
