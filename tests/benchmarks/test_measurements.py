"""What benchmarks compute (loops, packing, bytes, schedules, a small policy) and report (medians, targets, times)."""

import asyncio
import json
import math
import os
import statistics
from dataclasses import replace

import numpy as np
import pytest
import torch

from benchmarks.async_agents.compare import Comparison
from benchmarks.async_agents.run import ROOT
from benchmarks.async_agents.slow_calculator import SlowCalculator
from benchmarks.end_to_end.compare import compare, require_equal_lengths
from benchmarks.gae.loops import gae_over_lists, gae_over_positions, gae_over_tensors, pad, unpad
from benchmarks.gae.measure import GAMMA
from benchmarks.gae.workload import make_kernel_workloads
from benchmarks.kernels import rooflines
from benchmarks.kernels.cases import Case as KernelCase
from benchmarks.kernels.measure import count_bytes
from benchmarks.kernels.measure import measure as measure_kernel
from benchmarks.mismatch.families import FAMILIES
from benchmarks.mismatch.recipes import RECIPES
from benchmarks.packing.karmarkar_karp import partition, partition_equally
from benchmarks.packing.lengths import PackingWorkload
from benchmarks.packing.measure import PackingReport, measure
from benchmarks.packing.schemes import OURS
from benchmarks.schedule.cases import Case
from benchmarks.schedule.simulate import simulate
from benchmarks.schedule.workload import TAILS, Tail, Workload
from benchmarks.staleness.demo import read_run
from benchmarks.staleness.toy import CORRECTIONS, MAX_UNCORRECTED, MIN_CORRECTED, Toy, ToyProblem, final_reward
from benchmarks.startup.measure import median_start, package_seconds
from megarl.batch.balance import SequenceCost
from megarl.batch.trajectory import Prompt
from megarl.config import STAGES
from megarl.config.load import make_config, read_tree
from megarl.functional import gae
from megarl.megatron.families.load_architecture import FAMILY_READERS
from megarl.rollout.environments.environment import Task
from megarl.run.schedule.settings import SchedulePolicy
from tests.benchmarks.fake_reports import chaos_report, mismatch_report, schedule_report, start, timed_run
from tests.errors import expect_error


@pytest.mark.parametrize("workload", list(make_kernel_workloads(5000, 1)), ids=lambda workload: workload.name)
def test_the_advantages_of_the_kernel_are_those_of_the_loops(workload):
    *tokens, bounds = args = (workload.rewards_T, workload.values_T, workload.mask_T, workload.cu_seqlens_S)
    options = {"gamma": GAMMA, "lam": workload.lam}
    padded = gae_over_positions(*(pad(x, bounds) for x in tokens), **options)
    of_tensors, of_lists = gae_over_tensors(*args, **options), gae_over_lists(*args, **options)
    for loop in (of_tensors, of_lists, [unpad(x, bounds) for x in padded]):
        for got, want in zip(gae(*args, **options), loop, strict=True):
            assert torch.allclose(got, want, rtol=1e-4, atol=1e-4)
            assert want.any()


def pack(workload: PackingWorkload, scheme: str, align: int = 1) -> PackingReport:
    linear = SequenceCost(matmul_parameters=1, attention_layers=0, attention_width=0)
    return measure(scheme, workload, model="linear", cost=linear, ranks=2, align=align, seed=0)


def test_measurements_of_packing_match_counts_by_hand():
    four = PackingWorkload(name="four", max_tokens=16, lengths_N=np.array([9, 3, 1, 5]))
    padded, fit = (pack(four, scheme, align=2) for scheme in ("padded", "first_fit"))
    # rows of 10 tokens, one to a micro-batch, whose 10 tokens become 16: two micro-batches on each rank
    assert (padded.micro_batches, padded.micro_batches_bound) == (2, 1)
    assert (padded.padding_percent, padded.step_cost) == (pytest.approx(100 * (64 - 18) / 64), pytest.approx(64 / 18))
    # aligned 10, 4, 2, 6: [10, 4, 2] fills one pack, [6] becomes 8
    assert (fit.micro_batches, fit.fullest_percent) == (1, 100)
    assert fit.padding_percent == pytest.approx(100 * (24 - 18) / 24)
    assert fit.fill_percent == pytest.approx(100 * 18 / 32)
    assert (fit.cost_max_over_mean, fit.step_cost) == (pytest.approx(16 / 12), pytest.approx(16 * 2 / 18))
    one = PackingWorkload(name="one", max_tokens=16, lengths_N=np.array([16]))
    idle = pack(one, OURS)  # the idle rank computes a pack of padding
    assert (idle.padding_percent, idle.fullest_percent) == (pytest.approx(100 * 8 / 24), 0)


