"""Hugging Face names and shapes of each family compared with transformers, and spellings of megatron-core names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megarl.errors import ConfigError
from megarl.megatron.families.load_architecture import load_architecture
from tests.megatron.families.tiny import CONFIGS, DEEPSEEK_V3, PLAIN, QWEN3_MOE, tiny


@pytest.mark.parametrize("name", CONFIGS)
def test_tensors_match_a_published_checkpoint(name: str, tmp_path: Path) -> None:
    from megarl.rollout.sglang.weight_layout.trace_child import checkpoint_tensors

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
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel is not supported; supported are .*DeepseekV3"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config needs .* got weight_block_size None"),
        ({"attention_bias": True}, "attention_bias True is not supported; supported is False"),
        ({"hidden_act": "relu"}, "hidden_act relu is not supported; supported is silu"),
        ({"rope_interleave": False}, "rope_interleave False is not supported; supported is True"),
        ({"norm_topk_prob": False}, "norm_topk_prob False is not supported; supported is True"),
        ({"topk_group": 1}, r"num_experts_per_tok needs to be 2 \* topk_group, got 4 != 2 \* 1 = 2"),
        ({"kv_lora_rank": None}, "kv_lora_rank: .*, got None"),
        ({"num_hidden_layers": 0}, "num_hidden_layers: Input should be greater than 0, got 0"),
        ({"num_key_value_heads": 3}, r"needs to divide num_attention_heads, got 4 % 3 = 1"),
        (
            {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
            "rope type dynamic is not supported; supported are default",
        ),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope type yarn needs factor"),
    ],
)
def test_unsupported_configs_raise(change: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_architecture(DEEPSEEK_V3 | change, origin="test")
