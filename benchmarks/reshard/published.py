"""Models in their published sizes, from their config.json content alone, and what an engine holds of them."""

from __future__ import annotations

from typing import Any

import numpy as np

from megarl.reshard.layout.layout import Columns, PieceTable, WeightLayout
from megarl.reshard.layout.model_tensors import ModelTensors, Names

DEEPSEEK_V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "first_k_dense_replace": 3,
    "num_nextn_predict_layers": 1,
    "max_position_embeddings": 163840,
    "rms_norm_eps": 1e-06,
    "tie_word_embeddings": False,
}
"""config.json content of DeepSeek-V3."""

QWEN3_8B: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
"""config.json content of Qwen3-8B."""

QWEN3_30B_A3B: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
"""config.json content of Qwen3-30B-A3B."""

BY_COLUMNS = ("o_proj", "down_proj")
ON_EVERY_RANK = ("q_a_proj", "kv_a_proj_with_mqa", "gate")
MTP_LAYER = "model.layers.61."
"""Prefix of the names of DeepSeek-V3's MTP layer, which engines do not load."""


def engine_layouts(tensors: ModelTensors, tp: int) -> list[WeightLayout]:
    """Return the layouts of an engine by tensor rank, without expert parallelism and without fused parameters.

    Norms, routers and down projections into a latent are replicated; all other tensors are split evenly.
    """
    names = [name for name in tensors if not name.startswith(MTP_LAYER)]
    shapes = np.array([(*tensors[name].shape, 1)[:2] for name in names])
    dims = np.array([len(tensors[name].shape) for name in names], np.int8)
    kinds = [name.split(".")[-2] for name in names]
    replicated = np.array([kind in ON_EVERY_RANK for kind in kinds]) | (dims == 1)
    dim = np.array([kind in BY_COLUMNS for kind in kinds]).astype(int)
    rows, every = np.arange(len(names)), np.arange(len(names), dtype=np.int32)
    layouts, locals_ = [], Names(names)
    for rank in range(tp):
        part = shapes[rows, dim] // tp
        boxes = np.stack([np.zeros_like(shapes), shapes], axis=-1)
        boxes[rows, dim] = np.stack([part * rank, part * (rank + 1)], axis=-1)
        boxes[replicated] = np.stack([np.zeros_like(shapes), shapes], axis=-1)[replicated]
        boxes = boxes.astype(np.int32)
        table = PieceTable(locals_, locals_, Columns(every, every, dims, boxes, boxes - boxes[..., :1]))
        layouts.append(WeightLayout(tensors, table))
    return layouts
