"""What is read from config.json, compared with transformers and papers: tensors, RoPE, value heads, MTP, costs."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from benchmarks.reshard import published
from megarl.batch.balance import QWEN2_5_7B
from megarl.cluster.placement.rank_grid import RankGrid
from megarl.errors import ConfigError
from megarl.megatron.families.architecture import VALUE_NAMES, sequence_cost
from megarl.megatron.families.attention import Rope
from megarl.megatron.families.load_architecture import (
    FAMILY_READERS,
    find_folder_notices,
    find_weight_problems,
    load_architecture,
    load_architecture_and_dtype,
    load_architecture_from_folder,
)
from megarl.megatron.families.trainer_layouts import trainer_layouts
from megarl.megatron.modeling.rotary import attention_factor, inverse_frequencies
from tests.megatron.families.test_published_configs import published as published_folder
from tests.megatron.families.tiny import CONFIGS, DEEPSEEK_V3, PLAIN, QWEN3_MOE, tiny
from tests.megatron.fidelity import models


@pytest.mark.parametrize("name", CONFIGS)
def test_tensors_match_a_published_checkpoint(name: str, tmp_path: Path) -> None:
    from megarl.engines.sglang.weight_layout.trace_child import checkpoint_tensors

    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[name]))
    published = {tensor: spec.shape for tensor, spec in checkpoint_tensors(str(tmp_path), "float32").items()}
    model_tensors = {tensor: spec.shape for tensor, spec in tiny(name).tensors("float32").items()}
    mtp = {tensor for tensor in model_tensors if tensor.startswith("model.layers.4.")}
    assert {tensor: shape for tensor, shape in model_tensors.items() if tensor not in mtp} == published
    # transformers leaves out the MTP layer, which is a decoder layer with four additional tensors
    if mtp:
        same = {tensor.replace("layers.3.", "layers.4.") for tensor in model_tensors if ".layers.3." in tensor}
        added = {f"model.layers.4.{x}.weight" for x in ("enorm", "hnorm", "eh_proj", "shared_head.norm")}
        assert mtp == same | added
        assert model_tensors["model.layers.4.eh_proj.weight"] == (48, 96)


def test_only_the_expert_bias_has_its_own_dtype() -> None:
    other = {name for name, spec in tiny("deepseek_v3").tensors("bfloat16").items() if spec.dtype != "bfloat16"}
    assert other == {f"model.layers.{i}.mlp.gate.e_score_correction_bias" for i in (1, 2, 3, 4)}
    assert {tiny("deepseek_v3").tensors("bfloat16")[name].dtype for name in other} == {"float32"}


@pytest.mark.parametrize(
    ("stated", "number"), [({"mamba_ssm_dtype": "float32"}, 4), ({"mamba_ssm_dtype": "bfloat16"}, 0), ({}, 0)]
)
@pytest.mark.parametrize(
    ("name", "architecture"), [("qwen3_next", "Qwen3NextForCausalLM"), ("qwen3_5", "Qwen3_5ForCausalLM")]
)
def test_gated_delta_nets_have_float32_tensors_where_the_config_says_so(
    name: str, architecture: str, stated: dict[str, str], number: int
) -> None:
    config = models.CONFIGS[name] | {"architectures": [architecture]} | stated
    specs = load_architecture(config, origin=name).tensors("bfloat16")
    other = {tensor: spec.dtype for tensor, spec in specs.items() if spec.dtype != "bfloat16"}
    assert set(other) == (set(filter(models.is_float32, specs)) if number else set())
    assert list(other.values()) == ["float32"] * number


@pytest.mark.parametrize("name", CONFIGS)
def test_parameter_map_finds_every_name(name: str) -> None:
    model = tiny(name)
    maps = model.parameter_maps()
    assert {parameter: model.parameter_map(parameter) for parameter in maps} == maps


@pytest.mark.parametrize(
    ("fused", "plain"),
    [
        ("mlp.experts.linear_fc1.weight5", "mlp.experts.local_experts.5.linear_fc1.weight"),
        ("mlp.experts.linear_fc2.weight0", "mlp.experts.local_experts.0.linear_fc2.weight"),
        ("self_attention.linear_q_up_proj.layer_norm_weight", "self_attention.q_layernorm.weight"),
        ("self_attention.linear_kv_up_proj.layer_norm_weight", "self_attention.kv_layernorm.weight"),
    ],
)
def test_transformer_engine_spellings_are_accepted(fused: str, plain: str) -> None:
    model = tiny("deepseek_v3")
    for prefix in ("decoder.layers.2.", "mtp.layers.0.transformer_layer."):
        assert model.parameter_map(prefix + fused) == model.parameter_map(prefix + plain)


@pytest.mark.parametrize(
    "key",
    ["q_lora_rank", "n_shared_experts", "n_group", "topk_group", "routed_scaling_factor", "first_k_dense_replace"],
)
def test_a_missing_deepseek_key_means_the_default_of_transformers(key: str) -> None:
    from transformers import DeepseekV3Config

    config = DEEPSEEK_V3 | {"num_experts_per_tok": 8, "n_group": 8, "topk_group": 4, "num_hidden_layers": 5}
    without = {name: value for name, value in config.items() if name != key}
    stated = config | {key: getattr(DeepseekV3Config(), key)}
    assert load_architecture(without, origin="test") == load_architecture(stated, origin="test")


@pytest.mark.parametrize("key", ["num_key_value_heads", "head_dim", "tie_word_embeddings", "rope_theta"])
@pytest.mark.parametrize("name", ["Llama", "Qwen2", "Qwen3", "Qwen3Moe", "Mixtral", "Gemma2"])
def test_a_missing_key_means_the_default_of_transformers(name: str, key: str) -> None:
    import transformers

    config = PLAIN | {"architectures": [f"{name}ForCausalLM"], "moe_intermediate_size": 24, "num_experts": 4}
    loaded = getattr(transformers, f"{name}Config")(**config)
    default = loaded.rope_parameters["rope_theta"] if key == "rope_theta" else getattr(loaded, key, None)
    stated = load_architecture(config | {key: default}, origin="test")
    assert load_architecture(config, origin="test") == stated


def test_both_config_keys_for_the_number_of_experts_are_accepted() -> None:
    assert load_architecture(QWEN3_MOE, origin="test").num_experts == 8
    renamed = {("num_local_experts" if key == "num_experts" else key): value for key, value in QWEN3_MOE.items()}
    assert load_architecture(renamed, origin="test").num_experts == 8


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel is not supported, though .*model.family"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config.weight_block_size needs .* got None"),
        ({"attention_bias": True}, "attention_bias True is not supported; supported is False"),
        ({"hidden_act": "relu"}, "hidden_act relu is not supported; supported is silu"),
        ({"rope_interleave": False}, "rope_interleave False is not supported; supported is True"),
        ({"norm_topk_prob": False}, "norm_topk_prob False is not supported; supported is True"),
        ({"topk_group": 1}, r"num_experts_per_tok needs to be 2 \* topk_group with n_group 4, got 4 != 2 \* 1 = 2"),
        ({"kv_lora_rank": None}, "kv_lora_rank: .*, got None"),
        ({"num_hidden_layers": 0}, "num_hidden_layers: Input should be greater than 0, got 0"),
        ({"num_key_value_heads": 3}, r"needs to divide num_attention_heads, got 4 % 3 = 1"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope type dynamic is not supported; supported are d"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope type yarn needs factor"),
        (
            {"rope_scaling": {"type": "linear", "factor": "2.0"}},
            "RoPE parameter factor needs a positive number, got '2",
        ),
        (
            {"rope_scaling": {"type": "linear", "factor": True}},
            "RoPE parameter factor needs a positive number, got True",
        ),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "RoPE parameter factor needs a positive number, got 0"),
        ({"rope_parameters": {"rope_theta": "1e4"}}, "RoPE parameter rope_theta needs a positive number, got '1e4'"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2, "mscale": [1]}}, r"mscale needs a number, got \[1\]"),
        ({"rope_parameters": {"rope_type": ["yarn"]}}, r"rope type \['yarn'\] is not supported"),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e6}}},
            "RoPE parameters by layer type are not supported, got some under full_attention",
        ),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported"),
        ({"rope_theta": "10000.0"}, "rope_theta: .*, got '10000.0'"),
        ({"rope_scaling": "linear"}, "rope_scaling: .*, got 'linear'"),
        ({"hidden_size": "48"}, "hidden_size: .*, got '48'"),
        ({"num_hidden_layers": True}, "num_hidden_layers: .*, got True"),
        ({"vocab_size": 331.0}, "vocab_size: .*, got 331.0"),
        ({"rms_norm_eps": "1e-6"}, "rms_norm_eps: .*, got '1e-6'"),
        ({"rms_norm_eps": float("inf")}, "rms_norm_eps: .* finite"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings: .*, got 'false'"),
        ({"num_experts_per_tok": "4"}, "num_experts_per_tok: .*, got '4'"),
        ({"dtype": "auto"}, "dtype auto is not supported; supported is float32, bfloat16, float16, float64"),
        ({"torch_dtype": "float33"}, "torch_dtype float33 is not supported"),
        (
            {"architectures": "DeepseekV3ForCausalLM"},
            "architectures needs a list of names, got 'DeepseekV3ForCausalLM'",
        ),
        ({"architectures": [1]}, r"architectures needs a list of names, got \[1\]"),
    ],
)
def test_unsupported_configs_raise(change: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_architecture(DEEPSEEK_V3 | change, origin="test")


LONGER = {"factor": 4.0, "original_max_position_embeddings": 128}
LLAMA3 = LONGER | {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = LONGER | {"rope_type": "yarn"}
KINDS = [{}, LLAMA3, {"rope_type": "linear", "factor": 4.0}, YARN, YARN | {"beta_fast": 16.0, "attention_factor": 0.9}]


@pytest.mark.parametrize("scaling", KINDS, ids=lambda scaling: scaling.get("rope_type", "default"))
def test_frequencies_match_transformers(scaling):
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    rope = Rope.read(scaling, theta=5e5, max_positions=512, origin="test")
    parameters = {"rope_type": "default", "rope_theta": 5e5, **scaling}
    sizes = {"hidden_size": 96, "num_attention_heads": 6, "max_position_embeddings": 512}
    expected = LlamaRotaryEmbedding(LlamaConfig(**sizes, rope_parameters=parameters))
    assert torch.equal(inverse_frequencies(rope, 16), expected.inv_freq)
    assert attention_factor(rope, 16) == expected.attention_scaling


@pytest.mark.parametrize("kind", ["llama3", "yarn"])
@pytest.mark.parametrize("top_level", [None, 64])
@pytest.mark.parametrize("nested", [None, 128])
def test_original_positions_are_those_that_transformers_takes(kind: str, top_level: int, nested: int) -> None:
    """With the other parameters, outside of them, which counts first, or max_position_embeddings."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    scaling = {key: value for key, value in {"llama3": LLAMA3, "yarn": YARN}[kind].items() if "original" not in key}
    scaling |= {"original_max_position_embeddings": nested} if nested else {}
    config = PLAIN | {"architectures": ["LlamaForCausalLM"], "max_position_embeddings": 512, "rope_scaling": scaling}
    config |= {"original_max_position_embeddings": top_level} if top_level else {}
    rope = load_architecture(config, origin="test").layers[0].attention.rope
    expected = LlamaRotaryEmbedding(LlamaConfig(**json.loads(json.dumps(config))))
    assert torch.equal(inverse_frequencies(rope, 64), expected.inv_freq)
    assert attention_factor(rope, 64) == expected.attention_scaling


