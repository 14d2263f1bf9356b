"""What benchmarks report of runs: medians, shares, targets, and CPU time by process."""

from __future__ import annotations

import asyncio
import json
import math
import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.async_agents.compare import Comparison
from benchmarks.async_agents.run import ROOT
from benchmarks.async_agents.slow_calculator import SlowCalculator
from benchmarks.end_to_end.compare import compare, require_equal_lengths
from benchmarks.end_to_end.timed_run import TimedRun
from benchmarks.mismatch.families import FAMILIES
from benchmarks.mismatch.recipes import RECIPES
from benchmarks.staleness.demo import read_run
from benchmarks.startup.measure import median_start, package_seconds
from megarl.batch.trajectory import Prompt
from megarl.config import STAGES
from megarl.config.load import make_config, read_tree
from megarl.megatron.families.load_architecture import FAMILY_READERS
from megarl.rollout.environments.environment import Step, Task
from tests.benchmarks.fake_reports import chaos_report, mismatch_report, schedule_report, start, timed_run


def test_chaos_counts_kills_and_recoveries() -> None:
    made = chaos_report(orphans=("process 9 ray::WorkerHost",))
    assert (made.kills, made.recovered, made.orphans, made.restarts) == (3, 2, 1, 1)
    assert (made.by_target, made.by_phase) == ({"engine": 2, "trainer": 1}, {"rollout": 1, "train": 2})
    assert (made.recovery_seconds_p50, made.recovery_seconds_max) == (6.5, 9.0)
    assert made.recovery_seconds_by_target == {"engine": 6.5}
    assert not made.is_clean


def test_startup_has_a_median_of_each_number_and_sums_imports_by_package() -> None:
    found = median_start([start(20.0, data=1.0, slots=5.0), start(30.0, data=3.0, slots=4.0), start(25.0, data=2.0)])
    assert (found.seconds, found.by_kind) == (25.0, {"imports": 24.0, "ray": 1.0})
    assert found.phases == {"data": 2.0, "slots": 4.0}
    lines = ["self [us] | cumulative | imported package", "100 | 100 | torch._C", "1500000 | 1500100 | torch"]
    lines += ["250000 | 1750100 | megarl.batch.pack", "900 | 900 | torch.cuda"]
    assert package_seconds("\n".join(["ready", *(f"import time: {line}" for line in lines)])) == {
        "torch": 1.501,
        "megarl": 0.25,
    }


def test_end_to_end_alternates_runs_and_reports_medians() -> None:
    order: list[str] = []

    def trainer(name: str, seconds: list[float]) -> Callable[[int], TimedRun]:
        return lambda number: (order.append(name), timed_run(seconds[number]))[1]

    ours, theirs = trainer("ours", [1.0, 9.0, 2.0]), trainer("theirs", [3.0, 9.0, 3.0])
    report = compare(ours, theirs, 3, batch_size=64, notify=lambda _: None)
    assert order == ["ours", "theirs", "theirs", "ours", "ours", "theirs"]
    assert (report.megarl_seconds, report.peer_seconds, report.ratio, report.ratios) == (2, 3, 1.5, (1.0, 1.5, 3.0))
    assert (report.phases, report.processor_seconds) == ({"rollout": 1.0}, {"trainer": 0.5})
    assert (report.megarl_length, report.length_distance) == (50.5, 0)


