"""The tables' Hugging Face names and shapes against transformers; their spellings of megatron-core's names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megarl.errors import ConfigError
from megarl.megatron.families.load_architecture import read_family
from tests.megatron.families.tiny import CONFIGS, DEEPSEEK_V3, QWEN3_MOE, tiny


@pytest.mark.parametrize("name", CONFIGS)
def test_tensors_are_those_of_a_published_checkpoint(name: str, tmp_path: Path) -> None:
    from megarl.rollout.sglang.weight_layout.trace_child import checkpoint_tensors

    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[name]))
    published = {tensor: spec.shape for tensor, spec in checkpoint_tensors(str(tmp_path), "float32").items()}
    ours = {tensor: spec.shape for tensor, spec in tiny(name).tensors("float32").items()}
    further = {tensor for tensor in ours if tensor.startswith("model.layers.4.")}
    assert {tensor: shape for tensor, shape in ours.items() if tensor not in further} == published
    # transformers leaves the layer out that predicts a further token: it is a decoder layer with four tensors more
    if further:
        same = {tensor.replace("layers.3.", "layers.4.") for tensor in ours if ".layers.3." in tensor}
        added = {f"model.layers.4.{x}.weight" for x in ("enorm", "hnorm", "eh_proj", "shared_head.norm")}
        assert further == same | added
        assert ours["model.layers.4.eh_proj.weight"] == (48, 96)


def test_only_the_routers_bias_has_a_dtype_of_its_own() -> None:
    other = {name for name, spec in tiny("deepseek_v3").tensors("bfloat16").items() if spec.dtype != "bfloat16"}
    assert other == {f"model.layers.{i}.mlp.gate.e_score_correction_bias" for i in (1, 2, 3, 4)}
    assert {tiny("deepseek_v3").tensors("bfloat16")[name].dtype for name in other} == {"float32"}


@pytest.mark.parametrize("name", CONFIGS)
def test_every_name_is_found_again(name: str) -> None:
    model = tiny(name)
    maps = model.maps()
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
def test_transformer_engines_spellings(fused: str, plain: str) -> None:
    model = tiny("deepseek_v3")
    for prefix in ("decoder.layers.2.", "mtp.layers.0.transformer_layer."):
        assert model.parameter_map(prefix + fused) == model.parameter_map(prefix + plain)


def test_both_names_of_the_number_of_experts_are_read() -> None:
    assert read_family(QWEN3_MOE, origin="test").num_experts == 8
    renamed = {("num_local_experts" if key == "num_experts" else key): value for key, value in QWEN3_MOE.items()}
    assert read_family(renamed, origin="test").num_experts == 8


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel is not supported; supported are .*DeepseekV3"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config is not supported"),
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
def test_refusals(change: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_family(DEEPSEEK_V3 | change, origin="test")
