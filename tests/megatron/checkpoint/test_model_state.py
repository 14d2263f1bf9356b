"""Checkpoints saved in one layout and loaded in another, compared with the model folder that they were created from."""

import json
import os
import pickle
import resource
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from benchmarks.kernels.measure import peak_allocated_bytes
from megarl.config.trainer import ParallelConfig
from megarl.megatron.checkpoint.checkpoint_files import COMMON_STATE, read_index
from megarl.megatron.command_workers import ConvertWorker
from megarl.model_files import tensor_io
from tests.megatron.checkpoint.test_training_state import error_of
from tests.megatron.conftest import save_model
from tests.megatron.fidelity.models import CONFIGS, OWN_HEAD, TWO_DTYPES, build
from tests.megatron.rank_models import gather, make_model, model_spec
from tests.megatron.ranks import run_ranks, sample
from tests.megatron.test_hf_export import same_bits

ROUND_TRIPS = {
    "qwen2": ({"tp": 2, "pp": 2}, {}),
    "qwen2 linear": ({}, {"tp": 2, "pp": 2}),
    "qwen3": ({"pp": 2, "vpp": 2}, {"tp": 2}),
    "qwen3 yarn": ({"tp": 2}, {"pp": 2, "first_stage_layers": 1}),
    "llama3": ({"tp": 2, "cp": 2}, {"pp": 2}),
    "gemma2": ({"tp": 2}, {"pp": 2, "vpp": 2}),
    "qwen3_moe": ({"ep": 2}, {"tp": 2, "etp": 1, "ep": 2}),
    "qwen3_moe sparse step": ({"tp": 2}, {"pp": 2, "ep": 2}),
    "mixtral": ({"ep": 2, "pp": 2}, {"tp": 2}),
    "deepseek_v3": ({"tp": 2, "ep": 2, "etp": 1, "pp": 2}, {"tp": 2}),
    "deepseek_v3 without query latent": ({"tp": 2}, {"ep": 4}),
    "deepseek_v32": ({"tp": 2, "ep": 2, "etp": 1}, {"pp": 2}),
    "glm_moe_dsa": ({"pp": 2}, {"tp": 2}),
    "gpt_oss": ({"tp": 2}, {"ep": 2, "pp": 2}),
}
"""By model, the layouts in which its checkpoint is saved and loaded."""


def world(sizes):
    return ParallelConfig(**sizes).min_world_size


def save_on_rank(folder, target, sizes, content=None, strategy=None):
    """Save the model; return the error message of every rank, None if there is none."""
    from megarl.megatron.checkpoint import model_state

    model_state.CONTENT_METADATA = model_state.CONTENT_METADATA if content is None else content
    if strategy is not None:
        model_state.StreamingSave = strategy
    return error_of(model_state.save_model, make_model(model_spec(folder, sizes)), target)


def load_on_rank(folder, source, sizes, target=None, dtype="float32"):
    """Load the checkpoint; return, by rank, the error or the names of parameters that differ from those in `folder`."""
    from megarl.megatron import hf_export, local_layout
    from megarl.megatron.checkpoint import model_state

    rank = make_model(model_spec(folder, sizes, weights="none", dtype=dtype))
    for tensor in rank.tensors().values():
        tensor.fill_(torch.nan)
    errors = error_of(model_state.load_model, rank, source)
    if any(errors):
        return errors
    loaded = {name: tensor.clone() for name, tensor in rank.tensors().items()}
    if target is not None:
        hf_export.save(rank, folder, target)
    local_layout.read_weights(folder, rank.layout, rank.tensors())
    return gather([name for name, tensor in rank.tensors().items() if not torch.equal(loaded[name], tensor)])


def save(tmp_path, folder, sizes, content=None):
    target = tmp_path / "checkpoint"
    assert not any(run_ranks(save_on_rank, world(sizes), tmp_path, folder, str(target), sizes, content))
    return target


def load(tmp_path, folder, checkpoint, sizes, *options):
    """Return what `load_on_rank` returns."""
    return run_ranks(load_on_rank, world(sizes), tmp_path, folder, str(checkpoint), sizes, *options)


@pytest.mark.parametrize(
    "name", sample(ROUND_TRIPS, ["qwen2", "gemma2", "qwen3_moe", "deepseek_v3", "deepseek_v32", "gpt_oss"])
)
def test_round_trip_through_two_layouts_is_bitwise_exact(name, model_folder, tmp_path):
    source, (saved, loaded) = model_folder(name), ROUND_TRIPS[name]
    target = tmp_path / "out"
    wrong = load(tmp_path, source, save(tmp_path, source, saved), loaded, str(target))
    assert wrong == [[]] * world(loaded)
    same_bits(target, source)


PADDED = (({}, {"tp": 2}), ({"tp": 2}, {}), ({"tp": 2}, {"pp": 2}))
PADDINGS = [(tied, saved, loaded) for tied in (False, True) for saved, loaded in PADDED]


