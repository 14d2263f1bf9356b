"""Checkpoints saved in one layout and loaded in another, compared with the model folder that they were created from."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from megarl.config.trainer import ParallelConfig
from megarl.errors import DataError
from megarl.megatron.checkpoint.checkpoint_files import read_index
from megarl.megatron.requests import ModelSpec
from tests.megatron.conftest import save_model
from tests.megatron.fidelity.models import CONFIGS, build
from tests.megatron.ranks import run_ranks

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
}
"""By model, the layouts in which its checkpoint is saved and loaded."""


def make_rank(folder, sizes, *, weights="hf", dtype="float32"):
    from megarl.megatron.modeling.megatron_model import MegatronModel

    return MegatronModel(ModelSpec(model_path=folder, dtype=dtype, parallel=ParallelConfig(**sizes), weights=weights))


def gather_and_finish(value):
    """Gather `value` of every rank and end the process group."""
    every = [value] * dist.get_world_size()
    dist.all_gather_object(every, value)
    dist.destroy_process_group()
    return every


def world(sizes):
    return ParallelConfig(**sizes).min_world_size


def save_on_rank(folder, target, sizes, content=None):
    """Save the model; return the error message of every rank, None if there is none."""
    from megarl.megatron.checkpoint import model_state

    model_state.CONTENT_METADATA = model_state.CONTENT_METADATA if content is None else content
    rank = make_rank(folder, sizes)
    try:
        model_state.save_model(rank, target)
    except DataError as e:
        return gather_and_finish(str(e))
    return gather_and_finish(None)


def load_on_rank(folder, source, sizes, target=None, dtype="float32"):
    """Load the checkpoint; return, by rank, the error or the names of parameters that differ from those in `folder`."""
    from megarl.megatron.checkpoint import model_state
    from megarl.megatron.hf_weights import export, local_layout

    rank = make_rank(folder, sizes, weights="none", dtype=dtype)
    for tensor in rank.tensors().values():
        tensor.fill_(torch.nan)
    try:
        model_state.load_model(rank, source)
    except DataError as e:
        return gather_and_finish(str(e))
    loaded = {name: tensor.clone() for name, tensor in rank.tensors().items()}
    if target is not None:
        export.save(rank, folder, target)
    local_layout.read_weights(folder, rank.layout, rank.tensors())
    return gather_and_finish([name for name, tensor in rank.tensors().items() if not torch.equal(loaded[name], tensor)])


def save(tmp_path, folder, sizes, **options):
    target = tmp_path / "checkpoint"
    assert not any(run_ranks(save_on_rank, world(sizes), tmp_path, folder, str(target), sizes, *options.values()))
    return target


def same_bits(folder, source):
    got, want = (load_file(Path(each) / "model.safetensors") for each in (folder, source))
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        assert got[name].dtype == tensor.dtype
        assert torch.equal(got[name].view(torch.uint8), tensor.view(torch.uint8)), name


@pytest.mark.parametrize("name", ROUND_TRIPS)
def test_round_trip_through_two_layouts_is_bitwise_exact(name, model_folder, tmp_path):
    source, (saved, loaded) = model_folder(name), ROUND_TRIPS[name]
    checkpoint, target = save(tmp_path, source, saved), tmp_path / "out"
    wrong = run_ranks(load_on_rank, world(loaded), tmp_path, source, str(checkpoint), loaded, str(target))
    assert wrong == [[]] * world(loaded)
    same_bits(target, source)


@pytest.mark.parametrize(("saved", "loaded"), [({}, {"tp": 2}), ({"tp": 2}, {}), ({"tp": 2}, {"pp": 2})])
@pytest.mark.parametrize("tied", [False, True])
def test_vocabulary_padding_adapts_to_the_layout(tied, saved, loaded, tmp_path):
    source = save_model(tmp_path / "model", vocab_size=300, tie_word_embeddings=tied)
    checkpoint = save(tmp_path, source, saved)
    stored = read_index(checkpoint)["embedding.word_embeddings.weight"]
    assert stored.shape == (384 if saved.get("tp") else 320, 48)
    wrong = run_ranks(load_on_rank, world(loaded), tmp_path, source, str(checkpoint), loaded)
    assert wrong == [[]] * world(loaded)


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
    assert run_ranks(load_on_rank, 2, tmp_path, qwen3_path, str(checkpoint), {"tp": 2}) == [[], []]


def compare_shard_tensor_on_rank(folder, sizes):
    """By rank, the parameters that `shard_tensor` describes differently from megatron-core's modules."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import apply_factories

    from megarl.megatron.checkpoint.model_state import (
        CONTENT_METADATA,
        _drop_extra_state,
        shard_tensor,
        sharded_state_dict,
    )

    rank = make_rank(folder, sizes)
    state = sharded_state_dict(rank, CONTENT_METADATA)
    apply_factories(state)
    _drop_extra_state(state)
    from_modules = {_describe(sharded) for sharded in nested_values(state)}
    from_function = {
        _describe(sharded)
        for name, tensor in rank.tensors().items()
        for sharded in shard_tensor(rank, name, rank.architecture.parameter_map(name), tensor)
    }
    return gather_and_finish(sorted(from_modules ^ from_function))