MTP_PREFIXES = ("model.layers.4.", "model.layers.5.")


def write_model(folder: Path, *, without: tuple[str, ...] = (), **changes: Any) -> Path:
    """Write a DeepSeek-V3 folder; leave out tensors whose names start with one of `without`."""
    config = DEEPSEEK_V3 | changes
    (folder / "config.json").write_text(json.dumps(config))
    specs = load_architecture(config, origin="test").tensors("float32")
    tensors = {n: np.zeros(spec.shape, np.float32) for n, spec in specs.items() if not n.startswith(without)}
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(("number", "names", "ignored"), [(1, "1 MTP layer", "it"), (2, "2 MTP layers", "them")])
def test_a_folder_without_mtp_tensors_is_loaded_without_mtp_layers(
    tmp_path: Path, number: int, names: str, ignored: str
) -> None:
    folder = write_model(tmp_path, without=MTP_PREFIXES, num_nextn_predict_layers=number)
    model = load_architecture_from_folder(folder)
    assert (model.num_mtp_layers, model.duplicated_tensors()) == (0, {})
    assert load_architecture_and_dtype(str(folder))[0] == model
    assert find_weight_problems(folder, model) == []
    notice = f"{folder}: config.json names {names}, the folder has none: ignoring {ignored}"
    assert find_folder_notices(folder) == [notice]


