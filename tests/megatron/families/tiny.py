"""Tiny config.json contents of mixture-of-experts models, and that of the published DeepSeek-V3."""

from __future__ import annotations

from typing import Any

from megarl.megatron.families.architecture import ModelArchitecture
from megarl.megatron.families.load_architecture import load_architecture

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


def tiny(name: str) -> ModelArchitecture:
    return load_architecture(CONFIGS[name], origin=name)