def _describe(sharded):
    where = (tuple(sharded.global_shape), tuple(sharded.global_offset), tuple(sharded.axis_fragmentations))
    return sharded.key, where, sharded.data.data_ptr(), tuple(sharded.data.shape), tuple(sharded.replica_id)


@pytest.mark.parametrize("sizes", [{"tp": 2, "ep": 2, "etp": 1}, {"tp": 2}, {"ep": 2, "pp": 2}])
def test_shard_tensor_matches_the_modules(sizes, model_folder, tmp_path):
    differences = run_ranks(compare_shard_tensor_on_rank, world(sizes), tmp_path, model_folder("deepseek_v3"), sizes)
    assert differences == [[]] * world(sizes)


def test_mtp_layers_have_the_names_of_megatron_core(model_folder, tmp_path):
    index = read_index(save(tmp_path, model_folder("deepseek_v3"), {"tp": 2}))
    names = {name.removeprefix("mtp.layers.0.") for name in index if name.startswith("mtp.")}
    inner = {"transformer_layer." + name.split(".", 3)[3] for name in index if name.startswith("decoder.layers.3.")}
    assert names == inner | {"enorm.weight", "hnorm.weight", "eh_proj.weight", "final_layernorm.weight"}
    experts = index["mtp.layers.0.transformer_layer.mlp.experts.experts.linear_fc1.weight"]
    assert experts.shape == (8, 48, 48)


def test_a_folder_without_its_mtp_layers_survives_checkpoint_and_export(tmp_path):
    source, target = str(tmp_path / "model"), tmp_path / "out"
    build(CONFIGS["deepseek_v3"]).save_pretrained(source)
    checkpoint = save(tmp_path, source, {"tp": 2})
    assert not any(name.startswith("mtp.") for name in read_index(checkpoint))
    wrong = run_ranks(load_on_rank, 2, tmp_path, source, str(checkpoint), {"pp": 2}, str(target))
    assert wrong == [[], []]
    same_bits(target, source)
    configs = [json.loads((Path(folder) / "config.json").read_text()) for folder in (source, target)]
    assert configs[1] == configs[0] | {"num_nextn_predict_layers": 0}


def convert_on_rank(folder, checkpoint, target):
    """Import a model and export it again, as `megarl convert` does."""
    from megarl.megatron.convert_worker import ConvertWorker

    spec = ModelSpec(model_path=folder, dtype="float32", parallel=ParallelConfig())
    there = ConvertWorker(spec)
    there.read_hf(folder)
    there.write_checkpoint(checkpoint)
    back = ConvertWorker(replace(spec, model_path=f"{checkpoint}/hf"))
    back.read_checkpoint(f"{checkpoint}/release")
    back.write_hf(target)
    return gather_and_finish(None)


def test_a_folder_without_its_mtp_layers_survives_conversion(tmp_path):
    source, target, checkpoint = str(tmp_path / "model"), tmp_path / "out", tmp_path / "checkpoint"
    build(CONFIGS["deepseek_v3"]).save_pretrained(source)
    checkpoint.mkdir()
    run_ranks(convert_on_rank, 1, tmp_path, source, str(checkpoint), str(target))
    same_bits(target, source)