def test_copies_of_embedding_and_head_are_no_mtp_layer(tmp_path: Path) -> None:
    folder = write_model(tmp_path, without=MTP_PREFIXES)
    save_file({"model.layers.4.embed_tokens.weight": np.zeros((331, 48), np.float32)}, folder / "copies.safetensors")
    model = load_architecture_from_folder(folder)
    assert (model.num_mtp_layers, find_weight_problems(folder, model)) == (0, [])


@pytest.mark.parametrize("missing", ["model.layers.4.eh_proj.weight", "model.layers.5."])
def test_a_folder_with_some_mtp_tensors_is_rejected(tmp_path: Path, missing: str) -> None:
    folder = write_model(tmp_path, without=(missing,), num_nextn_predict_layers=2)
    model = load_architecture_from_folder(folder)
    assert model.num_mtp_layers == 2
    (problem,) = find_weight_problems(folder, model)
    assert problem.startswith(f"{folder} lacks ")
    assert f"first {missing}" in problem
    assert find_folder_notices(folder) == []


def test_mtp_layers_are_kept_if_the_folder_has_them_or_has_no_weights(tmp_path: Path) -> None:
    folder = write_model(tmp_path)
    assert load_architecture_from_folder(folder).num_mtp_layers == 1
    assert find_folder_notices(folder) == []
    (folder / "model.safetensors").unlink()
    assert load_architecture_from_folder(folder).num_mtp_layers == 1
    assert load_architecture_and_dtype(str(folder / "config.json"))[0].num_mtp_layers == 1
    assert find_folder_notices(folder) == []


