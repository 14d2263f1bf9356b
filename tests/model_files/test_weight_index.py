"""Tensor names and shapes from safetensors headers and the index, and the errors of malformed files."""

import json
import struct
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file

from megarl.errors import DataError
from megarl.model_files.json_object import read_json_object
from megarl.model_files.weight_index import find_tensor_mismatches, read_headers
from tests.errors import expect_error


def write_shards(folder, index=None):
    save_file({"a": torch.zeros(2, 3), "b": torch.zeros(4, dtype=torch.bfloat16)}, folder / "one.safetensors")
    save_file({"c": torch.zeros(5, dtype=torch.int64)}, folder / "two.safetensors")
    if index is not None:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return folder


def test_all_files_are_read_without_an_index_and_the_listed_ones_with_it(tmp_path):
    tensors = read_headers(write_shards(tmp_path))
    assert {name: (t.file.name, t.shape, t.dtype) for name, t in tensors.items()} == {
        "a": ("one.safetensors", (2, 3), "float32"),
        "b": ("one.safetensors", (4,), "bfloat16"),
        "c": ("two.safetensors", (5,), "int64"),
    }
    save_file({"a": torch.zeros(9)}, tmp_path / "consolidated.safetensors")
    write_shards(tmp_path, {"a": "one.safetensors", "b": "one.safetensors", "c": "two.safetensors"})
    assert read_headers(tmp_path) == tensors


def test_a_tensor_in_two_files_needs_an_index(tmp_path):
    save_file({"a": torch.zeros(9)}, write_shards(tmp_path) / "zero.safetensors")
    with expect_error(DataError, "one.safetensors", "zero.safetensors"):
        read_headers(tmp_path)
    write_shards(tmp_path, {"a": "zero.safetensors", "b": "one.safetensors", "c": "two.safetensors"})
    assert read_headers(tmp_path)["a"].shape == (9,)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ({"a": "three.safetensors"}, "three.safetensors is not readable as safetensors: model.safetensors.index.json"),
        ({"d": "one.safetensors"}, "index.json maps d to one.safetensors, which does not contain it"),
        (["a"], "index.json needs a mapping from tensors to files under weight_map"),
        ({"a": 1}, "index.json needs a mapping from tensors to files under weight_map"),
    ],
)
def test_an_invalid_index(tmp_path, index, message):
    with pytest.raises(DataError, match=message):
        read_headers(write_shards(tmp_path, index))


def test_a_truncated_file_is_reported_with_both_sizes(tmp_path):
    file = tmp_path / "model.safetensors"
    save_file({"a": torch.zeros(100), "b": torch.zeros(100)}, file)
    complete = file.read_bytes()
    size = len(complete)
    for length, message in (
        (size - 500, f"it is truncated, its tensors need {size} bytes, got {size - 500}, 500 less; .* a$"),
        (50, r"it is truncated, its header needs 8 \+ 120 = 128 bytes, got 50$"),
        (5, "its header length needs 8 bytes, got 5$"),
    ):
        file.write_bytes(complete[:length])
        with pytest.raises(DataError, match=f"^{file} is not readable as safetensors: {message}"):
            read_headers(tmp_path)
    file.unlink()
    with expect_error(DataError, f"{tmp_path} ", "safetensors"):
        read_headers(tmp_path)


def make_header(**info):
    return json.dumps({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | info})


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ("notjson", "its header is not valid JSON"),
        ("[]", "its header needs a JSON object, got list"),
        ('{"w": 1}', "tensor w needs dtype, shape and data_offsets, got 1"),
        (make_header(shape=[-2]), "tensor w needs dtype, shape and data_offsets"),
        (make_header(dtype="F3"), "tensor w has the unknown dtype F3; known are F64"),
        (make_header(data_offsets=[0, 4]), r"w needs 8 bytes for F32 \[2\], its data_offsets give 4 - 0 = 4"),
    ],
)
def test_an_invalid_header(tmp_path, header, message):
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header.encode() + bytes(8))
    with pytest.raises(DataError, match=message):
        read_headers(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"<!DOCTYPE html>")
    with expect_error(DataError, "100000000"):
        read_headers(tmp_path)


def test_missing_misshapen_and_unknown_tensors_are_reported(tmp_path):
    held = {"a": torch.zeros(2), "b": torch.zeros(3), "x.rotary_emb.inv_freq": torch.zeros(1)}
    held |= {f"model.layers.{i}.w": torch.zeros(1) for i in range(2, 7)}
    save_file(held, tmp_path / "model.safetensors")
    ignored = ["*.rotary_emb.inv_freq"]
    needed = {name: tuple(t.shape) for name, t in held.items() if not name.startswith("x")}
    assert find_tensor_mismatches(tmp_path, needed, ignored=ignored) == []
    needed = {"a": (2,), "b": (4,), "c": (1,), "d": (1,), "e": (1,), "f": (1,)}
    assert find_tensor_mismatches(tmp_path, needed, model="Qwen3ForCausalLM", ignored=ignored) == [
        f"{tmp_path} lacks 4 of the 6 tensors of Qwen3ForCausalLM, first c, d, e and 1 more",
        f"{tmp_path} holds 1 tensors of another shape than config.json gives them, first b: needs (4,), got (3,)",
        f"{tmp_path} holds 5 tensors that Qwen3ForCausalLM as config.json describes it does not have, first "
        "model.layers.2.w, model.layers.3.w, model.layers.4.w and 2 more",
    ]
    (problem,) = find_tensor_mismatches(tmp_path / "none", needed)
    assert problem == f"{tmp_path / 'none'} holds no safetensors files"


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "cannot be read: No such file"), ("{", "is not valid JSON"), ("[]", "needs a JSON object, got list")],
)
def test_a_file_without_a_json_object(tmp_path, content, message):
    file = tmp_path / "config.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(DataError, match=f"^{file} {message}"):
        read_json_object(file)


def test_reading_headers_does_not_import_torch():
    check = "import sys, megarl.model_files.weight_index; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0
