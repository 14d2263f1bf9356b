"""Expected tensors of model folders, and problems of buckets."""

import json

import pytest
import torch
from safetensors.torch import save_file

from megarl.errors import DataError
from megarl.reshard.transfer.bucket import lay_out
from megarl.rollout.sglang.weight_update.expected_tensors import find_bucket_problems, read_expected_tensors


def model_folder(folder, shards, **config):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    for i, tensors in enumerate(shards):
        save_file(tensors, folder / f"model-{i}.safetensors")
    return str(folder)


@pytest.fixture
def expected(tmp_path):
    shards = [{"a": torch.zeros(2, 3)}, {"b": torch.zeros(4, dtype=torch.bfloat16)}]
    return read_expected_tensors(model_folder(tmp_path / "m", shards))


def bucket_problems(expected, tensors, dtype="float32", missing_bytes=0):
    slots, num_bytes = lay_out((name, t.dtype, tuple(t.shape)) for name, t in tensors)
    return find_bucket_problems(slots, num_bytes - missing_bytes, expected, dtype)


def test_all_files_are_read(expected):
    assert {name: (e.shape, e.dtype, e.required) for name, e in expected.items()} == {
        "a": ((2, 3), "float32", True),
        "b": ((4,), "bfloat16", True),
    }


def test_tensor_may_have_the_dtype_of_the_engine_or_the_folder(expected):
    assert bucket_problems(expected, [("a", torch.zeros(2, 3)), ("b", torch.zeros(4))]) == []
    assert bucket_problems(expected, [("b", torch.zeros(4, dtype=torch.bfloat16))]) == []


def test_weights_in_fp8_have_to_be_sent_so(tmp_path):
    values = torch.zeros(2, 3).to(torch.float8_e4m3fn)
    expected = read_expected_tensors(model_folder(tmp_path / "q", [{"a": values, "a_scale_inv": torch.ones(1, 1)}]))
    assert bucket_problems(expected, [("a", values), ("a_scale_inv", torch.ones(1, 1))], dtype="bfloat16") == []
    (problem,) = bucket_problems(expected, [("a", torch.zeros(2, 3).bfloat16())], dtype="bfloat16")
    assert problem == "a needs dtype float8_e4m3fn, got bfloat16"


def test_every_problem_is_reported(expected):
    tensors = [("c", torch.zeros(1)), ("a", torch.zeros(3, 2)), ("b", torch.zeros(4).double())]
    assert bucket_problems(expected, tensors) == [
        "c is no tensor of the model",
        "a needs shape [2, 3], got [3, 2]",
        "b needs dtype float32 or bfloat16, got float64",
    ]


def test_tensor_must_be_unique_and_inside_the_bucket(expected):
    assert bucket_problems(expected, [("a", torch.zeros(2, 3))] * 2) == ["a is contained twice"]
    (problem,) = bucket_problems(expected, [("b", torch.zeros(4))], missing_bytes=56)
    assert problem == "b ends at byte 0 + 16 = 16, the bucket at 8"


def test_tied_head_is_not_required(tmp_path):
    shards = [{"model.embed_tokens.weight": torch.zeros(2, 2), "lm_head.weight": torch.zeros(2, 2)}]
    tied = read_expected_tensors(model_folder(tmp_path / "tied", shards, tie_word_embeddings=True))
    free = read_expected_tensors(model_folder(tmp_path / "free", shards, tie_word_embeddings=False))
    assert not tied["lm_head.weight"].required
    assert free["lm_head.weight"].required


def test_duplicates_in_mtp_layers_are_not_required(tmp_path):
    names = ["model.layers.4.embed_tokens.weight", "model.layers.4.shared_head.head.weight"]
    kept = ["model.embed_tokens.weight", "lm_head.weight", "model.layers.4.shared_head.norm.weight"]
    folder = model_folder(tmp_path / "m", [{name: torch.zeros(2, 2) for name in names + kept}])
    assert {name for name, entry in read_expected_tensors(folder).items() if entry.required} == set(kept)


def test_folder_without_weights_raises(tmp_path):
    with pytest.raises(DataError, match="holds no safetensors files"):
        read_expected_tensors(str(tmp_path))


def test_invalid_file_is_reported(tmp_path):
    folder = model_folder(tmp_path / "m", [])
    (tmp_path / "m" / "model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0notjson!")
    with pytest.raises(
        DataError, match=r"model\.safetensors is not readable as safetensors: its header is not valid JSON"
    ):
        read_expected_tensors(folder)
