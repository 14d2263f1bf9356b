"""Block quantization: against SGLang's functions, all 256 numbers, and boxes against the whole weight."""

import ast
import importlib.util
import re
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megarl_kernels import (
    fp8_block_dequantize,
    fp8_block_encode,
    fp8_block_maxima,
    fp8_block_quantize,
    fp8_block_scales,
)


@pytest.fixture(scope="module")
def sglang_functions():
    """Compile some functions of SGLang's file, whose package takes seconds to import."""
    spec = importlib.util.find_spec("sglang")
    if spec is None:
        pytest.skip("needs SGLang's sources")
    file = Path(spec.submodule_search_locations[0]) / "srt/layers/quantization/fp8_utils.py"
    names = {"per_block_cast_to_fp8", "ceil_to_ue8m0", "ceil_align", "block_quant_dequant"}
    nodes = [n for n in ast.parse(file.read_text()).body if isinstance(n, ast.FunctionDef) and n.name in names]
    found = {"torch": torch, "Tuple": tuple, "List": list, "ceil_align": lambda x, y: -(-x // y) * y}
    exec(compile(ast.Module(nodes, []), str(file), "exec"), found)
    return found


def random_weight(n, k, dtype=torch.bfloat16, seed=0):
    """Return a weight whose blocks differ in scale; one is 0."""
    g = torch.Generator().manual_seed(seed)
    weight = torch.randn(n, k, generator=g) * torch.exp(2 * torch.randn(n, k, generator=g))
    weight[:128, :100] = 0.0
    return weight.to(dtype)


SHAPES = [(1, 1), (128, 128), (130, 257), (5, 300)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_and_scales_follow_the_formula(shape):
    weight = random_weight(*shape)
    values, scales = fp8_block_quantize(weight)
    assert values.dtype == torch.float8_e4m3fn
    assert values.is_contiguous()
    for row in range(scales.shape[0]):
        for column in range(scales.shape[1]):
            box = slice(row * 128, row * 128 + 128), slice(column * 128, column * 128 + 128)
            largest = max(weight[box].float().abs().max(), torch.tensor(1e-4))
            assert scales[row, column] == largest / 448
            want = (weight[box].float() / scales[row, column]).to(torch.float8_e4m3fn)
            assert torch.equal(values[box].float(), want.float())
    back = fp8_block_dequantize(values, scales, dtype=torch.float32)
    bound = weight.float().abs() / 16 + scales.max() * 2**-10
    assert ((back - weight.float()).abs() <= bound).all()


PRODUCTS = {torch.ops.aten.div.Tensor: torch.mul, torch.ops.aten.div_.Tensor: torch.Tensor.mul_}


class DivisionOnCuda(TorchDispatchMode):
    """Divides by a number as torch does on CUDA: multiplies by its reciprocal, so that the result is rounded twice."""

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        if function in PRODUCTS and not isinstance(arguments[1], torch.Tensor):
            return PRODUCTS[function](arguments[0], torch.tensor(arguments[1], dtype=torch.float32).reciprocal())
        return function(*arguments, **(keywords or {}))


@pytest.mark.parametrize("power_of_two_scales", [False, True])
def test_scales_do_not_depend_on_how_a_device_divides_by_numbers(power_of_two_scales):
    weight = random_weight(1000, 900)
    want = fp8_block_quantize(weight, power_of_two_scales=power_of_two_scales)
    with DivisionOnCuda():
        assert not torch.equal(weight.float() / 448, weight.float().div(torch.tensor(448.0)))
        got = fp8_block_quantize(weight, power_of_two_scales=power_of_two_scales)
    assert torch.equal(got[1], want[1])
    assert torch.equal(got[0].view(torch.uint8), want[0].view(torch.uint8))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_power_of_two_scales_are_those_of_sglang(shape, sglang_functions):
    weight = random_weight(*shape)
    values, scales = fp8_block_quantize(weight, power_of_two_scales=True)
    want_values, want_scales = sglang_functions["per_block_cast_to_fp8"](weight)
    assert torch.equal(scales, want_scales)
    assert torch.equal(values.view(torch.uint8), want_values.view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_dequantized_weights_are_those_of_sglang(shape, dtype, sglang_functions):
    values, scales = fp8_block_quantize(random_weight(*shape))
    want = sglang_functions["block_quant_dequant"](values, scales, [128, 128], dtype)
    assert torch.equal(fp8_block_dequantize(values, scales, dtype=dtype), want)


def test_box_has_the_values_and_scales_of_the_whole_weight():
    weight = random_weight(300, 400)
    values, scales = fp8_block_quantize(weight)
    offsets = {"row_offset": 128, "column_offset": 256}
    box_values, box_scales = fp8_block_quantize(weight[128:300, 256:384], **offsets, full_shape=(300, 400))
    assert torch.equal(box_values.float(), values[128:300, 256:384].float())
    assert torch.equal(box_scales, scales[1:3, 2:3])


def test_any_box_is_dequantized_with_the_scales_around_it():
    values, scales = fp8_block_quantize(random_weight(300, 400))
    whole = fp8_block_dequantize(values, scales)
    box = slice(5, 260), slice(130, 399)
    assert torch.equal(fp8_block_dequantize(values[box], scales, row_offset=5, column_offset=130), whole[box])
    got = fp8_block_dequantize(values[box], scales[:, 1:], row_offset=5, column_offset=2)
    assert torch.equal(got, whole[box])


@pytest.mark.parametrize("cut", [(0, 0), (5, 300), (128, 130), (64, 200)], ids=str)
def test_parts_of_blocks_are_quantized_as_the_whole_weight(cut):
    weight = random_weight(300, 400)
    values, scales = fp8_block_quantize(weight)
    row, column = cut
    maxima = torch.zeros_like(scales)
    boxes = [(r, c) for r in (slice(0, row), slice(row, 300)) for c in (slice(0, column), slice(column, 400))]
    parts = []
    for rows, columns in (box for box in boxes if weight[box].numel()):
        blocks = slice(rows.start // 128, -(-rows.stop // 128)), slice(columns.start // 128, -(-columns.stop // 128))
        offsets = {"row_offset": rows.start % 128, "column_offset": columns.start % 128}
        found = fp8_block_maxima(weight[rows, columns], **offsets)
        maxima[blocks] = torch.maximum(maxima[blocks], found)
        parts.append(((rows, columns), blocks, offsets))
    together = fp8_block_scales(maxima)
    assert torch.equal(together, scales)
    for box, blocks, offsets in parts:
        out = torch.zeros(weight[box].shape[::-1], dtype=torch.float8_e4m3fn).t()
        fp8_block_encode(weight[box], together[blocks].contiguous(), out, **offsets)
        assert torch.equal(out.float(), values[box].float())


WEIGHT, SCALES = torch.zeros(10, 10), torch.ones(1, 1)
QUANTIZED = fp8_block_quantize(random_weight(130, 257))
FP8 = "need to be torch.float8_e4m3fn, got torch.uint8"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: fp8_block_maxima(WEIGHT, row_offset=128), "offsets need to be from 0 to 127, got 128 and 0"),
        (lambda: fp8_block_encode(WEIGHT, SCALES, WEIGHT.to(torch.float8_e4m3fn), row_offset=120), "[2, 1] scales"),
        (lambda: fp8_block_encode(WEIGHT, SCALES, WEIGHT), "torch.float8_e4m3fn [10, 10], got torch.float32"),
        (lambda: fp8_block_quantize(torch.zeros(128, 128), row_offset=64), "rows 64 to 192 of 192 cut a block of 128"),
        (lambda: fp8_block_quantize(torch.zeros(128, 100), full_shape=(128, 256)), "columns 0 to 100 of 256 cut a"),
        (lambda: fp8_block_dequantize(QUANTIZED[0], QUANTIZED[1][:1]), "the box needs [2, 3] scales, got [1, 3]"),
        (lambda: fp8_block_dequantize(*QUANTIZED, column_offset=128), "the box needs [2, 4] scales, got [2, 3]"),
        (lambda: fp8_block_dequantize(QUANTIZED[0].view(torch.uint8), QUANTIZED[1]), FP8),
        (lambda: fp8_block_dequantize(*QUANTIZED, row_offset=-1), "offsets need to be at least 0, got -1 and 0"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(call, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        call()
