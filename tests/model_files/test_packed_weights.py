"""Weights of 4 bits: boxes of them against transformers and compressed-tensors, and folders that are refused."""

import itertools

import pytest
import torch
from compressed_tensors.compressors.pack_quantized import PackedQuantizationCompressor, unpack_from_int32
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from safetensors.torch import save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from megarl.errors import DataError
from megarl.model_files import tensor_io
from megarl.model_files.model_config import holds_same_values
from megarl.model_files.tensor_io import SafetensorsReader
from megarl.model_files.weight_index import find_tensor_mismatches, read_headers
from tests.errors import expect_error
from tests.model_files.quantized import pack_int4


def bits(tensor):
    return tensor.contiguous().view(torch.int16 if tensor.dtype.itemsize == 2 else torch.int32)


def mxfp4():
    """Return the parts of experts [2, 160, 6], and the experts as transformers decodes them."""
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (2, 6, 5, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(100, 140, (2, 6, 5), dtype=torch.uint8, generator=generator)
    return {"w_blocks": blocks, "w_scales": scales}, convert_moe_packed_tensors(blocks, scales)


def int4(dtype=torch.bfloat16):
    """Return the parts of a weight [6, 160], and the weight as compressed-tensors decodes it."""
    weight = torch.randn(6, 160, generator=torch.Generator().manual_seed(0)).to(dtype)
    parts = pack_int4(weight)
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(num_bits=4, group_size=32))
    state = {f"weight_{part}": tensor for part, tensor in parts.items()}
    return {f"w_{part}": t for part, t in parts.items()}, PackedQuantizationCompressor.decompress(state, scheme)[
        "weight"
    ]


FORMATS = {"MXFP4": mxfp4, "INT4": int4}


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("chunk_elements", [50, 2**21])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_every_box_has_the_bits_of_the_decoded_weight(tmp_path, monkeypatch, kind, chunk_elements, dtype):
    monkeypatch.setattr(tensor_io, "CHUNK_ELEMENTS", chunk_elements)
    parts, want = FORMATS[kind]()
    for number, name in enumerate(parts):  # published parts of a weight may lie in several files
        save_file({name: parts[name]}, tmp_path / f"model-{number}.safetensors")
    assert find_tensor_mismatches(tmp_path, {"w": tuple(want.shape)}) == []
    spans = {2: [(0, 2), (1, 2)], 6: [(0, 6), (2, 5), (3, 3)], 160: [(0, 160), (0, 64), (31, 33), (70, 159), (5, 11)]}
    with SafetensorsReader(tmp_path) as folder:
        folder.require_shape("w", tuple(want.shape))
        assert list(folder.tensors) == ["w"]
        for box in itertools.product(*(spans[n] for n in want.shape)):
            part = want[tuple(slice(*pair) for pair in box)].to(dtype)
            out = torch.full(part.shape, 7.0, dtype=dtype)
            folder.read("w", box, out, require_finite=True)
            assert torch.equal(bits(out), bits(part)), box
            transposed = torch.zeros(part.mT.shape, dtype=dtype).mT
            folder.read("w", box, transposed)
            assert torch.equal(bits(transposed), bits(part)), box


def test_every_code_and_scale_of_mxfp4_is_that_of_transformers(tmp_path):
    codes = torch.arange(16, dtype=torch.uint8) * 16 + torch.arange(16, dtype=torch.uint8).flip(0)
    blocks, scales = codes.expand(1, 256, 1, 16).contiguous(), torch.arange(256, dtype=torch.uint8).view(1, 256, 1)
    save_file({"w_blocks": blocks, "w_scales": scales}, tmp_path / "model.safetensors")
    want, out = convert_moe_packed_tensors(blocks, scales), torch.zeros(1, 32, 256, dtype=torch.bfloat16)
    box = ((0, 1), (0, 32), (0, 256))
    with SafetensorsReader(tmp_path) as folder:
        folder.read("w", box, out)
        assert torch.equal(bits(out), bits(want))
        with pytest.raises(DataError, match=r"w needs finite values, .* first at index \[0, \d+, 25[345]\]"):
            folder.read("w", box, out, require_finite=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_int4_has_the_dtype_of_its_scales(tmp_path, dtype):
    parts, want = int4(dtype)
    save_file(parts, tmp_path / "model.safetensors")
    out = torch.zeros(6, 160, dtype=dtype)
    with SafetensorsReader(tmp_path) as folder:
        assert folder.tensors["w"].dtype == str(dtype).removeprefix("torch.")
        folder.read("w", ((0, 6), (0, 160)), out)
    assert torch.equal(bits(out), bits(want))


def test_packing_of_the_tests_is_that_of_compressed_tensors():
    parts, want = int4()
    codes = unpack_from_int32(parts["w_packed"], 4, want.shape)
    assert codes.unique().tolist() == list(range(-8, 8))
    assert torch.equal((codes.view(6, 5, 32) * parts["w_scale"].unsqueeze(-1)).view(6, 160), want)


MXFP4, PACKED = mxfp4()[0], int4()[0]


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"w_blocks": MXFP4["w_blocks"]}, r"w_scales needs uint8 \[2, 6, 5\], .* got none"),
        (MXFP4 | {"w_scales": torch.zeros(2, 6, 4, dtype=torch.uint8)}, r"w_scales needs .* got uint8 \[2, 6, 4\]"),
        (MXFP4 | {"w_scales": torch.zeros(2, 6, 5)}, r"w_scales needs uint8 .* got float32 \[2, 6, 5\]"),
        ({"w_blocks": torch.zeros(6, 5, 16, dtype=torch.uint8)}, r"w_blocks needs shape .* got \[6, 5, 16\]"),
        ({"w_blocks": torch.zeros(2, 6, 5, 8, dtype=torch.uint8)}, r"w_blocks needs shape .* got \[2, 6, 5, 8\]"),
        (MXFP4 | {"w": torch.zeros(2)}, "w_blocks and .*: w are the same weight"),
        (PACKED | {"w_scale": torch.ones(6, 1)}, r"w_scale needs bfloat16 or .* \[6, 5\], .* got float32 \[6, 1\]"),
        (PACKED | {"w_packed": torch.ones(6, 19, dtype=torch.int32)}, r"w_packed needs .* of 32, got \[6, 19\]"),
        ({name: PACKED[name] for name in ("w_packed", "w_scale")}, r"w_shape needs int64 or int32 \[2\], .* got none"),
    ],
)
def test_parts_that_do_not_fit_are_reported(tmp_path, parts, message):
    save_file(parts, tmp_path / "model.safetensors")
    with pytest.raises(DataError, match=message):
        SafetensorsReader(tmp_path)
    (problem,) = find_tensor_mismatches(tmp_path, {"w": (2, 160, 6)})
    assert problem.startswith(f"{tmp_path}/model.safetensors: w_")


def test_stated_shape_that_is_another_is_reported(tmp_path):
    save_file(PACKED | {"w_shape": torch.tensor([6, 158])}, tmp_path / "model.safetensors")
    with SafetensorsReader(tmp_path) as folder, expect_error(DataError, "w_shape", "[6", "160]", "158]", "needs"):
        folder.read("w", ((0, 1), (0, 160)), torch.zeros(1, 160))


def test_copy_of_4_bits_is_not_taken_for_its_original(tmp_path):
    parts, want = int4()
    save_file(parts | {"plain": want}, tmp_path / "model.safetensors")
    stored = read_headers(tmp_path)
    assert not holds_same_values(stored["w"], stored["plain"])
    assert not holds_same_values(stored["plain"], stored["w"])
