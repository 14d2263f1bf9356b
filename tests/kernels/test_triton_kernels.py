"""The Triton kernels against the references: on CUDA, and on the CPU in the interpreter (`test_triton_on_cpu.py`)."""

import os

import pytest
import torch

from megarl_kernels import (
    fp8_block_dequantize,
    fp8_block_encode,
    fp8_block_maxima,
    fp8_block_quantize,
    fp8_block_scales,
    linear_logprob_entropy,
    logprob_entropy_,
    segmented_reverse_scan,
)
from megarl_kernels.backend import uses_triton
from tests.kernels.test_fp8_block import random_weight
from tests.kernels.test_logprob_entropy import (
    OPTIONS,
    fused,
    gradients,
    plain_scores,
    random_inputs,
    use_chunks_of,
)
from tests.kernels.test_reverse_scan import loop, random_recurrence

pytestmark = pytest.mark.gpu

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"


@pytest.fixture(autouse=True)
def _triton():
    assert uses_triton(torch.zeros(1, device=DEVICE)), "the kernels would be compared with themselves"


@pytest.fixture
def small_blocks(monkeypatch):
    """Make small sizes take several chunks of columns, and several blocks of each."""
    use_chunks_of(112, monkeypatch)
    monkeypatch.setattr("megarl_kernels.logprob_entropy.BLOCK", 64)


def reference(call, monkeypatch):
    """Return the result of the PyTorch reference on the same device."""
    with monkeypatch.context() as patch:
        patch.setenv("MEGARL_KERNELS", "torch")
        return call()


def check_scores(op, options, size, dtype):
    """Compare results and gradients with log_softmax in float64; the last column is padding if there are several."""
    t, v, h = size
    valid = max(1, v - 1)
    hidden, weight, targets = random_inputs(t, v, h, dtype=dtype)
    targets = targets % valid
    exact = [x.double().requires_grad_() for x in (hidden, weight)]
    tensors = [x.to(DEVICE).requires_grad_() for x in (hidden, weight)]
    if op == "logits":
        # logits as given, so that only the op is compared
        logits = (hidden.float() @ weight.float().t()).to(dtype)
        exact, tensors = [logits.double().requires_grad_()], [logits.to(DEVICE).requires_grad_()]
    want = plain_scores((exact[0] if op == "logits" else exact[0] @ exact[1].t())[:, :valid], targets, **options)
    arguments = {"vocab_start": 0, "valid_columns": valid, **options}
    if op == "logits":
        got = logprob_entropy_(tensors[0] * 1, targets.to(DEVICE), **arguments)
    else:
        got = linear_logprob_entropy(*tensors, targets.to(DEVICE), **arguments)
    torch.testing.assert_close([x.cpu() for x in got], list(want), rtol=1e-5, atol=1e-5, check_dtype=False)
    # gradients are rounded to the dtype; the interpreter cuts bfloat16 off
    bound = 1e-5 if dtype == torch.float32 else 6e-3
    for x, y in zip(gradients(got, tensors), gradients(want, exact), strict=True):
        assert x.dtype == dtype
        assert (x.cpu() - y).norm() <= bound * y.norm() + 1e-6


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("op", ["linear", "logits"])
@pytest.mark.parametrize("options", [OPTIONS[0], OPTIONS[3]], ids=str)
@pytest.mark.parametrize("size", [(1, 1, 1), (33, 150, 40)], ids=["one", "tiles"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_scores_and_gradients(op, options, size, dtype):
    check_scores(op, options, size, dtype)


@pytest.mark.parametrize("op", ["linear", "logits"])
def test_blocks_as_in_production(op):
    check_scores(op, {}, (40, 1100, 72), torch.bfloat16)


def test_linear_adds_to_main_grad():
    hidden, weight, targets = (x.to(DEVICE) for x in random_inputs(9, 31, 8, dtype=torch.bfloat16))
    weight.requires_grad_()
    fused("linear", hidden, weight, targets, vocab_start=0, valid_columns=31)[0].sum().backward()
    want, weight.grad = weight.grad, None
    weight.main_grad = torch.ones_like(weight, dtype=torch.float32)
    fused("linear", hidden, weight, targets, vocab_start=0, valid_columns=31)[0].sum().backward()
    assert weight.grad is None
    torch.testing.assert_close(weight.main_grad - 1, want.float(), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("power_of_two_scales", [False, True])
@pytest.mark.parametrize("shape", [(1, 1), (130, 257)], ids=str)
def test_block_quantization_is_bitwise_that_of_the_reference(shape, power_of_two_scales, monkeypatch):
    weight = random_weight(*shape).to(DEVICE)

    def quantize():
        return fp8_block_quantize(weight, power_of_two_scales=power_of_two_scales)

    values, scales = quantize()
    want_values, want_scales = reference(quantize, monkeypatch)
    assert torch.equal(scales, want_scales)
    assert torch.equal(values.view(torch.uint8), want_values.view(torch.uint8))

    def dequantize():
        return fp8_block_dequantize(values[1:, 3:], scales, row_offset=1, column_offset=3, dtype=torch.float32)

    assert torch.equal(dequantize(), reference(dequantize, monkeypatch))


@pytest.mark.parametrize("box", [(0, 0), (5, 130), (127, 64)], ids=str)
def test_parts_of_fp8_blocks(box, monkeypatch):
    row, column = box
    part = random_weight(300, 400).to(DEVICE)[row:290, column:]
    offsets = {"row_offset": row % 128, "column_offset": column % 128}
    maxima = fp8_block_maxima(part, **offsets)
    assert torch.equal(maxima, reference(lambda: fp8_block_maxima(part, **offsets), monkeypatch))

    def encode():
        out = torch.zeros(part.shape[::-1], dtype=torch.float8_e4m3fn, device=DEVICE).t()
        fp8_block_encode(part, fp8_block_scales(maxima), out, **offsets)
        return out.float()

    assert torch.equal(encode(), reference(encode, monkeypatch))


def test_all_numbers_of_fp8():
    codes = torch.arange(256, dtype=torch.uint8, device=DEVICE)[None]
    numbers = codes.view(torch.float8_e4m3fn)
    got = fp8_block_dequantize(numbers, torch.ones(1, 2, device=DEVICE), dtype=torch.float32)
    torch.testing.assert_close(got, numbers.float(), rtol=0, atol=0, equal_nan=True)


def test_rounding_to_bfloat16(monkeypatch):
    values, scales = fp8_block_quantize(random_weight(5, 300).to(DEVICE))
    got = fp8_block_dequantize(values, scales)
    want = reference(lambda: fp8_block_dequantize(values, scales), monkeypatch)
    # the interpreter cuts off instead of rounding
    steps = (got.view(torch.int16) - want.view(torch.int16)).abs().max()
    assert steps <= (1 if INTERPRETED else 0)


@pytest.mark.parametrize(("t", "block"), [*((t, 16) for t in (0, 1, 15, 16, 17, 300)), (1500, None)])
def test_reverse_scan(t, block, monkeypatch):
    """300 elements in blocks of 16 take three levels; 1,500 fit in one block of the usual size."""
    if block is not None:
        monkeypatch.setattr("megarl_kernels.reverse_scan.BLOCK", block)
    b, a = random_recurrence(t)
    got = segmented_reverse_scan(b.to(DEVICE), a.to(DEVICE))
    torch.testing.assert_close(got.cpu().double(), loop(b, a), rtol=1e-5, atol=1e-5)
