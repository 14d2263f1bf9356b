"""Cost per token compared with published counts of active parameters."""

from __future__ import annotations

import pytest

from benchmarks.reshard.published import DEEPSEEK_V3
from megarl.batch.balance import QWEN2_5_7B
from megarl.megatron.families.cost import sequence_cost
from megarl.megatron.families.load_architecture import load_architecture

QWEN2 = {
    "architectures": ["Qwen2ForCausalLM"],
    "vocab_size": 152064,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
}
GEMMA2 = QWEN2 | {
    "architectures": ["Gemma2ForCausalLM"],
    "vocab_size": 256000,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
}
MIXTRAL = QWEN2 | {
    "architectures": ["MixtralForCausalLM"],
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}


def cost(config):
    return sequence_cost(load_architecture(config, origin="test"))


def test_qwen2_5_7b_matches_the_constant():
    assert cost(QWEN2) == QWEN2_5_7B


@pytest.mark.parametrize(
    ("config", "billions"),
    [
        (GEMMA2, 2.61),  # arXiv 2408.00118, table 2: 2,024,517,888 + 590 million of the tied embedding
        (MIXTRAL, 12.9 - 0.13),  # arXiv 2401.04088: 13 billion active, embedding included
        (DEEPSEEK_V3, 37.5 - 0.93),  # arXiv 2412.19437: 37 billion active; 0.93 of 37.5 are the embedding
    ],
    ids=["gemma2", "mixtral", "deepseek_v3"],
)
def test_active_parameters_match_the_papers(config, billions):
    assert cost(config).matmul_parameters / 1e9 == pytest.approx(billions, rel=0.01)


def test_windows_and_attention_widths():
    gemma = cost(GEMMA2)
    assert (gemma.attention_layers, gemma.windowed_layers, gemma.window) == (26, 13, 4096)
    assert gemma.attention_width == 8 * (256 + 256)
    assert cost(DEEPSEEK_V3).attention_width == 128 * (192 + 128)
