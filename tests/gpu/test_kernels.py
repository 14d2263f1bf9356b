"""Kernels on a GPU: results and roofline at the sizes of a model of 8 billion parameters, and memory."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from benchmarks.kernels import sizes
from benchmarks.kernels.cases import make_cases
from benchmarks.kernels.measure import measure
from benchmarks.kernels.rooflines import find_roofline
from benchmarks.kernels.show import COLUMNS, row
from megarl_kernels import clear_dummy_gradients, linear_logprob_entropy, logprob_entropy_

HEADS = ("linear_logprob_entropy", "logprob_entropy_")
OPS = (*HEADS, "fp8_block_quantize", "fp8_block_dequantize", "segmented_reverse_scan")
TOKENS = 2048
"""Fewer than in the benchmark: the reference computes in float32, without tensor cores."""

HEAD = {"t": 2048, "v": 75_968, "h": 2048}
"""Half of the tokens, the vocabulary and the hidden size of a model of 8 billion parameters."""


def measure_op(op, chosen, device):
    """Return the reports of all implementations of an op, whose results are within the tolerance of its cases."""
    cases = [case for case in make_cases(chosen, device, compiled=False) if case.op.partition(",")[0] == op]
    assert cases, f"no case of {op}"
    return [report for case in cases for report in measure(case, device, find_roofline(device))]


@pytest.mark.gpu
@pytest.mark.parametrize("op", OPS)
def test_results_and_roofline(op, report):
    reports = measure_op(op, replace(sizes.GPU, tokens=TOKENS), "cuda")
    assert any(r.implementation == "megarl (triton)" for r in reports), [r.implementation for r in reports]
    assert all(r.milliseconds for r in reports)
    name = torch.cuda.get_device_name()
    report(f"kernels on {name}", "\n".join(["  ".join(COLUMNS), *("  ".join(row(r)) for r in reports)]))


def test_every_op_has_cases():
    ops = {case.op.partition(",")[0] for case in make_cases(sizes.CPU, "cpu", compiled=False)}
    assert ops == set(OPS)


def head_pass(op, t, v, h, device):
    """Return a function that makes one forward and backward pass of a head; its inputs are allocated."""
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(t, h, generator=g).to(device, torch.bfloat16).requires_grad_()
    weight = (torch.randn(v, h, generator=g) * h**-0.5).to(device, torch.bfloat16).requires_grad_()
    weight.main_grad, weight.grad_added_to_main_grad = torch.zeros(v, h, device=device), False
    targets = torch.randint(v, (t,), generator=g).to(device)

    def run():
        weight.grad = None  # as megatron-core's DDP
        if op == "linear_logprob_entropy":
            logprobs, _ = linear_logprob_entropy(hidden, weight, targets, vocab_start=0, valid_columns=v)
        else:
            logprobs, _ = logprob_entropy_(hidden @ weight.t(), targets, vocab_start=0, valid_columns=v)
        (-logprobs.mean()).backward()

    return run, weight


def planned_bytes(kind):
    """Return what is planned for a head and its weight's gradient that autograd gets."""
    planned = pytest.importorskip(
        "megarl.run.memory.training_memory", reason="needs pydantic: requirements/test-gpu.txt", exc_type=ImportError
    )
    load = planned.TokenLoad(tokens=HEAD["t"], element_bytes=2)
    return planned.logits_bytes(load, HEAD["v"], HEAD["h"], kind, trains=True) + 2 * HEAD["v"] * HEAD["h"]


def measure_head(op):
    """Return the peak of a pass of a head, beside its inputs and `main_grad`."""
    run, _ = head_pass(op, **HEAD, device="cuda")
    run()  # compiles the kernels, and allocates cuBLAS's workspace
    clear_dummy_gradients()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.gpu
def test_memory_of_a_fused_head(report, monkeypatch):
    logits = 4 * HEAD["t"] * HEAD["v"]
    kept = measure_head("linear_logprob_entropy")
    monkeypatch.setattr("megarl_kernels.linear_logprob.KEPT_FRACTION", 0.0)
    chunks = measure_head("linear_logprob_entropy")
    lines = f"linear_logprob_entropy: {chunks / logits:.3f}, with kept logits {kept / logits:.3f}"
    report("memory of a head, relative to float32 logits", lines)
    assert chunks <= 1.02 * planned_bytes("fused")
    assert kept - chunks == pytest.approx(logits, rel=0.2)


@pytest.mark.gpu
def test_memory_of_a_plain_head(report):
    peak = measure_head("logprob_entropy_")
    report("memory of a head, relative to float32 logits", f"logprob_entropy_: {peak / 4 / HEAD['t'] / HEAD['v']:.3f}")
    assert peak <= 1.02 * planned_bytes("plain")


def test_gradient_of_the_weight_is_accumulated_in_float32(device):
    """The sum of several passes in `main_grad` is that of float64 up to the rounding of each pass, not of the sum."""
    run, weight = head_pass("linear_logprob_entropy", 96, 777, 64, device)
    run()
    once = weight.main_grad.clone()
    for _ in range(63):
        run()
    torch.testing.assert_close(weight.main_grad, 64 * once, rtol=1e-4, atol=1e-7)
    assert not torch.equal(weight.main_grad, weight.main_grad.bfloat16().float())


@pytest.mark.gpu
def test_scores_at_a_real_vocabulary_are_those_of_log_softmax():
    """In bfloat16, with padded columns, and targets at both ends of the vocabulary."""
    t, v, valid, h = 512, 152_064, 151_936, 1024
    g = torch.Generator(device="cuda").manual_seed(0)
    normal = partial(torch.randn, generator=g, device="cuda")
    hidden, weight = normal(t, h).bfloat16(), (normal(v, h) * 3 * h**-0.5).bfloat16()
    targets = torch.randint(valid, (t,), generator=g, device="cuda")
    targets[:2] = torch.tensor([0, valid - 1], device="cuda")
    logprobs, entropy = linear_logprob_entropy(hidden, weight, targets, vocab_start=0, valid_columns=valid)
    for rows in torch.arange(t, device="cuda").split(64):
        exact = torch.log_softmax((hidden[rows].double() @ weight[:valid].double().t()), dim=-1)
        want = exact.gather(1, targets[rows][:, None])[:, 0]
        torch.testing.assert_close(logprobs[rows].double(), want, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(entropy[rows].double(), -(exact.exp() * exact).sum(-1), rtol=1e-4, atol=1e-4)
