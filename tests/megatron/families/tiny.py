"""Tiny config.json contents of mixture-of-experts models, and that of the published DeepSeek-V3."""

from typing import Any

from megarl.megatron.families.architecture import ModelArchitecture
from megarl.megatron.families.load_architecture import load_architecture
from tests.megatron.fidelity import models


def _config(name: str, architecture: str, **changes: Any) -> dict[str, Any]:
    """Return the config.json of a model of `tests/megatron/fidelity/models.py` with fewer settings, for tp 4."""
    config = {key: value for key, value in models.CONFIGS[name].items() if key != "rope_parameters"}
    return config | {"architectures": [architecture], "max_position_embeddings": 64} | changes


QWEN3_MOE = _config("qwen3_moe", "Qwen3MoeForCausalLM", num_attention_heads=8, num_key_value_heads=4)
DEEPSEEK_V3 = _config("deepseek_v3", "DeepseekV3ForCausalLM", num_attention_heads=4, num_key_value_heads=4)
CONFIGS = {
    "qwen3_moe": QWEN3_MOE,
    "qwen3_moe tied": QWEN3_MOE | {"tie_word_embeddings": True, "mlp_only_layers": [], "decoder_sparse_step": 2},
    "deepseek_v3": DEEPSEEK_V3,
    "deepseek_v3 without query latent": DEEPSEEK_V3 | {"q_lora_rank": None, "num_nextn_predict_layers": 0},
}
PLAIN: dict[str, Any] = {"vocab_size": 331, "hidden_size": 2048, "intermediate_size": 80, "num_hidden_layers": 2}
PLAIN |= {"num_attention_heads": 32, "max_position_embeddings": 64, "rms_norm_eps": 1e-6}
"""The keys that every config.json needs."""


def tiny(name: str) -> ModelArchitecture:
    return load_architecture(CONFIGS[name], origin=name)