def test_largest_differencing():
    # for 4 5 6 7 8 the algorithm gives 14 | 16, although 15 | 15 is possible
    sizes = [4, 5, 6, 7, 8]
    assert sorted(sum(sizes[i] for i in part) for part in partition(sizes, 2)) == [14, 16]
    assert sorted(map(sorted, partition([1, 1, 1, 9], 2))) == [[0, 1, 2], [3]]
    equal = partition_equally([1, 1, 1, 9], 2)
    assert ([len(part) for part in equal], sorted(i for part in equal for i in part)) == ([2, 2], [0, 1, 2, 3])
    many = np.random.default_rng(0).integers(1, 1000, 200).tolist()
    for parts in (partition(many, 7), partition_equally(many, 8)):
        totals = [sum(many[i] for i in part) for part in parts]
        assert max(totals) - min(totals) <= 0.01 * max(totals)


def test_bytes_are_those_of_inputs_and_outputs_of_each_operation():
    a, b = torch.zeros(10, 4), torch.zeros(10, 4)
    assert count_bytes(lambda: a + b) == count_bytes(lambda: a.add_(b)) == 3 * 160
    assert count_bytes(lambda: a.t()[:2]) == count_bytes(lambda: torch.empty(10)) == 0
    assert count_bytes(lambda: (a + b).sum(0)) == 3 * 160 + 160 + 16


def test_results_of_an_op_that_differ_are_an_error():
    functions = {"megarl": lambda: (torch.ones(3),), "torch": lambda: (torch.full((3,), 1.1),)}
    case = KernelCase(op="op", workload="", implementations=functions, min_bytes=1, flops=0, tolerance=0.05)
    with expect_error(ArithmeticError, "torch's", "9.1e-02"):
        list(measure_kernel(case, "cpu", None))
    assert "MEGARL_KERNELS" not in os.environ, "left set, it would turn off the kernels of later tests"


def test_the_roofline_is_the_slower_of_memory_and_compute():
    h100 = rooflines.Roofline(3.35e12, 0.989e15)
    assert h100.seconds(3_350_000_000, 0) == h100.seconds(1, 989_000_000_000) == pytest.approx(1e-3)


def test_a_correction_makes_up_for_staleness():
    fresh, corrected, uncorrected = (
        sum(final_reward(Toy(), CORRECTIONS[name], staleness, seed) for seed in range(2)) / 2
        for name, staleness in (("none", 0), ("token_tis", 8), ("none", 8))
    )
    assert fresh > 0.85
    assert corrected >= MIN_CORRECTED * fresh
    assert uncorrected <= MAX_UNCORRECTED * fresh
    rewards = [final_reward(Toy(num_steps=20), algorithm, 0, seed=0) for algorithm in CORRECTIONS.values()]
    assert rewards == pytest.approx([rewards[0]] * len(rewards), abs=1e-6)  # nothing to correct
    problem = ToyProblem.draw(Toy(num_prompts=2, length=2, num_weights=3), torch.Generator().manual_seed(0))
    assert problem.expected_reward(torch.zeros(3)) == pytest.approx(1 / Toy().vocabulary)


def test_samples_of_equal_length_take_what_a_pipeline_takes():
    """All slots busy: generation takes 1, and so does training; a push takes 0.02."""
    constant = Workload(tail=Tail(sigma=1e-6, longest=2, slots=0.5), num_steps=20)
    sync, ahead = Case(policy=SchedulePolicy()), Case(policy=SchedulePolicy(lookahead=2, max_staleness=2))
    assert simulate(sync, constant).report("", "").step_over_bound == pytest.approx(2.02, abs=1e-3)
    assert simulate(sync, constant).report("", "").mean_staleness == 0
    assert simulate(ahead, constant).report("", "").step_over_bound == pytest.approx(1.02, abs=1e-3)
    slow = simulate(sync, replace(constant, train_seconds=3.0)).report("", "")
    assert slow.step_over_bound == pytest.approx(4.02 / 3, abs=1e-3)


@pytest.mark.parametrize("tail", TAILS.values(), ids=TAILS)
def test_lengths_have_mean_1_and_are_cut(tail):
    lengths = tail.lengths(50_000, 8, seed=1)
    assert lengths.mean() == pytest.approx(1, abs=0.01)
    assert lengths.max() == pytest.approx(tail.longest, rel=0.15)
    assert float((lengths == lengths.max()).mean()) < 0.02
    assert np.log(lengths[lengths < lengths.max()]).std() == pytest.approx(tail.sigma, rel=0.05)


@pytest.mark.parametrize("train_seconds", [0.75, 1.5])
def test_an_adapted_lookahead_changes_samples_only_where_training_is_slower(train_seconds):
    policy = SchedulePolicy(lookahead=3, max_staleness=8)
    workload = Workload(tail=TAILS["heavy"], num_steps=60, train_seconds=train_seconds)
    fixed = simulate(Case(policy=policy), workload).report("", "")
    adapted = simulate(Case(policy=replace(policy, adapt_lookahead=True)), workload).report("", "")
    assert adapted.step_over_bound <= 1.02 * fixed.step_over_bound
    fresher = fixed.mean_staleness - adapted.mean_staleness
    assert fresher == 0 if train_seconds < 1 else fresher > 0.4


