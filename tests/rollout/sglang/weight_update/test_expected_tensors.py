import json

import pytest
import torch
from safetensors.torch import save_file

from megarl.errors import DataError
from megarl.reshard.transfer.bucket import lay_out
from megarl.rollout.sglang.weight_update.expected_tensors import problems, read_manifest


def model_folder(folder, shards, **config):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    for i, tensors in enumerate(shards):
        save_file(tensors, folder / f"model-{i}.safetensors")
    return str(folder)


@pytest.fixture
def manifest(tmp_path):
    shards = [{"a": torch.zeros(2, 3)}, {"b": torch.zeros(4, dtype=torch.bfloat16)}]
    return read_manifest(model_folder(tmp_path / "m", shards))


def found(manifest, tensors, dtype="float32", missing_bytes=0):
    slots, num_bytes = lay_out((name, t.dtype, tuple(t.shape)) for name, t in tensors)
    return problems(slots, num_bytes - missing_bytes, manifest, dtype)


def test_every_shard_is_read(manifest):
    assert {name: (e.shape, e.dtype, e.required) for name, e in manifest.items()} == {
        "a": ((2, 3), "float32", True),
        "b": ((4,), "bfloat16", True),
    }


def test_a_tensor_may_come_in_the_engine_s_dtype_or_the_folder_s(manifest):
    assert found(manifest, [("a", torch.zeros(2, 3)), ("b", torch.zeros(4))]) == []
    assert found(manifest, [("b", torch.zeros(4, dtype=torch.bfloat16))]) == []


def test_every_problem_is_told(manifest):
    tensors = [("c", torch.zeros(1)), ("a", torch.zeros(3, 2)), ("b", torch.zeros(4).double())]
    assert found(manifest, tensors) == [
        "c is no tensor of the model",
        "a needs shape [2, 3], got [3, 2]",
        "b needs dtype float32 or bfloat16, got float64",
    ]


def test_a_tensor_must_come_once_and_lie_in_the_bucket(manifest):
    assert found(manifest, [("a", torch.zeros(2, 3))] * 2) == ["a comes twice"]
    (problem,) = found(manifest, [("b", torch.zeros(4))], missing_bytes=56)
    assert problem == "b ends at byte 0 + 16 = 16, the bucket at 8"


def test_a_tied_head_is_not_waited_for(tmp_path):
    shards = [{"model.embed_tokens.weight": torch.zeros(2, 2), "lm_head.weight": torch.zeros(2, 2)}]
    tied = read_manifest(model_folder(tmp_path / "tied", shards, tie_word_embeddings=True))
    free = read_manifest(model_folder(tmp_path / "free", shards, tie_word_embeddings=False))
    assert not tied["lm_head.weight"].required
    assert free["lm_head.weight"].required


def test_what_prediction_layers_repeat_is_not_waited_for(tmp_path):
    names = ["model.layers.4.embed_tokens.weight", "model.layers.4.shared_head.head.weight"]
    kept = ["model.embed_tokens.weight", "lm_head.weight", "model.layers.4.shared_head.norm.weight"]
    folder = model_folder(tmp_path / "m", [{name: torch.zeros(2, 2) for name in names + kept}])
    assert {name for name, entry in read_manifest(folder).items() if entry.required} == set(kept)


def test_a_folder_without_weights_is_refused(tmp_path):
    with pytest.raises(DataError, match="holds no safetensors files"):
        read_manifest(str(tmp_path))


def test_a_broken_file_is_named(tmp_path):
    folder = model_folder(tmp_path / "m", [])
    (tmp_path / "m" / "model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0notjson!")
    with pytest.raises(
        DataError, match=r"model\.safetensors is not readable as safetensors: its header is not valid JSON"
    ):
        read_manifest(folder)
