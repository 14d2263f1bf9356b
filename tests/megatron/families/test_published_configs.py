"""The config.json files of published models: which megarl reads, and that its tensors are those of transformers.

`published/README.md` says where the files come from. transformers builds each model on the meta device, so that a
model of a trillion parameters takes a second and no memory.
"""

import json
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.core_model_loading import revert_weight_conversion

from megarl.engines.unsupported_options import find_build_problems, find_engine_problems
from megarl.errors import MegarlError
from megarl.megatron.families.architecture import ModelArchitecture, hf_tensors_of
from megarl.megatron.families.attention import GroupedQueryAttention
from megarl.megatron.families.load_architecture import load_architecture, load_architecture_from_folder
from megarl.model_files.weight_index import stored_shape

FOLDER = Path(__file__).parent / "published"
NAMES = sorted(file.stem for file in FOLDER.glob("*.json"))

REFUSED = {
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": "NemotronHForCausalLM .*mamba_num_heads 64",
}
"""Models that megarl refuses, with a part of the message."""

NOT_SERVED = {
    "DeepSeek-V3.2-Exp": "quantization_config.scale_fmt None or float, got ue8m0",
    "Kimi-K2.5": "engines would run in INT4",
    "gpt-oss-120b": "engines would run in MXFP4",
    "gpt-oss-20b": "engines would run in MXFP4",
}
"""Models that engines of megarl do not run as they are published, with a part of the message."""

ACCEPTED = [name for name in NAMES if name not in REFUSED]

CLOSEST = {"kimi_k2": "deepseek_v3", "mimo": "qwen2"}
"""Closest `model_type` of transformers for the models whose code is in their folder.

Kimi-K2's folder has DeepSeek-V3's code. MiMo's model is Qwen2's with MTP layers.
"""

BILLIONS = {
    "DeepSeek-V3": 671,
    "DeepSeek-V3.2-Exp": 671,
    "GLM-5": 744,
    "Kimi-K2-Instruct": 1040,
    "Kimi-K2.5": 1040,
    "Llama-3.1-8B": 8.03,
    "Mixtral-8x7B-v0.1": 46.7,
    "Moonlight-16B-A3B-Instruct": 16,
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": 31.6,
    "Qwen2.5-7B-Instruct": 7.61,
    "Qwen3-0.6B": 0.6,
    "Qwen3-235B-A22B": 235,
    "Qwen3-30B-A3B": 30.5,
    "Qwen3-8B": 8.2,
    "gemma-2-9b-it": 9.24,
    "gpt-oss-120b": 116.8,
    "gpt-oss-20b": 20.9,
}
"""Parameters of the language model in billions, without MTP layers and vision tower, as its publisher states them."""

EXACT = {
    # arXiv 2408.00118, table 2: parameters besides the embedding; 256,000 tokens of it are in the folder
    "gemma-2-9b-it": 8_324_201_984 + 256_000 * 3584,
    # all parts; 19,306,216,416 bytes in bfloat16, A_log and norms of 24 linear-attention layers in float32
}
"""Number of parameters in the published folder, where it is known to the last digit."""


def published(name: str) -> dict[str, Any]:
    tree: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text())
    return tree


def read(name: str) -> ModelArchitecture:
    return load_architecture(published(name), origin="config.json")


def transformers_config(name: str) -> Any:
    tree = published(name)
    kind = tree.pop("model_type")
    return AutoConfig.for_model(CLOSEST.get(kind, kind), **tree)


@cache
def language_model(name: str) -> nn.Module:
    """Return transformers' language model, without MTP layers and vision tower, on the meta device."""
    config = transformers_config(name).get_text_config()
    config.model_type = CLOSEST.get(config.model_type, config.model_type)  # names of experts go by it
    with torch.device("meta"):
        model: nn.Module = AutoModelForCausalLM.from_config(config)
    return model


def num_parameters(module: nn.Module) -> int:
    """Return the number of elements that a checkpoint of `module` holds, routers' expert biases included."""
    saved = module.state_dict().keys()
    buffers = (buffer for name, buffer in module.named_buffers() if name in saved)
    return sum(tensor.numel() for tensor in (*module.parameters(), *buffers))