def test_a_value_model_has_no_mtp_layers_to_ignore(tmp_path: Path) -> None:
    folder = write_model(tmp_path, without=MTP_PREFIXES)
    assert load_architecture_from_folder(folder, head="value").num_mtp_layers == 0
    assert find_folder_notices(folder, head="value") == []


ONE_LABEL = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}


def classifier(name: str) -> dict[str, Any]:
    """The config.json that transformers writes for a value model."""
    architecture = CONFIGS[name]["architectures"][0].replace("ForCausalLM", "ForSequenceClassification")
    return CONFIGS[name] | ONE_LABEL | {"architectures": [architecture]}


@pytest.mark.parametrize("name", CONFIGS)
def test_value_model_has_score_tensor_instead_of_lm_head(name: str) -> None:
    lm = tiny(name)
    lm_tensors = lm.tensors("bfloat16")
    mtp_prefixes = tuple(f"model.layers.{lm.num_layers + i}." for i in range(lm.num_mtp_layers))
    trunk = {n: spec for n, spec in lm_tensors.items() if n != "lm_head.weight" and not n.startswith(mtp_prefixes)}
    for config in (classifier(name), CONFIGS[name]):
        value = load_architecture(config, origin="test", head="value")
        tensors = dict(value.tensors("bfloat16"))
        assert (tensors.pop("score.weight").shape, tensors) == ((1, lm.hidden_size), trunk)
        assert value.name == classifier(name)["architectures"][0]
        assert (value.head, value.tie_embeddings, value.duplicated_tensors()) == ("value", False, {})


WITHOUT_VALUE_MODEL = ("DeepseekV32", "Glm4Moe", "Glm4MoeLite", "GlmMoeDsa", "MiMo", "MiniMaxM2", "Qwen3_5Moe")
"""Families of which transformers has no value model; megarl's has the usual name."""


@pytest.mark.parametrize("architecture", FAMILY_READERS)
def test_transformers_has_every_architecture(architecture: str) -> None:
    import transformers

    assert hasattr(transformers, architecture) or architecture == "MiMoForCausalLM"
    value = VALUE_NAMES.get(architecture, architecture.replace("ForCausalLM", "ForSequenceClassification"))
    assert hasattr(transformers, value) == (architecture.removesuffix("ForCausalLM") not in WITHOUT_VALUE_MODEL)


def test_head_defaults_to_that_of_the_architecture() -> None:
    assert load_architecture(classifier("qwen3_moe"), origin="test", head=None).head == "value"
    assert load_architecture(CONFIGS["qwen3_moe"], origin="test", head=None) == tiny("qwen3_moe")


def test_score_tensor_is_optional_only_for_a_language_model_folder() -> None:
    value = load_architecture(CONFIGS["deepseek_v3"], origin="test", head="value")
    assert value.optional_tensors == ("score.weight",)
    assert value.ignored_patterns == (f"model.layers.{value.num_layers}.*", "lm_head.weight")
    value = load_architecture(classifier("deepseek_v3"), origin="test", head="value")
    assert value.optional_tensors == ()
    assert value.ignored_patterns == (f"model.layers.{value.num_layers}.*",)


