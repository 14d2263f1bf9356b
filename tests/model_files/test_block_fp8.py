"""Reading weights in FP8: boxes at any offset, against plain loops and transformers' function."""

from __future__ import annotations

import itertools

import pytest
import torch
from safetensors.torch import save_file

from megarl.errors import DataError
from megarl.model_files import reader
from megarl.model_files.block_fp8 import find_config_problem
from megarl.model_files.reader import SafetensorsReader
from megarl.model_files.weight_index import find_tensor_mismatches
from tests.model_files.quantized import QUANTIZATION, dequantize, quantize

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
    monkeypatch.setattr(reader, "CHUNK_ELEMENTS", chunk_elements)
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
    with SafetensorsReader(tmp_path) as folder, pytest.raises(DataError, match=r"needs 2 dimensions, got shape \[3\]"):
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


@pytest.mark.parametrize(
    ("stated", "got"),
    [
        (QUANTIZATION | {"weight_block_size": [1, 32]}, "got weight_block_size [1, 32]"),
        ({"quant_method": "fp8"}, "got weight_block_size None"),
        (QUANTIZATION | {"fmt": "e5m2"}, "got fmt e5m2"),
        ({"quant_method": "awq"}, "got quant_method awq, weight_block_size None"),
        ("fp8", "got quant_method None"),
    ],
)
def test_other_quantizations_are_not_read(stated, got):
    problem = find_config_problem({"quantization_config": stated})
    assert problem.startswith("quantization_config needs quant_method fp8, weight_block_size [128, 128], fmt e4m3, got")
    assert got in problem


def test_published_quantizations_are_read():
    without_format = {key: value for key, value in QUANTIZATION.items() if key != "fmt"}
    for stated in (None, QUANTIZATION, without_format, QUANTIZATION | {"modules_to_not_convert": ["lm_head"]}):
        assert find_config_problem({"quantization_config": stated}) is None
