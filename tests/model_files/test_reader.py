"""Reading boxes of safetensors files: runs and chunks, values, weights in FP8, errors and memory."""

import itertools
import subprocess
import sys
from itertools import chain, pairwise
from math import prod

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from megarl.errors import DataError
from megarl.model_files import tensor_io
from megarl.model_files.file_plan import contiguous_runs, extent, split_box
from megarl.model_files.tensor_io import SafetensorsReader
from megarl.model_files.weight_index import find_tensor_mismatches
from tests.errors import expect_error
from tests.model_files.quantized import dequantize, quantize

CASES = [
    ((), ()),
    ((5,), ((0, 5),)),
    ((5,), ((2, 4),)),
    ((5,), ((3, 3),)),
    ((3, 8), ((1, 3), (2, 6))),
    ((3, 8), ((1, 3), (0, 8))),
    ((3, 8), ((1, 2), (7, 8))),
    ((4, 3, 5), ((1, 3), (0, 3), (0, 5))),
    ((4, 3, 5), ((0, 4), (1, 3), (0, 5))),
    ((4, 3, 5), ((1, 4), (0, 3), (2, 4))),
    ((4, 1, 5), ((1, 4), (0, 1), (2, 4))),
]


@pytest.mark.parametrize(("shape", "box"), CASES)
def test_runs_cover_the_box_with_the_fewest_runs(shape, box):
    elements = np.arange(prod(shape)).reshape(shape)[tuple(slice(*pair) for pair in box)].ravel().tolist()
    got = list(contiguous_runs(shape, box))
    assert [first + i for first, count in got for i in range(count)] == elements
    gaps = sum(after != before + 1 for before, after in pairwise(elements))
    assert len(got) == (gaps + 1 if elements else 0)


@pytest.mark.parametrize(("shape", "box"), CASES)
@pytest.mark.parametrize("limit", [1, 2, 3, 7, 100])
def test_split_boxes_are_in_order_and_within_the_limit(shape, box, limit):
    tensor = np.arange(prod(shape)).reshape(shape)

    def elements(part):
        return tensor[tuple(slice(*pair) for pair in part)].ravel().tolist()

    parts = list(split_box(box, limit))
    assert list(chain.from_iterable(elements(part) for part in parts)) == elements(box)
    assert all(prod(extent(part)) <= limit for part in parts)


DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int32, torch.int8]
SHAPES = [(7,), (6, 10), (4, 3, 5), ()]


