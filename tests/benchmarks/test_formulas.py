"""What benchmarks compute: loops, packing schemes, counted bytes, simulated schedules, and a small policy."""

from __future__ import annotations

import os
from dataclasses import replace

import numpy as np
import pytest
import torch

from benchmarks.gae.loops import gae_over_lists, gae_over_positions, gae_over_tensors, pad, unpad
from benchmarks.gae.measure import GAMMA
from benchmarks.gae.workload import KernelWorkload, make_kernel_workloads
from benchmarks.kernels import rooflines
from benchmarks.kernels.cases import Case as KernelCase
from benchmarks.kernels.measure import count_bytes
from benchmarks.kernels.measure import measure as measure_kernel
from benchmarks.packing.karmarkar_karp import partition, partition_equally
from benchmarks.packing.lengths import PackingWorkload
from benchmarks.packing.measure import PackingReport, measure
from benchmarks.packing.schemes import OURS
from benchmarks.schedule.cases import Case
from benchmarks.schedule.event_cost import event_microseconds
from benchmarks.schedule.simulate import simulate
from benchmarks.schedule.workload import TAILS, Tail, Workload
from benchmarks.staleness.toy import CORRECTIONS, MAX_UNCORRECTED, MIN_CORRECTED, Toy, ToyProblem, final_reward
from megarl.batch.balance import SequenceCost
from megarl.functional import gae
from megarl.schedule.policy import SchedulePolicy


@pytest.mark.parametrize("workload", list(make_kernel_workloads(5000, 1)), ids=lambda workload: workload.name)
def test_the_advantages_of_the_kernel_are_those_of_the_loops(workload: KernelWorkload) -> None:
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


def test_measurements_of_packing_match_counts_by_hand() -> None:
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


def test_largest_differencing() -> None:
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


def test_bytes_are_those_of_inputs_and_outputs_of_each_operation() -> None:
    a, b = torch.zeros(10, 4), torch.zeros(10, 4)
    assert count_bytes(lambda: a + b) == count_bytes(lambda: a.add_(b)) == 3 * 160
    assert count_bytes(lambda: a.t()[:2]) == count_bytes(lambda: torch.empty(10)) == 0
    assert count_bytes(lambda: (a + b).sum(0)) == 3 * 160 + 160 + 16


def test_results_of_an_op_that_differ_are_an_error() -> None:
    functions = {"megarl": lambda: (torch.ones(3),), "torch": lambda: (torch.full((3,), 1.1),)}
    case = KernelCase(op="op", workload="", implementations=functions, min_bytes=1, flops=0, tolerance=0.05)
    with pytest.raises(ArithmeticError, match=r"op, megarl: results differ from torch's by 9\.1e-02 of the largest"):
        list(measure_kernel(case, "cpu", None))
    assert "MEGARL_KERNELS" not in os.environ, "left set, it would turn off the kernels of later tests"


def test_the_roofline_is_the_slower_of_memory_and_compute() -> None:
    h100 = rooflines.Roofline(3.35e12, 0.989e15)
    assert h100.seconds(3_350_000_000, 0) == h100.seconds(1, 989_000_000_000) == pytest.approx(1e-3)


def test_a_correction_makes_up_for_staleness() -> None:
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


def test_samples_of_equal_length_take_what_a_pipeline_takes() -> None:
    """All slots busy: generation takes 1, and so does training; a push takes 0.02."""
    constant = Workload(tail=Tail(sigma=1e-6, longest=2, slots=0.5), num_steps=20)
    sync, ahead = Case(policy=SchedulePolicy()), Case(policy=SchedulePolicy(lookahead=2, max_staleness=2))
    assert simulate(sync, constant).report("", "").step_over_bound == pytest.approx(2.02, abs=1e-3)
    assert simulate(sync, constant).report("", "").mean_staleness == 0
    assert simulate(ahead, constant).report("", "").step_over_bound == pytest.approx(1.02, abs=1e-3)
    slow = simulate(sync, replace(constant, train_seconds=3.0)).report("", "")
    assert slow.step_over_bound == pytest.approx(4.02 / 3, abs=1e-3)


@pytest.mark.parametrize("tail", TAILS.values(), ids=TAILS)
def test_lengths_have_mean_1_and_are_cut(tail: Tail) -> None:
    lengths = tail.lengths(50_000, 8, seed=1)
    assert lengths.mean() == pytest.approx(1, abs=0.01)
    assert lengths.max() == pytest.approx(tail.longest, rel=0.15)
    assert float((lengths == lengths.max()).mean()) < 0.02
    assert np.log(lengths[lengths < lengths.max()]).std() == pytest.approx(tail.sigma, rel=0.05)


@pytest.mark.parametrize("in_order", [False, True])
def test_an_event_takes_little_longer_with_many_open_groups(in_order: bool) -> None:
    few, many = (min(event_microseconds(n, 2, in_order=in_order) for _ in range(3)) for n in (250, 10_000))
    assert many < 8 * few  # 40 times if it took linear time
