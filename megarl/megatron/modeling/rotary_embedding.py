"""RoPE frequencies, with scaling (linear, Llama 3, YaRN) computed by transformers.

megatron-core's own RoPE scaling is not used: it hard-codes Llama 3.1's context length and frequency factors.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor

from megarl.megatron.families.rope import Rope


def inverse_frequencies(rope: Rope, head_dim: int) -> Tensor:
    """Return the inverse frequencies in radians per token, float32 [head_dim / 2]."""
    return _scaled_frequencies(rope, head_dim)[0]


def attention_factor(rope: Rope, head_dim: int) -> float:
    """Return the factor that rotated queries and keys are each multiplied by (YaRN, arXiv 2309.00071, section 3.4)."""
    return _scaled_frequencies(rope, head_dim)[1]


def _scaled_frequencies(rope: Rope, head_dim: int) -> tuple[Tensor, float]:
    if rope.rope_type == "default":
        exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
        return 1.0 / (rope.theta**exponents), 1.0
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    # The attributes that transformers reads; a real config object would import half of transformers.
    config = SimpleNamespace(
        hidden_size=head_dim,
        num_attention_heads=1,
        head_dim=head_dim,
        max_position_embeddings=rope.max_positions,
        rope_parameters={"rope_type": rope.rope_type, "rope_theta": rope.theta, **dict(rope.scaling)},
        standardize_rope_params=lambda: None,
    )
    frequencies, factor = ROPE_INIT_FUNCTIONS[rope.rope_type](config, torch.device("cpu"))
    return frequencies, float(factor)
