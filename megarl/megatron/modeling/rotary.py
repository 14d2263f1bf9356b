"""Frequencies of rotary position embeddings, those of transformers for every scaling (linear, Llama 3, YaRN).

megatron-core hard-codes Llama 3.1's context length and frequency factors.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor

from megarl.megatron.families.attention import GroupedQueryAttention, Rope


def inverse_frequencies(rope: Rope, head_dim: int) -> Tensor:
    """Return the inverse frequencies in radians per token, float32 [rotated dimensions / 2]."""
    return _scaled_frequencies(rope, head_dim)[0]


def attention_factor(rope: Rope, head_dim: int) -> float:
    """Return the factor that rotated queries and keys are each multiplied by (YaRN, arXiv 2309.00071, section 3.4)."""
    return _scaled_frequencies(rope, head_dim)[1]


def score_scale(attention: GroupedQueryAttention) -> float:
    """Return the factor of the attention scores, with the square of `attention_factor`."""
    scale = attention.scale if attention.scale is not None else attention.head_dim**-0.5
    return scale * attention_factor(attention.rope, attention.head_dim) ** 2


def _scaled_frequencies(rope: Rope, head_dim: int) -> tuple[Tensor, float]:
    if rope.rope_type == "default":
        rotated = int(head_dim * rope.fraction)
        exponents = torch.arange(0, rotated, 2, dtype=torch.int64).float() / rotated
        return 1.0 / (rope.theta**exponents), 1.0
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    # The attributes that transformers reads; a real config object would import half of transformers.
    parameters = {"rope_type": rope.rope_type, "rope_theta": rope.theta, "partial_rotary_factor": rope.fraction}
    config = SimpleNamespace(
        hidden_size=head_dim,
        num_attention_heads=1,
        head_dim=head_dim,
        max_position_embeddings=rope.max_positions,
        rope_parameters=parameters | dict(rope.scaling),
        standardize_rope_params=lambda: None,
    )
    frequencies, factor = ROPE_INIT_FUNCTIONS[rope.rope_type](config, torch.device("cpu"))
    return frequencies, float(factor)
