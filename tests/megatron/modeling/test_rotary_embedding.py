"""RoPE frequencies with scaling, compared with transformers' own models."""

from __future__ import annotations

import pytest
import torch

from megarl.megatron.families.rope import Rope
from megarl.megatron.modeling.rotary_embedding import attention_factor, inverse_frequencies

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
KINDS = [{}, LLAMA3, {"rope_type": "linear", "factor": 4.0}, YARN, YARN | {"beta_fast": 16.0, "attention_factor": 0.9}]


@pytest.mark.parametrize("scaling", KINDS, ids=lambda scaling: scaling.get("rope_type", "default"))
def test_frequencies_match_transformers(scaling):
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    rope = Rope.read(scaling, theta=5e5, max_positions=512, origin="test")
    config = LlamaConfig(
        hidden_size=96,
        num_attention_heads=6,
        max_position_embeddings=512,
        rope_parameters={"rope_type": "default", "rope_theta": 5e5, **scaling},
    )
    expected = LlamaRotaryEmbedding(config)
    assert torch.equal(inverse_frequencies(rope, 16), expected.inv_freq)
    assert attention_factor(rope, 16) == expected.attention_scaling