def test_checkpoint_of_another_model_raises_on_every_rank(qwen3_path, qwen2_tied_path, tmp_path):
    checkpoint = save(tmp_path, qwen2_tied_path, {})
    errors = run_ranks(load_on_rank, 2, tmp_path, qwen3_path, str(checkpoint), {"pp": 2})
    assert errors[0] == errors[1]
    assert f"{checkpoint} is not a checkpoint of Qwen3ForCausalLM as its config.json describes it: " in errors[0]
    assert "decoder.layers.0.self_attention.k_layernorm.weight is missing" in errors[0]
    assert " more" in errors[0]


def test_checkpoint_with_too_small_vocabulary_raises(tmp_path):
    small, large = (save_model(tmp_path / str(size), vocab_size=size) for size in (100, 300))
    checkpoint = save(tmp_path, small, {})
    (error,) = run_ranks(load_on_rank, 1, tmp_path, large, str(checkpoint), {})
    assert "embedding.word_embeddings.weight needs at least 300 rows of [48], got [128, 48]" in error


def test_checkpoint_is_loaded_in_another_dtype(model_folder, tmp_path):
    source = model_folder("deepseek_v3")
    checkpoint = save(tmp_path, source, {})
    assert run_ranks(load_on_rank, 1, tmp_path, source, str(checkpoint), {}, None, "bfloat16") == [[]]


def test_invalid_common_pt_raises(qwen3_path, tmp_path):
    checkpoint = save(tmp_path, qwen3_path, {})
    os.truncate(checkpoint / "common.pt", 100)
    (error,) = run_ranks(load_on_rank, 1, tmp_path, qwen3_path, str(checkpoint), {})
    assert error.startswith(f"{checkpoint}/common.pt cannot be read: ")


def test_truncated_checkpoint_raises(qwen3_path, tmp_path):
    checkpoint = save(tmp_path, qwen3_path, {"tp": 2})
    file = checkpoint / "__1_0.distcp"
    os.truncate(file, file.stat().st_size - 1)
    errors = run_ranks(load_on_rank, 2, tmp_path, qwen3_path, str(checkpoint), {"tp": 2})
    assert f"{file} is cut short, its tensors need" in errors[0]
    assert errors[0] == errors[1]


def save_to_a_full_disk_on_rank(folder, target, faulty):
    if int(os.environ["RANK"]) == faulty:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    return save_on_rank(folder, target, {"tp": 2})


def test_error_names_the_rank_that_cannot_write(qwen3_path, tmp_path):
    target = tmp_path / "checkpoint"
    errors = run_ranks(save_to_a_full_disk_on_rank, 2, tmp_path, qwen3_path, str(target), 1)
    assert errors[0].startswith(f"{target}: the checkpoint could not be written, on rank 1: ")
    assert errors[0] == errors[1]
    assert not (target / "metadata.json").exists()


def status(key):
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key)]
    return int(line.split()[1]) * 1024


def import_on_rank(folder, target, sizes):
    """Import a model; return, by rank, the peak memory that it took and the size of the rank's weights, in bytes."""
    from megarl.megatron.convert_worker import ConvertWorker

    Path("/proc/self/clear_refs").write_text("5")  # resets the peak memory
    before = status("VmRSS")
    worker = ConvertWorker(ModelSpec(model_path=folder, dtype="bfloat16", parallel=ParallelConfig(**sizes)))
    worker.read_hf(folder)
    worker.write_checkpoint(target)
    peak = status("VmHWM") - before
    return gather_and_finish((peak, sum(t.numel() * t.itemsize for t in worker._model.tensors().values())))


@pytest.mark.slow
def test_import_needs_little_more_memory_than_its_weights(tmp_path):
    from transformers import Qwen3Config, Qwen3ForCausalLM

    sizes = {"vocab_size": 32768, "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 12}
    config = Qwen3Config(**sizes, num_attention_heads=16, num_key_value_heads=8, head_dim=128)
    with torch.device("meta"):
        model = Qwen3ForCausalLM(config).bfloat16()
    model = model.to_empty(device="cpu")
    for parameter in model.parameters():
        parameter.data.normal_(std=0.02)
    source, target = tmp_path / "model", tmp_path / "checkpoint"
    model.save_pretrained(source)
    del model
    try:
        for peak, held in run_ranks(import_on_rank, 4, tmp_path, str(source), str(target), {"tp": 2, "pp": 2}):
            assert held > 128 * 2**20
            assert peak < 1.3 * held
    finally:
        shutil.rmtree(source)
        shutil.rmtree(target, ignore_errors=True)