def make_tensors(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {str(shape): (100 * torch.randn(shape, generator=generator)).to(dtype) for shape in SHAPES}


def boxes_of(shape):
    spans = [[(0, n), (0, n // 2), (n // 2, n), (1, n - 1)] for n in shape]
    return [tuple(box) for box in itertools.product(*spans)]


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr(tensor_io, "CHUNK_ELEMENTS", 4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.usefixtures("small_chunks")
def test_every_box_equals_what_safetensors_reads(tmp_path, dtype):
    save_file(make_tensors(dtype), tmp_path / "model.safetensors")
    with SafetensorsReader(tmp_path) as folder, safe_open(tmp_path / "model.safetensors", framework="pt") as expected:
        for shape in SHAPES:
            name = str(shape)
            assert (folder.tensors[name].shape, getattr(torch, folder.tensors[name].dtype)) == (shape, dtype)
            for box in boxes_of(shape):
                want = expected.get_tensor(name)[tuple(slice(*pair) for pair in box)]
                out = torch.full(want.shape, 77).to(dtype)
                folder.read(name, box, out)
                assert torch.equal(out, want), (name, box)


@pytest.mark.parametrize("chunk_elements", [4, 2**21])
def test_outputs_of_any_strides_and_another_dtype(tmp_path, monkeypatch, chunk_elements):
    monkeypatch.setattr(tensor_io, "CHUNK_ELEMENTS", chunk_elements)
    tensors = make_tensors(torch.float32)
    save_file(tensors, tmp_path / "model.safetensors")
    want = tensors["(6, 10)"][1:5, 2:9]
    parameter = torch.nn.Parameter(torch.full((9, 12), 7.0))
    with SafetensorsReader(tmp_path) as folder:
        folder.read("(6, 10)", ((1, 5), (2, 9)), parameter[3:7, 4:11])
        transposed = torch.zeros(7, 4, dtype=torch.bfloat16).t()
        folder.read("(6, 10)", ((1, 5), (2, 9)), transposed)
        narrow = torch.zeros(4, 7, dtype=torch.bfloat16)
        folder.read("(6, 10)", ((1, 5), (2, 9)), narrow)
    assert torch.equal(parameter[3:7, 4:11], want)
    assert (parameter == 7.0).sum() == 9 * 12 - 4 * 7
    assert torch.equal(transposed, want.bfloat16())
    assert torch.equal(narrow, want.bfloat16())


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_eight_bit_floats_are_read_raw_or_converted(tmp_path, dtype):
    stored = torch.randn(6, 4).to(dtype)
    save_file({"w": stored}, tmp_path / "model.safetensors")
    raw, wide = torch.zeros(6, 2, dtype=dtype), torch.zeros(6, 2)
    with SafetensorsReader(tmp_path) as folder:
        folder.read("w", ((0, 6), (1, 3)), raw, require_finite=True)
        if dtype == torch.float8_e5m2:  # weights in e4m3 have scales: test_quantization.py
            folder.read("w", ((0, 6), (1, 3)), wide)
            assert torch.equal(wide, stored[:, 1:3].float())
    assert torch.equal(raw.view(torch.uint8), stored[:, 1:3].contiguous().view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e5m2])
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.usefixtures("small_chunks")
def test_nan_and_infinite_values_are_counted(tmp_path, dtype, out_dtype):
    weights = torch.ones(6, 10)
    weights[2, 7], weights[4, 1], weights[5, 9] = float("nan"), float("inf"), float("-inf")
    save_file({"w": weights.to(dtype)}, tmp_path / "model.safetensors")
    with SafetensorsReader(tmp_path) as folder:
        with pytest.raises(DataError) as error:
            folder.read("w", ((1, 6), (1, 9)), torch.zeros(5, 8, dtype=out_dtype), require_finite=True)
        assert str(error.value) == (
            f"{tmp_path}/model.safetensors: w needs finite values, 2 of the 40 read are NaN or infinite, first at "
            "index [2, 7]"
        )
        folder.read("w", ((0, 2), (0, 10)), torch.zeros(2, 10, dtype=out_dtype), require_finite=True)


def test_large_float16_values_are_finite(tmp_path):
    save_file({"w": torch.tensor([60000.0, 60000.0, -60000.0]).half()}, tmp_path / "model.safetensors")
    out = torch.zeros(3)
    with SafetensorsReader(tmp_path) as folder:
        folder.read("w", ((0, 3),), out, require_finite=True)
    assert out.tolist() == [60000.0, 60000.0, -60000.0]


def test_invalid_requests_are_reported(tmp_path):
    save_file({"w": torch.zeros(4, 6), "n": torch.zeros(3, dtype=torch.int8)}, tmp_path / "model.safetensors")
    with SafetensorsReader(tmp_path) as folder:
        with expect_error(DataError, "2", "tensors", "named"):
            folder.read("v", ((0, 1),), torch.zeros(1))
        with expect_error(DataError, "[4", "7]", "6]", "needs", "shape"):
            folder.require_shape("w", (4, 7))
        folder.require_shape("w", (4, 6))
        with expect_error(DataError, "[4", "6]", "((0", "5)", "(0", "6))"):
            folder.read("w", ((0, 5), (0, 6)), torch.zeros(5, 6))
        with expect_error(DataError, "float32", "int8"):
            folder.read("n", ((0, 3),), torch.zeros(3))


def test_a_file_truncated_while_open_is_reported(tmp_path):
    file = tmp_path / "model.safetensors"
    save_file({"w": torch.zeros(100)}, file)
    with SafetensorsReader(tmp_path) as folder:
        file.open("r+b").truncate(file.stat().st_size - 40)
        with expect_error(DataError, "model.safetensors", "400", "360"):
            folder.read("w", ((0, 100),), torch.zeros(100))


MEASURE = """
import re, sys
import torch
from megarl.model_files.tensor_io import SafetensorsReader

def status(key):
    return int(re.search(key + r":\\s+(\\d+) kB", open("/proc/self/status").read())[1]) * 1024

with SafetensorsReader(sys.argv[1]) as folder:
    for dtype in (torch.bfloat16, torch.float32):  # the peak never falls
        warm = torch.zeros(64, 4096, dtype=dtype)
        folder.read("warm", ((0, 64), (0, 4096)), warm, require_finite=True)
        before = status("VmRSS")
        shards = []
        for name in ("rows", "columns"):
            n, m = folder.tensors[name].shape
            box = ((0, n // 2), (0, m)) if name == "rows" else ((0, n), (m // 2, m))
            shards.append(torch.empty(tuple(b - a for a, b in box), dtype=dtype))
            folder.read(name, box, shards[-1], require_finite=True)
        print(status("VmHWM") - before, sum(s.nbytes for s in shards), float(shards[1][-1, -1]))
        del shards
"""


def test_reading_needs_no_memory_beyond_the_shard_and_the_scratch_buffer(tmp_path):
    tensors = {name: torch.rand(2560, 4096) for name in ("rows", "columns")}
    save_file(tensors | {"warm": torch.zeros(64, 4096)}, tmp_path / "model.safetensors")
    scratch, others = tensor_io.CHUNK_ELEMENTS * 4, 8 * 2**20
    assert scratch + others < tensors["rows"].nbytes / 2, "a copy of a tensor would be noticed"
    command = [sys.executable, "-c", MEASURE, str(tmp_path)]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    for dtype, line in zip((torch.bfloat16, torch.float32), lines, strict=True):
        peak, shard, read = line.split()
        assert float(read) == float(tensors["columns"][-1, -1].to(dtype))
        assert int(shard) == 2560 * 4096 * dtype.itemsize
        assert int(peak) < int(shard) + scratch + others


SHAPE = (300, 270)
ROWS = [(0, 300), (0, 128), (5, 260), (128, 300), (255, 257)]
COLUMNS = [(0, 270), (130, 269), (64, 128)]


def quantized(scale_dtype=torch.float32):
    weight = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0))
    weight *= torch.linspace(0.1, 30, SHAPE[0])[:, None]
    values, scales = quantize(weight)
    return {"w": values, "w_scale_inv": scales.to(scale_dtype)}


@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chunk_elements", [1000, 2**21])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_box_equals_plain_loops(tmp_path, monkeypatch, dtype, chunk_elements, scale_dtype):
    monkeypatch.setattr(tensor_io, "CHUNK_ELEMENTS", chunk_elements)
    tensors = quantized(scale_dtype)
    save_file(tensors, tmp_path / "model.safetensors")
    want = dequantize(tensors["w"], tensors["w_scale_inv"], dtype)
    with SafetensorsReader(tmp_path) as folder:
        folder.require_shape("w", SHAPE)
        for box in itertools.product(ROWS, COLUMNS):
            part = want[tuple(slice(*pair) for pair in box)]
            out = torch.zeros(part.shape, dtype=dtype)
            folder.read("w", box, out, require_finite=True)
            assert torch.equal(out, part), box
            transposed = torch.zeros(part.shape[::-1], dtype=dtype).t()
            folder.read("w", box, transposed)
            assert torch.equal(transposed, part), box


def test_plain_loops_equal_transformers():
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    values, scales = quantize(torch.randn(256, 384))
    want = Fp8Dequantize(None)._dequantize_one(values, scales, torch.bfloat16)
    assert torch.equal(dequantize(values, scales, torch.bfloat16), want)


def test_values_are_read_raw_into_fp8(tmp_path):
    tensors = quantized()
    save_file(tensors, tmp_path / "model.safetensors")
    out = torch.zeros(10, 270, dtype=torch.float8_e4m3fn)
    with SafetensorsReader(tmp_path) as folder:
        folder.read("w", ((5, 15), (0, 270)), out)
    assert torch.equal(out.view(torch.uint8), tensors["w"][5:15].view(torch.uint8))


@pytest.mark.parametrize(
    ("scales", "message"),
    [
        (None, "w is float8_e4m3fn, and its scales w_scale_inv are missing"),
        (torch.ones(2, 3), r"w_scale_inv needs shape \[3, 3\], .* 128 x 128 of \[300, 270\], got \[2, 3\]"),
        (torch.full((3, 3), torch.inf), "w_scale_inv needs finite values, 6 of the 6 read are NaN or infinite"),
    ],
)
def test_scales_that_do_not_fit_are_reported(tmp_path, scales, message):
    tensors = quantized() | {"w_scale_inv": scales}
    save_file({name: t for name, t in tensors.items() if t is not None}, tmp_path / "model.safetensors")
    with SafetensorsReader(tmp_path) as folder, pytest.raises(DataError, match=message):
        folder.read("w", ((0, 200), (0, 270)), torch.zeros(200, 270), require_finite=True)


def test_vectors_in_fp8_are_reported(tmp_path):
    save_file({"w": torch.zeros(3).to(torch.float8_e4m3fn)}, tmp_path / "model.safetensors")
    with SafetensorsReader(tmp_path) as folder, expect_error(DataError, "2", "[3]", "dimensions", "needs"):
        folder.read("w", ((0, 3),), torch.zeros(3))


def test_folder_check_knows_scales(tmp_path):
    tensors = quantized() | {"v": torch.zeros(2, 2)}
    save_file(tensors, tmp_path / "model.safetensors")
    needed = {"w": SHAPE, "v": (2, 2)}
    assert find_tensor_mismatches(tmp_path, needed) == []
    save_file(tensors | {"v_scale_inv": torch.zeros(1, 1)}, tmp_path / "model.safetensors")
    (problem,) = find_tensor_mismatches(tmp_path, needed)
    assert "holds 1 tensors that the model as config.json describes it does not have, first v_scale_inv" in problem
    del tensors["w_scale_inv"]
    save_file(tensors | {"u": tensors["w"].clone()}, tmp_path / "model.safetensors")
    (problem,) = find_tensor_mismatches(tmp_path, needed | {"u": SHAPE})
    assert problem.endswith("its scales u_scale_inv are missing; 1 more weights likewise")
