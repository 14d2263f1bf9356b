"""The config.json files of published models: which megarl reads, and that its tensors are those of transformers.

`published/README.md` says where the files come from. transformers builds each model on the meta device, so that a
model of a trillion parameters takes a second and no memory.
"""

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import redirect_stderr, redirect_stdout
from copy import deepcopy
from functools import cache
from io import StringIO
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.core_model_loading import revert_weight_conversion
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from megarl.cli.main import main
from megarl.engines.unsupported_options import find_build_problems, find_engine_problems
from megarl.errors import MegarlError
from megarl.megatron.families.architecture import ModelArchitecture, hf_tensors_of
from megarl.megatron.families.load_architecture import (
    REQUIRED_SIZES,
    TEXT_PARTS,
    load_architecture,
    load_architecture_from_folder,
    read_hf_config,
)
from megarl.model_files.model_config import ARCHITECTURES
from megarl.model_files.weight_index import stored_shape

FOLDER = Path(__file__).parent / "published"
NAMES = sorted(file.stem for file in FOLDER.glob("*.json"))

REFUSED = {
    "DeepSeek-V4-Flash": "DeepseekV4ForCausalLM .*hc_mult 4",
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

NO_STOP_TOKEN = ("MiMo-7B-RL", "MiniMax-M2.5")
"""Models in whose file here no stop token could be found."""

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
    "Llama-3.3-70B-Instruct": 70.6,
    "Mixtral-8x7B-v0.1": 46.7,
    "Moonlight-16B-A3B-Instruct": 16,
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": 31.6,
    "Qwen2.5-7B-Instruct": 7.61,
    "Qwen3-0.6B": 0.6,
    "Qwen3-235B-A22B": 235,
    "Qwen3-30B-A3B": 30.5,
    "Qwen3-32B": 32.8,
    "Qwen3-4B": 4.0,
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


def check_folder(config: str, folder: Path) -> tuple[int, str, list[str]]:
    """Run `megarl check` for `megarl sft` with a model folder that has `config` as its only file.

    Returns:
        exit code, output, and problems
    """
    model, data, run = folder / "model", folder / "rows.jsonl", folder / "sft.yaml"
    model.mkdir()
    (model / "config.json").write_text(config)
    data.write_text('{"prompt": "1 + 1 =", "response": "2"}\n')
    tree = {"run_dir": f"{folder}/run", "model": {"path": f"{model}"}, "data": {"path": f"{data}"}}
    run.write_text(json.dumps(tree | {"trainer": {"steps": 1, "batch_size": 1}, "placement": {"slots_per_node": 1}}))
    out, err = StringIO(), StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = main(["check", f"{run}", "--stage", "sft"])
    return code, out.getvalue(), err.getvalue().removeprefix("error: ").splitlines()


@pytest.mark.parametrize("name", ACCEPTED)
def test_check_of_a_config_json_alone_states_the_parameters_of_transformers(name: str, tmp_path: Path) -> None:
    code, out, problems = check_folder((FOLDER / f"{name}.json").read_text(), tmp_path)
    parameters = sum(parameter.numel() for parameter in language_model(name).parameters())
    assert out.startswith(f"# model: {architectures_of(name)[0]}, {parameters:,} parameters in "), out
    lacks = [problem.partition(f"{tmp_path}/model")[2] for problem in problems]
    assert lacks.pop(0) == " holds no safetensors files"
    assert lacks.pop().startswith(": the model folder holds no tokenizer")
    assert len(lacks) == (name in NO_STOP_TOKEN)
    assert all("needs an end-of-sequence token" in problem for problem in lacks)
    assert code == 2


@pytest.mark.parametrize("name", REFUSED)
def test_check_of_a_config_json_alone_names_the_missing_features(name: str, tmp_path: Path) -> None:
    code, out, problems = check_folder((FOLDER / f"{name}.json").read_text(), tmp_path)
    assert (code, out) == (2, "")
    assert re.search(REFUSED[name], problems[0])


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


def normalized(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config.json with all keys that transformers writes after reading `tree`."""
    stated = deepcopy(dict(tree))
    kind = stated.pop("model_type")
    config: dict[str, Any] = AutoConfig.for_model(CLOSEST.get(kind, kind), **stated).to_dict()
    return config | {"architectures": tree["architectures"]}


def architecture_or_refusal(tree: Mapping[str, Any]) -> ModelArchitecture | str:
    try:
        return load_architecture(tree, origin="config.json")
    except MegarlError as error:
        return str(error)


def architecture_of_transformers(tree: Mapping[str, Any]) -> ModelArchitecture | str:
    """Return what megarl reads from transformers' keys, or the message of transformers or megarl that refuses them."""
    try:
        return architecture_or_refusal(normalized(tree))
    except (StrictDataclassError, KeyError, TypeError) as error:
        return str(error)


def text_kinds() -> Iterator[tuple[str, str]]:
    """Yield (model_type, architecture) of every model that megarl reads."""
    yield from ARCHITECTURES.items()
    for architecture in TEXT_PARTS:
        yield from {(published(n)["model_type"], architecture) for n in ACCEPTED if architecture in architectures_of(n)}


def architectures_of(name: str) -> list[str]:
    names: list[str] = published(name)["architectures"]
    return names


@pytest.mark.parametrize(("kind", "architecture"), list(text_kinds()))
def test_config_without_any_key_is_that_of_transformers(kind: str, architecture: str, tmp_path: Path) -> None:
    tree = {"model_type": kind, "architectures": [architecture]}
    tree |= {"text_config": {"topk_group": 4}} if architecture in TEXT_PARTS else {}
    expected = normalized(tree)
    assert load_architecture(tree, origin="config.json") == load_architecture(expected, origin="config.json")
    (tmp_path / "config.json").write_text(json.dumps(tree))
    read, sizes = read_hf_config(tmp_path), expected.get("text_config", expected)
    assert {key: read[key] for key in REQUIRED_SIZES} == {key: sizes[key] for key in REQUIRED_SIZES}
    assert read["tie_word_embeddings"] == expected["tie_word_embeddings"]


ONE_EACH = {architectures_of(name)[0]: name for name in ACCEPTED}
"""Architecture -> one of its published models."""

UNREAD_BY_MEGARL = (
    *("attention_dropout", "initializer_range", "max_window_layers", "output_router_logits", "router_aux_loss_coef"),
    "use_cache",
)
"""Keys that transformers refuses to be null and that change neither shapes nor log-probabilities."""


@pytest.mark.parametrize("name", ONE_EACH.values())
def test_key_that_is_left_out_or_null_is_read_as_by_transformers_or_refused_by_name(name: str) -> None:
    tree = published(name)
    assert read(name) == load_architecture(normalized(tree), origin="config.json")
    parts = ((), ("text_config",)) if "text_config" in tree else ((),)
    for part in parts:
        for key in nested(tree, part).keys() - {"architectures", "model_type", "text_config", "vision_config"}:
            without, null = deepcopy(tree), deepcopy(tree)
            del nested(without, part)[key]
            nested(null, part)[key] = None
            for changed in (without, null):
                got, expected = architecture_or_refusal(changed), architecture_of_transformers(changed)
                if isinstance(got, str):
                    assert key in got, (key, got)
                    continue
                find_engine_problems(changed, "cpu", origin="config.json")
                if isinstance(expected, str):
                    is_shadowed = key in tree and part != ()
                    assert changed is null, (key, expected)
                    assert key in UNREAD_BY_MEGARL or key.endswith("_token_id") or is_shadowed, (key, expected)
                else:
                    assert got == expected, key


def nested(tree: dict[str, Any], part: tuple[str, ...]) -> dict[str, Any]:
    for key in part:
        tree = tree[key]
    return tree


@pytest.mark.parametrize("name", ONE_EACH.values())
def test_other_names_of_keys_are_those_of_transformers(name: str) -> None:
    tree, config = published(name), transformers_config(name).get_text_config()
    text = tree.get("text_config", tree)
    for other, key in config.attribute_map.items():
        first, second = sorted((other, key), key=lambda k: k not in text)
        value = text.pop(first)
        text[second] = value
        assert load_architecture(tree, origin="config.json") == read(name), second
        text[first] = value + 1
        with pytest.raises(MegarlError, match=rf"({other} \d+ and {key}|{key} \d+ and {other}) \d+ differ"):
            load_architecture(tree, origin="config.json")
        del text[second]
        text[first] = value


UNKNOWN = {
    "deepseek_v4": "hc_mult 4 (hyper-connections)",
    "falcon": "parallel_attn True (attention and MLP side by side)",
    "falcon_mamba": "state_size 16 (state-space layers)",
    "gemma3n_text": "num_kv_shared_layers 15 (layers that share keys and values)",
    "gemma4": "hidden_size_per_layer_input 256 (embeddings for each layer)",
    "gpt2": "layer_norm_epsilon 1e-05 (layer norms with a mean)",
    "granite": "attention_multiplier 1.0 (another scale of attention scores)",
    "kimi_linear": "linear_num_heads 32 (Kimi delta attention)",
    "lfm2": "conv_L_cache 3 (convolution layers)",
    "llama4_text": "attention_chunk_size 8192 (attention in chunks)",
    "mimo_v2_flash": "attention_value_scale 0.707 (scaled values)",
    "minicpm3": "scale_depth 1.4 (scaled residuals)",
    "minimax_m3_vl_text": "index_topk_blocks 16 (selected blocks of keys)",
    "nemotron_h": "mlp_hidden_act relu2 (MLPs without a gate)",
    "qwen3_vl": "vision_config (a vision tower of another kind",
    "smollm3": "no_rope_layer_interval 4 (layers without RoPE)",
    "stablelm": "layer_norm_eps 1e-05 (layer norms with a mean)",
    "mistral": "no key names a missing feature",
    "olmo2": "no key names a missing feature",
}
"""`model_type` of a model without a reader -> a part of the message about its class's default configuration."""


@pytest.mark.parametrize("kind", UNKNOWN)
def test_architecture_without_a_reader_is_refused_by_the_features_that_it_needs(kind: str) -> None:
    names = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES | MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    name = names[kind]
    config = AutoConfig.for_model(kind).to_dict() | {"architectures": [name]}
    message = architecture_or_refusal(config)
    assert isinstance(message, str)
    assert message.startswith(f"config.json: architecture {name} is not supported, ")
    assert UNKNOWN[kind] in message
    assert "layer norms with a mean" in UNKNOWN[kind] or "layer norms" not in message  # as in Nemotron-H


ABSENT = object()
"""Value of a key that is left out."""

YARN = {"factor": 4.0, "original_max_position_embeddings": 32768}

VARIANTS: tuple[dict[str, Any], ...] = (
    *({"head_dim": 64}, {"head_dim": ABSENT}, {"num_key_value_heads": ABSENT}, {"num_key_value_heads": None}),
    *({"tie_word_embeddings": True}, {"tie_word_embeddings": ABSENT}, {"attention_bias": True}, {"qkv_bias": True}),
    *({"layer_types": ABSENT}, {"layer_types": None}, {"layer_types": ABSENT, "full_attention_interval": 2}),
    *({"layer_types": ABSENT, "sliding_window_pattern": 3}, {"layer_types": ABSENT, "_sliding_window_pattern": 3}),
    *({"use_sliding_window": True, "sliding_window": 4096}, {"sliding_window": 4096, "max_window_layers": 0}),
    *({"mlp_only_layers": []}, {"mlp_only_layers": [0, 2]}, {"mlp_only_layers": [1], "decoder_sparse_step": 2}),
    *({"first_k_dense_replace": 0}, {"first_k_dense_replace": 5}, {"first_k_dense_replace": None}),
    *({"n_shared_experts": 0}, {"n_shared_experts": None}, {"n_shared_experts": 2}),
    *({"shared_expert_intermediate_size": 0}, {"norm_topk_prob": True}, {"norm_topk_prob": False}),
    *({"n_group": None, "topk_group": None}, {"q_lora_rank": None}, {"num_nextn_predict_layers": 0}),
    *({"use_qk_norm": False}, {"use_qk_norm": True}, {"scoring_func": "softmax"}, {"hidden_act": "gelu"}),
    *({"rope_scaling": None}, {"rope_scaling": {}}, {"rope_scaling": {"type": "default"}}, {"rope_theta": 10000}),
    *({"rope_scaling": {"rope_type": "yarn", **YARN}}, {"rope_scaling": {"type": "yarn", **YARN}}),
    *({"rope_scaling": {"type": "yarn", "factor": 4.0}}, {"rope_parameters": {"rope_type": "default"}}),
    {"rope_theta": 5e5, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    {"rope_theta": ABSENT, "rope_scaling": ABSENT, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
    *({"partial_rotary_factor": 0.25}, {"rotary_dim": 32}, {"quantization_config": None}, {"quantization_config": {}}),
    *({"quantization_config": {"quant_method": method}} for method in ("fp8", "awq", "gptq", "bitsandbytes", "mxfp4")),
    {"quantization_config": {"quant_method": "fp8", "weight_block_size": [64, 64]}},
    {"quantization_config": {"quant_method": "compressed-tensors", "format": "float-quantized"}},
)
"""Changes of keys that publishers write differently, each made in one config.json of every architecture."""


@pytest.mark.parametrize("name", ONE_EACH.values())
def test_variant_is_read_as_by_transformers_or_refused_by_name(name: str) -> None:
    for change in VARIANTS:
        tree = published(name)
        keys = tree.get("text_config", tree)
        keys.update(change)
        for key in [key for key, value in change.items() if value is ABSENT]:
            del keys[key]
        got, expected = architecture_or_refusal(tree), architecture_of_transformers(tree)
        if isinstance(got, str):
            assert any(key in got for key in change), (change, got)
        else:
            assert got == expected, change