def test_chaos_counts_kills_and_recoveries():
    made = chaos_report(orphans=("process 9 ray::WorkerHost",))
    assert (made.kills, made.recovered, made.orphans, made.restarts) == (3, 2, 1, 1)
    assert (made.by_target, made.by_phase) == ({"engine": 2, "trainer": 1}, {"rollout": 1, "train": 2})
    assert (made.recovery_seconds_p50, made.recovery_seconds_max) == (6.5, 9.0)
    assert made.recovery_seconds_by_target == {"engine": 6.5}
    assert not made.is_clean


def test_startup_has_a_median_of_each_number_and_sums_imports_by_package():
    found = median_start([start(20.0, data=1.0, slots=5.0), start(30.0, data=3.0, slots=4.0), start(25.0, data=2.0)])
    assert (found.seconds, found.by_kind) == (25.0, {"imports": 24.0, "ray": 1.0})
    assert found.phases == {"data": 2.0, "slots": 4.0}
    lines = ["self [us] | cumulative | imported package", "100 | 100 | torch._C", "1500000 | 1500100 | torch"]
    lines += ["250000 | 1750100 | megarl.batch.pack", "900 | 900 | torch.cuda"]
    assert package_seconds("\n".join(["ready", *(f"import time: {line}" for line in lines)])) == {
        "torch": 1.501,
        "megarl": 0.25,
    }


def test_end_to_end_alternates_runs_and_reports_medians():
    order: list[str] = []

    def trainer(name, seconds):
        return lambda number: (order.append(name), timed_run(seconds[number]))[1]

    ours, theirs = trainer("ours", [1.0, 9.0, 2.0]), trainer("theirs", [3.0, 9.0, 3.0])
    report = compare(ours, theirs, 3, batch_size=64, notify=lambda _: None)
    assert order == ["ours", "theirs", "theirs", "ours", "ours", "theirs"]
    assert (report.megarl_seconds, report.peer_seconds, report.ratio, report.ratios) == (2, 3, 1.5, (1.0, 1.5, 3.0))
    assert (report.phases, report.processor_seconds) == ({"rollout": 1.0}, {"trainer": 0.5})
    assert (report.megarl_length, report.length_distance) == (50.5, 0)


def test_other_lengths_are_an_error():
    from scipy.stats import ks_2samp

    first, second = np.random.default_rng(0).geometric(1 / 270, (2, 2000))
    assert require_equal_lengths(first, second) == pytest.approx(ks_2samp(first, second).statistic)
    with expect_error(ArithmeticError, "2", "3", "completions", "different"):
        require_equal_lengths(first, second * 13 // 10)


def test_asynchronous_agents_have_a_target_for_speed_and_reward():
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


def test_the_slow_calculator_has_log_normal_latencies_of_its_seed(monkeypatch):
    sleeps: list[float] = []

    async def sleep(seconds):
        sleeps.append(seconds)

    async def play(seed):
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


def test_mismatch_runs_every_recipe_and_family_and_compares_with_limits():
    files = [*ROOT.glob("yaml/**/*.yaml"), *ROOT.glob("examples/*/*.yaml")]
    assert sorted(recipe.file for recipe in RECIPES) == sorted(str(file.relative_to(ROOT)) for file in files)
    for recipe in RECIPES:
        tree = read_tree(ROOT / recipe.file)
        algorithm = tree.get("algorithm")
        if not (isinstance(algorithm, dict) and ":" in algorithm["type"]):  # whose module imports Ray
            make_config(STAGES[recipe.command], tree, [f"{key}={value}" for key, value in recipe.overrides.items()])
    architectures = {name.replace("_", "") + "forcausallm" for name in FAMILIES}
    on_cuda_only = {"MiniMaxM2", "Qwen3Next", "Qwen3_5", "Qwen3_5Moe", "GptOss", "DeepseekV32", "GlmMoeDsa"}
    as_another = {"Glm4MoeLite", "MiMo"}  # with the layers of DeepSeek-V3 and Qwen2
    without = {f"{name}ForCausalLM" for name in on_cuda_only | as_another}
    assert architectures == {name.lower() for name in FAMILY_READERS if name not in without}
    report = mismatch_report("a", kl=[1e-5] * 8 + [3e-5, 3.1e-5])
    assert report.share_of_limit("logprob_kl") == pytest.approx(3 / 4)
    assert mismatch_report("a", kl=[2e-3]).share_of_limit("logprob_kl") == pytest.approx(0.2)


def test_staleness_of_the_demo_has_targets(tmp_path):
    def write(accuracy, ess):
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