def published_shapes(name: str) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors in a published folder of the language model, as transformers reads them."""
    model = language_model(name)
    state = revert_weight_conversion(
        model, model.state_dict()
    )  # transformers stacks experts, which are published apart
    return {tensor: tuple(value.shape) for tensor, value in state.items() if tensor not in model.all_tied_weights_keys}


@pytest.mark.parametrize("name", ACCEPTED)
def test_number_of_key_value_heads_that_is_left_out_is_the_default_of_transformers(name):
    tree = published(name)
    tree.get("text_config", tree).pop("num_key_value_heads", None)
    kind = tree["model_type"]
    options = {key: value for key, value in tree.items() if key != "model_type"}
    config = AutoConfig.for_model(CLOSEST.get(kind, kind), **options).get_text_config()
    if config.num_attention_heads % config.num_key_value_heads == 0:
        attentions = load_architecture(tree, origin="config.json").attentions(GroupedQueryAttention)
        assert {attention.num_kv_heads for attention in attentions} <= {config.num_key_value_heads}


def num_mtp_parameters(name: str, layers: int) -> int:
    """Return the number of parameters of MTP layers, which transformers leaves out.

    Each is a decoder layer like the last one, a projection of two hidden states to one, and three norms.
    """
    model, hidden = language_model(name), transformers_config(name).get_text_config().hidden_size
    return layers * (num_parameters(model.model.layers[-1]) + 2 * hidden * hidden + 3 * hidden)


@pytest.mark.parametrize("name", ACCEPTED)
def test_accepted_model_has_the_tensors_of_transformers(name: str) -> None:
    model, config = read(name), transformers_config(name).get_text_config()
    shapes = {tensor: spec.shape for tensor, spec in model.tensors("bfloat16").items()}
    mtp = {tensor: shapes.pop(tensor) for tensor in hf_tensors_of(model.mtp_parameter_maps().values(), "bfloat16")}
    assert sum(map(prod, shapes.values())) == num_parameters(language_model(name))
    assert sum(map(prod, mtp.values())) == num_mtp_parameters(name, model.num_mtp_layers)
    # a folder with a vision tower has the language model under another prefix
    stored = {tensor: stored_shape(tensor, shape) for tensor, shape in shapes.items()}
    assert {tensor.replace("language_model.", ""): shape for tensor, shape in stored.items()} == published_shapes(name)
    assert (model.num_layers, model.hidden_size) == (config.num_hidden_layers, config.hidden_size)
    assert (model.vocab_size, model.max_positions) == (config.vocab_size, config.max_position_embeddings)
    assert model.tie_embeddings == config.tie_word_embeddings


@pytest.mark.parametrize("name", ACCEPTED)
def test_accepted_model_is_accepted_as_a_folder(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((FOLDER / f"{name}.json").read_text())
    assert load_architecture_from_folder(tmp_path) == read(name)
    problems = find_engine_problems(published(name), "cuda", origin="config.json")
    assert len(problems) == (name in NOT_SERVED)
    assert all(NOT_SERVED[name] in problem for problem in problems)
    for problem in find_build_problems(published(name), "cuda", origin="config.json"):
        assert NOT_SERVED[name] in problem


@pytest.mark.parametrize("name", REFUSED)
def test_refused_model_is_refused_for_its_feature(name: str, tmp_path: Path) -> None:
    with pytest.raises(MegarlError, match=REFUSED[name]):
        read(name)
    (tmp_path / "config.json").write_text((FOLDER / f"{name}.json").read_text())
    with pytest.raises(MegarlError, match=REFUSED[name]):
        load_architecture_from_folder(tmp_path)


@pytest.mark.parametrize("name", BILLIONS)
def test_parameters_are_about_those_published(name: str) -> None:
    assert num_parameters(language_model(name)) / 1e9 == pytest.approx(BILLIONS[name], rel=0.02)


@pytest.mark.parametrize("name", EXACT)
def test_parameters_are_exactly_those_published(name: str) -> None:
    config, number = transformers_config(name), num_parameters(language_model(name))
    if "vision_config" in published(name):
        with torch.device("meta"):
            number = num_parameters(AutoModelForImageTextToText.from_config(config))
    number += num_mtp_parameters(name, published(name).get("text_config", {}).get("mtp_num_hidden_layers", 0))
    assert number == EXACT[name]


@pytest.mark.parametrize("name", NAMES)
def test_transformers_reads_the_file(name: str, tmp_path: Path) -> None:
    tree = published(name)
    tree["model_type"] = CLOSEST.get(tree["model_type"], tree["model_type"])
    (tmp_path / "config.json").write_text(json.dumps(tree))
    config = AutoConfig.from_pretrained(tmp_path, trust_remote_code=False)
    assert config.to_dict() == transformers_config(name).to_dict() | {"_name_or_path": config._name_or_path}


def test_every_file_has_a_row_in_the_readme() -> None:
    rows = [line.split("|")[1].strip() for line in (FOLDER / "README.md").read_text().splitlines() if "|" in line]
    assert sorted(rows[2:]) == NAMES