@pytest.mark.parametrize(("tied", "saved", "loaded"), sample(PADDINGS, [PADDINGS[0], PADDINGS[-1]]), ids=str)
def test_vocabulary_padding_adapts_to_the_layout(tied, saved, loaded, tmp_path):
    source = save_model(tmp_path / "model", vocab_size=300, tie_word_embeddings=tied)
    checkpoint = save(tmp_path, source, saved)
    stored = read_index(checkpoint)["embedding.word_embeddings.weight"]
    assert stored.shape == (384 if saved.get("tp") else 320, 48)
    assert load(tmp_path, source, checkpoint, loaded) == [[]] * world(loaded)


STORED_SHAPES = {
    "embedding.word_embeddings.weight": (384, 48),
    "decoder.layers.1.self_attention.linear_qkv.layer_norm_weight": (48,),
    "decoder.layers.1.self_attention.linear_qkv.weight": (160, 48),
    "decoder.layers.1.self_attention.q_layernorm.weight": (16,),
    "decoder.layers.1.self_attention.k_layernorm.weight": (16,),
    "decoder.layers.1.self_attention.linear_proj.weight": (48, 96),
    "decoder.layers.1.mlp.linear_fc1.layer_norm_weight": (48,),
    "decoder.layers.1.mlp.linear_fc1.weight": (160, 48),
    "decoder.layers.1.mlp.linear_fc2.weight": (48, 80),
    "decoder.final_layernorm.weight": (48,),
    "output_layer.weight": (384, 48),
}


def test_tensors_have_the_names_of_transformer_engine(qwen3_path, tmp_path):
    checkpoint = save(tmp_path, qwen3_path, {"tp": 2})
    index = read_index(checkpoint)
    assert {name: tensor.shape for name, tensor in index.items() if "layers.0." not in name} == STORED_SHAPES
    common = torch.load(checkpoint / "common.pt", weights_only=False)
    assert common["checkpoint_version"] == 3.0
    assert common["iteration"] == 0
    assert common["content_metadata"] == {"singleton_local_shards": False, "non_homogeneous_layers": True}


def test_checkpoint_with_all_layers_in_one_tensor_is_loaded(qwen3_path, tmp_path):
    checkpoint = save(tmp_path, qwen3_path, {"pp": 2}, content={"singleton_local_shards": False})
    index = read_index(checkpoint)
    assert index["decoder.layers.mlp.linear_fc1.weight"].shape == (2, 160, 48)
    assert index["decoder.layers.self_attention.linear_qkv.layer_norm_weight"].shape == (2, 48)
    assert load(tmp_path, qwen3_path, checkpoint, {"tp": 2}) == [[], []]


def save_like_megatron_core(folder, target, sizes):
    """Save the model with megatron-core's own strategy, which writes no common.pt."""
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

    return save_on_rank(folder, target, sizes, {"singleton_local_shards": False}, TorchDistSaveShardedStrategy)


def test_checkpoint_of_megatron_core_without_common_file_is_loaded(qwen3_path, tmp_path):
    checkpoint = tmp_path / "checkpoint"
    run_ranks(save_like_megatron_core, 2, tmp_path, qwen3_path, str(checkpoint), {"tp": 2})
    assert not (checkpoint / "common.pt").exists()
    assert read_index(checkpoint)["decoder.layers.mlp.linear_fc1.weight"].shape == (2, 160, 48)  # as its content says
    assert run_ranks(load_on_rank, 1, tmp_path, qwen3_path, str(checkpoint), {}) == [[]]

    class Harm:
        def __reduce__(self):
            return Path.touch, (tmp_path / "executed",)

    index = pickle.loads((checkpoint / ".metadata").read_bytes())
    (entry,) = (key for key in index.storage_data if key.fqn == COMMON_STATE)
    torch.save([Harm()], checkpoint / "harm.distcp")
    size = (checkpoint / "harm.distcp").stat().st_size
    index.storage_data[entry] = replace(index.storage_data[entry], relative_path="harm.distcp", offset=0, length=size)
    (checkpoint / ".metadata").write_bytes(pickle.dumps(index))
    (error,) = run_ranks(load_on_rank, 1, tmp_path, qwen3_path, str(checkpoint), {})
    assert error.startswith(f"{checkpoint / 'harm.distcp'} cannot be read: ")
    assert not (tmp_path / "executed").exists()


def test_mtp_layers_have_the_names_of_megatron_core(model_folder, tmp_path):
    index = read_index(save(tmp_path, model_folder("deepseek_v3"), {"tp": 2}))
    names = {name.removeprefix("mtp.layers.0.") for name in index if name.startswith("mtp.")}
    inner = {"transformer_layer." + name.split(".", 3)[3] for name in index if name.startswith("decoder.layers.3.")}
    assert names == inner | {"enorm.weight", "hnorm.weight", "eh_proj.weight", "final_layernorm.weight"}
    experts = index["mtp.layers.0.transformer_layer.mlp.experts.experts.linear_fc1.weight"]
    assert experts.shape == (8, 48, 48)


def convert_on_rank(folder, checkpoint, target):
    """Import a model and export it again, as `megarl convert` does."""
    spec = model_spec(folder)
    there = ConvertWorker(spec)
    there.read_hf(folder)
    there.write_checkpoint(checkpoint)
    back = ConvertWorker(replace(spec, model_path=f"{checkpoint}/hf"))
    back.read_checkpoint(f"{checkpoint}/release")
    back.write_hf(target)