def test_value_model_is_rejected_where_logits_are_needed() -> None:
    message = "test: Qwen3MoeForSequenceClassification has a value head and no logits; a language model is needed,"
    with pytest.raises(ConfigError, match=message):
        load_architecture(classifier("qwen3_moe"), origin="test")


@pytest.mark.parametrize(
    ("labels", "got"), [({"id2label": {"0": "no", "1": "yes"}}, 2), ({"num_labels": 3}, 3), ({}, 2)], ids=str
)
def test_classifier_with_several_labels_is_rejected(labels: dict[str, Any], got: int) -> None:
    config = {key: value for key, value in classifier("qwen3_moe").items() if key not in ONE_LABEL} | labels
    with pytest.raises(ConfigError, match=f"needs 1 label to be a value model, got {got}"):
        load_architecture(config, origin="test", head="value")


def test_classifier_of_unknown_family_is_rejected() -> None:
    config = {"architectures": ["GPT2ForSequenceClassification"]} | ONE_LABEL
    message = "architecture GPT2ForSequenceClassification is not supported, though no key"
    with pytest.raises(ConfigError, match=message):
        load_architecture(config, origin="test", head="value")


def test_every_tensor_rank_of_the_last_stage_holds_the_value_head() -> None:
    model = load_architecture(CONFIGS["deepseek_v3"], origin="test", head="value")
    grid = RankGrid(tp=2, dp=2, pp=2, ep=2)
    boxes = Counter()
    for rank, layout in enumerate(trainer_layouts(model, grid, "float32")):
        held = [piece for piece in layout.pieces if piece.tensor == "score.weight"]
        assert [piece.local for piece in held] == ["output_layer.weight"] * (grid.coordinates(rank).pp == 1)
        boxes.update(piece.box for piece in held)
    assert boxes == {((0, 1), (0, model.hidden_size)): 4}


def test_value_head_costs_less_than_lm_head() -> None:
    lm, value = tiny("qwen3_moe"), load_architecture(CONFIGS["qwen3_moe"], origin="test", head="value")
    saved = sequence_cost(lm).matmul_parameters - sequence_cost(value).matmul_parameters
    assert saved == lm.hidden_size * (lm.vocab_size - 1)


SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


def published_config(architecture: str, *sizes: int, **fields: int) -> dict[str, Any]:
    fixed = {"architectures": [f"{architecture}ForCausalLM"], "max_position_embeddings": 32768, "rms_norm_eps": 1e-6}
    return fixed | dict(zip(SIZES, sizes, strict=True)) | {"num_key_value_heads": 4} | fields


QWEN2 = published_config("Qwen2", 152064, 3584, 18944, 28, 28)
GEMMA2 = published_config("Gemma2", 256000, 2304, 9216, 26, 8)
EXPERTS = {"num_local_experts": 8, "num_experts_per_tok": 2}
MIXTRAL = published_config("Mixtral", 32000, 4096, 14336, 32, 32, num_key_value_heads=8, **EXPERTS)


def cost(config):
    return sequence_cost(load_architecture(config, origin="test"))


def test_qwen2_5_7b_matches_the_constant():
    assert cost(QWEN2) == QWEN2_5_7B


@pytest.mark.parametrize(
    ("config", "billions"),
    [
        (GEMMA2, 2.61),  # arXiv 2408.00118, table 2: 2,024,517,888 + 590 million of the tied embedding
        (MIXTRAL, 12.9 - 0.13),  # arXiv 2401.04088: 13 billion active, embedding included
        (published.DEEPSEEK_V3, 37.5 - 0.93),  # arXiv 2412.19437: 37 billion active; 0.93 of 37.5 are the embedding
    ],
    ids=["gemma2", "mixtral", "deepseek_v3"],
)
def test_active_parameters_match_the_papers(config, billions):
    assert cost(config).matmul_parameters / 1e9 == pytest.approx(billions, rel=0.01)


def test_an_indexer_selects_from_all_positions_those_that_are_attended_to():
    sparse = cost(published_folder("DeepSeek-V3.2-Exp"))
    assert (sparse.attention_layers, sparse.windowed_layers, sparse.window) == (61, 61, 2048)
    assert (sparse.attention_width, sparse.index_width) == (128 * (192 + 128), 61 * 64 * 128)


def test_windows_and_attention_widths():
    gemma = cost(GEMMA2)
    assert (gemma.attention_layers, gemma.windowed_layers, gemma.window) == (26, 13, 4096)
    assert gemma.attention_width == 8 * (256 + 256)
    assert cost(published.DEEPSEEK_V3).attention_width == 128 * (192 + 128)
