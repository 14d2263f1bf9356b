"""Tiny models of every family, and their Megatron parameters made by independent code."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from megarl.megatron.families.decoder import Decoder
from megarl.megatron.families.read import read_family

Arrays = dict[str, np.ndarray]

QWEN3_MOE: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 331,
    "hidden_size": 48,
    "intermediate_size": 80,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [1],
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
DEEPSEEK_V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "vocab_size": 331,
    "hidden_size": 48,
    "intermediate_size": 80,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 20,
    "kv_lora_rank": 28,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 1,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
CONFIGS = {
    "qwen3_moe": QWEN3_MOE,
    "qwen3_moe tied": QWEN3_MOE | {"tie_word_embeddings": True, "mlp_only_layers": [], "decoder_sparse_step": 2},
    "deepseek_v3": DEEPSEEK_V3,
    "deepseek_v3 without query latent": DEEPSEEK_V3 | {"q_lora_rank": None, "num_nextn_predict_layers": 0},
}
PUBLISHED_DEEPSEEK_V3 = DEEPSEEK_V3 | {
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "first_k_dense_replace": 3,
}
"""Of the published size."""


def tiny(name: str) -> Decoder:
    return read_family(CONFIGS[name], origin=name)


def random_tensors(model: Decoder) -> Arrays:
    rng = np.random.default_rng(0)
    return {name: rng.normal(size=spec.shape) for name, spec in model.tensors("float32").items()}


def shard(full: np.ndarray, shape: tuple[int, ...], rank: int, size: int, *, halves: bool) -> np.ndarray:
    """The part of a parameter that rank `rank` of `size` holds, the split dimension read off `shape`."""
    if full.shape == shape:
        return full
    (dim,) = (i for i in range(full.ndim) if full.shape[i] != shape[i])
    if halves:
        return np.concatenate([np.split(half, size)[rank] for half in np.split(full, 2)])
    return np.split(full, size, axis=dim)[rank]


def full_parameter(name: str, hf: Arrays, config: dict[str, Any], padded_vocab: int) -> np.ndarray:
    """The megatron-core parameter `name`, layers and experts numbered globally, before it is sharded."""
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    if name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        tied = name.startswith("embedding") or config["tie_word_embeddings"]
        rows = hf["model.embed_tokens.weight" if tied else "lm_head.weight"]
        return np.concatenate([rows, np.zeros((padded_vocab - len(rows), hidden))])
    if name == "decoder.final_layernorm.weight":
        return hf["model.norm.weight"]
    block, number, rest = re.fullmatch(r"(decoder|mtp)\.layers\.(\d+)\.(.+)", name).groups()
    theirs = f"model.layers.{int(number) + (layers if block == 'mtp' else 0)}."
    if block == "mtp" and not rest.startswith("transformer_layer."):
        return hf[theirs + rest.replace("final_layernorm", "shared_head.norm")]
    return _in_layer(rest.removeprefix("transformer_layer."), theirs, hf, config)


def _in_layer(name: str, theirs: str, hf: Arrays, config: dict[str, Any]) -> np.ndarray:
    if name == "self_attention.linear_qkv.weight":
        groups = config["num_key_value_heads"]
        q, k, v = (hf[f"{theirs}self_attn.{x}_proj.weight"].reshape(groups, -1, config["hidden_size"]) for x in "qkv")
        return np.concatenate([q, k, v], axis=1).reshape(-1, config["hidden_size"])
    linear = re.fullmatch(r"mlp\.(?:experts\.local_experts\.(\d+)\.|(shared_experts)\.)?linear_fc([12])\.weight", name)
    if linear:
        mlp = theirs + "mlp." + (f"experts.{linear[1]}." if linear[1] else "shared_experts." if linear[2] else "")
        if linear[3] == "2":
            return hf[mlp + "down_proj.weight"]
        return np.concatenate([hf[mlp + "gate_proj.weight"], hf[mlp + "up_proj.weight"]])
    latent = "kv_lora_rank" in config
    renamed = {
        "input_layernorm": "input_layernorm",
        "pre_mlp_layernorm": "post_attention_layernorm",
        "self_attention.linear_proj": "self_attn.o_proj",
        "self_attention.q_layernorm": "self_attn.q_a_layernorm" if latent else "self_attn.q_norm",
        "self_attention.k_layernorm": "self_attn.k_norm",
        "self_attention.kv_layernorm": "self_attn.kv_a_layernorm",
        "self_attention.linear_q_proj": "self_attn.q_proj",
        "self_attention.linear_q_down_proj": "self_attn.q_a_proj",
        "self_attention.linear_q_up_proj": "self_attn.q_b_proj",
        "self_attention.linear_kv_down_proj": "self_attn.kv_a_proj_with_mqa",
        "self_attention.linear_kv_up_proj": "self_attn.kv_b_proj",
        "mlp.router": "mlp.gate",
    }
    if name == "mlp.router.expert_bias":
        return hf[theirs + "mlp.gate.e_score_correction_bias"]
    return hf[theirs + renamed[name.removesuffix(".weight")] + ".weight"]