def test_a_folder_without_its_mtp_layers_survives_conversion(tmp_path):
    source, target, checkpoint = str(tmp_path / "model"), tmp_path / "out", tmp_path / "checkpoint"
    build(CONFIGS["deepseek_v3"]).save_pretrained(source)
    checkpoint.mkdir()
    run_ranks(convert_on_rank, 1, tmp_path, source, str(checkpoint), str(target))
    assert not any(name.startswith("mtp.") for name in read_index(checkpoint / "release"))
    same_bits(target, source)
    configs = [json.loads((Path(folder) / "config.json").read_text()) for folder in (source, target)]
    assert configs[1] == configs[0] | {"num_nextn_predict_layers": 0}


def test_a_head_of_its_own_survives_conversion(model_folder, tmp_path):
    source, target, checkpoint = model_folder(OWN_HEAD), tmp_path / "out", tmp_path / "checkpoint"
    checkpoint.mkdir()
    run_ranks(convert_on_rank, 1, tmp_path, source, str(checkpoint), str(target))
    assert "output_layer.weight" in read_index(checkpoint / "release")
    same_bits(target, source)
    config = json.loads((Path(source) / "config.json").read_text())
    assert config["tie_word_embeddings"]
    for folder in (checkpoint / "hf", target):
        assert json.loads((folder / "config.json").read_text()) == config | {"tie_word_embeddings": False}
    loaded = AutoModelForCausalLM.from_pretrained(target)
    assert torch.equal(loaded.lm_head.weight, load_file(target / "model.safetensors")["lm_head.weight"])


def test_checkpoint_of_another_model_raises_on_every_rank(qwen3_path, model_folder, tmp_path):
    checkpoint = save(tmp_path, model_folder("qwen2"), {})
    errors = load(tmp_path, qwen3_path, checkpoint, {"pp": 2})
    assert errors[0] == errors[1]
    assert f"{checkpoint} is not a checkpoint of Qwen3ForCausalLM as its config.json describes it: " in errors[0]
    assert "decoder.layers.0.self_attention.k_layernorm.weight is missing" in errors[0]
    assert " more" in errors[0]


def test_checkpoint_with_too_small_vocabulary_raises(tmp_path):
    small, large = (save_model(tmp_path / str(size), vocab_size=size) for size in (100, 300))
    (error,) = load(tmp_path, large, save(tmp_path, small, {}), {})
    assert "embedding.word_embeddings.weight needs at least 300 rows of [48], got [128, 48]" in error


@pytest.mark.parametrize("name", ["deepseek_v3", TWO_DTYPES])
def test_checkpoint_is_loaded_in_another_dtype(name, model_folder, tmp_path):
    source = model_folder(name)
    assert load(tmp_path, source, save(tmp_path, source, {}), {}, None, "bfloat16") == [[]]


@pytest.mark.parametrize(
    ("name", "num_bytes", "message"), [("common.pt", 100, " cannot be read: "), ("__1_0.distcp", -1, " is cut short")]
)
def test_truncated_checkpoint_raises_on_every_rank(name, num_bytes, message, qwen3_path, tmp_path):
    file = save(tmp_path, qwen3_path, {"tp": 2}) / name
    os.truncate(file, num_bytes % file.stat().st_size)
    errors = load(tmp_path, qwen3_path, file.parent, {"tp": 2})
    assert errors[0].startswith(f"{file}{message}")
    assert errors[0] == errors[1]


def save_to_a_full_disk_on_rank(folder, target):
    if os.environ["RANK"] == "1":
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    return save_on_rank(folder, target, {"tp": 2})


def test_error_names_the_rank_that_cannot_write(qwen3_path, tmp_path):
    target = tmp_path / "checkpoint"
    errors = run_ranks(save_to_a_full_disk_on_rank, 2, tmp_path, qwen3_path, str(target))
    assert errors[0].startswith(f"{target}: the checkpoint could not be written, on rank 1: ")
    assert errors[0] == errors[1]
    assert not (target / "metadata.json").exists()


def import_on_rank(folder, target):
    """Import a model; return, by rank, the most that was allocated meanwhile and the size of the weights, in bytes."""
    tensor_io.CHUNK_ELEMENTS = 2**15
    worker = ConvertWorker(model_spec(folder, {"tp": 2, "pp": 2}, dtype="bfloat16"))

    def read_and_write():
        worker.read_hf(folder)
        worker.write_checkpoint(target)

    peak = peak_allocated_bytes(read_and_write)
    return gather((peak, sum(tensor.nbytes for tensor in worker.model.tensors().values())))


def test_import_needs_little_more_memory_than_its_weights(tmp_path):
    source = save_model(tmp_path / "model", hidden_size=256, intermediate_size=512, num_hidden_layers=16)
    (tmp_path / "checkpoint").mkdir()
    for peak, held in run_ranks(import_on_rank, 4, tmp_path, source, str(tmp_path / "checkpoint")):
        assert held > 2**21
        assert 0 < peak < 0.3 * held