def test_other_lengths_are_an_error() -> None:
    from scipy.stats import ks_2samp

    first, second = np.random.default_rng(0).geometric(1 / 270, (2, 2000))
    assert require_equal_lengths(first, second) == pytest.approx(ks_2samp(first, second).statistic)
    with pytest.raises(ArithmeticError, match=r"completions of different lengths, of mean 2\d\d\.\d and 3\d\d\.\d"):
        require_equal_lengths(first, second * 13 // 10)


def test_asynchronous_agents_have_a_target_for_speed_and_reward() -> None:
    sync = schedule_report("sync", 2.0, 0.9)
    report = schedule_report("async", 0.5, 0.9)
    assert (report.steps, report.steps_per_second, report.held_out, report.mean_staleness) == (10, 2.0, 0.9, 2.0)
    assert (report.waiting_seconds, report.training_seconds, report.sampled) == (0.25, 0.25, pytest.approx(0.8))
    assert (report.own_cpu_seconds, report.other_cpu_seconds) == (0.5, 0.25)
    for seconds, held_out, reaches in [(1.0, 0.91, True), (1.2, 0.91, False), (1.0, 0.94, False), (1.0, 0.86, False)]:
        comparison = Comparison(sync=sync, asynchronous=schedule_report("async", seconds, held_out))
        assert comparison.ratio == pytest.approx(2.0 / seconds)
        assert comparison.reward_difference == pytest.approx(held_out - 0.9)
        assert comparison.reaches_target is reaches


def test_the_slow_calculator_has_log_normal_latencies_of_its_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    sleeps: list[float] = []

    async def sleep(seconds: float) -> None:
        sleeps.append(seconds)

    async def play(seed: int) -> list[Step]:
        environment = SlowCalculator(mean_seconds=0.3, sigma=0.5)
        await environment.reset(replace(task, seed=seed))
        return [await environment.step(reply) for reply in replies]

    monkeypatch.setattr("benchmarks.async_agents.slow_calculator.asyncio.sleep", sleep)
    prompt = Prompt(prompt_id="train.jsonl:0", text="", token_ids=(1,), row={}, answer="6")
    task, replies = Task(prompt=prompt, messages=(), seed=0, shared={}), ("calc(1/0)", "calc(2*3)", "#### 6")
    assert asyncio.run(play(0))[-1].reward == 1.0
    first = sleeps.copy()
    assert len(first) == 2  # an answer has no latency
    for seed in range(1000):
        asyncio.run(play(seed))
    assert sleeps[2:4] == first
    assert statistics.mean(sleeps) == pytest.approx(0.3, abs=0.015)
    assert statistics.stdev(map(math.log, sleeps)) == pytest.approx(0.5, abs=0.03)


def test_mismatch_runs_every_recipe_and_family_and_compares_with_limits() -> None:
    files = [*ROOT.glob("yaml/**/*.yaml"), *ROOT.glob("examples/*/*.yaml")]
    assert sorted(recipe.file for recipe in RECIPES) == sorted(str(file.relative_to(ROOT)) for file in files)
    for recipe in RECIPES:
        tree = read_tree(ROOT / recipe.file)
        algorithm = tree.get("algorithm")
        if not (isinstance(algorithm, dict) and ":" in algorithm["type"]):  # whose module imports Ray
            make_config(STAGES[recipe.command], tree, [f"{key}={value}" for key, value in recipe.overrides.items()])
    architectures = {name.replace("_", "") + "forcausallm" for name in FAMILIES}
    assert architectures == {name.lower() for name in FAMILY_READERS}
    report = mismatch_report("a", kl=[1e-5] * 8 + [3e-5, 3.1e-5])
    assert report.share_of_limit("logprob_kl") == pytest.approx(3 / 4)
    assert mismatch_report("a", kl=[2e-3]).share_of_limit("logprob_kl") == pytest.approx(0.2)


def test_staleness_of_the_demo_has_targets(tmp_path: Path) -> None:
    def write(accuracy: float, ess: float) -> None:
        common = {"loss": 0.1, "time/step_seconds": 1.5}
        rows = [{"step": n, "staleness/mean": 2.0 * n, "staleness/max": n} | common for n in (1, 2)]
        rows = [{"step": 0}, rows[0], rows[1] | {"drift/ess": ess}]
        (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        (tmp_path / "summary.json").write_text(json.dumps({"eval_after": accuracy}))

    write(0.8, 0.9)
    report = read_run(tmp_path, 8, corrected=True)
    assert (report.accuracy, report.mean_staleness, report.worst_staleness) == (0.8, 3.0, 2)
    assert (report.min_ess, report.seconds, report.reaches_target) == (0.9, 3.0, True)
    assert not read_run(tmp_path, 4, corrected=True).reaches_target
    assert read_run(tmp_path, 4, corrected=False).reaches_target
    write(0.9, 0.4)
    assert not read_run(tmp_path, 4, corrected=True).reaches_target
