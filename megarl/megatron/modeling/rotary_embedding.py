"""Frequencies of rotary embeddings, computed by transformers.

megarl does not use megatron-core's own stretching, which hard-codes Llama 3.1's context length and frequency factors.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor

from megarl.megatron.families.rope import Rope


def inverse_frequencies(rope: Rope, head_dim: int) -> Tensor:
    """float32 [head_dim / 2]: radians per token."""
    return _stretched(rope, head_dim)[0]


def attention_factor(rope: Rope, head_dim: int) -> float:
    """What turned queries and keys are multiplied by, each (YaRN, arXiv 2309.00071, section 3.4)."""
    return _stretched(rope, head_dim)[1]


def _stretched(rope: Rope, head_dim: int) -> tuple[Tensor, float]:
    if rope.kind == "default":
        exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
        return 1.0 / (rope.theta**exponents), 1.0
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    # All that transformers reads of a model's configuration; making one of its own imports half of transformers.
    config = SimpleNamespace(
        hidden_size=head_dim,
        num_attention_heads=1,
        head_dim=head_dim,
        max_position_embeddings=rope.max_positions,
        rope_parameters={"rope_type": rope.kind, "rope_theta": rope.theta, **dict(rope.scaling)},
        standardize_rope_params=lambda: None,
    )
    frequencies, factor = ROPE_INIT_FUNCTIONS[rope.kind](config, torch.device("cpu"))
    return frequencies, float(factor)
