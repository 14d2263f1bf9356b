"""Bytes of activations against the formulas of Korthikanti et al. and counted tensors."""

import pytest

from benchmarks.reshard.published import DEEPSEEK_V3, QWEN3_8B
from megarl.config.trainer import ParallelConfig, RecomputeConfig
from megarl.device_memory.activations import (
    HEAD_PEAK_FLOAT32,
    HEAD_PEAK_FUSED,
    TokenLoad,
    chunks_in_flight,
    head_bytes,
    layer_activations,
    stage_activations,
)
from megarl.megatron.families.load_architecture import load_architecture

SIZES = {"hidden_size": 1536, "intermediate_size": 4096, "num_attention_heads": 12, "num_key_value_heads": 12}
GPT = load_architecture(QWEN3_8B | SIZES | {"head_dim": 128}, origin="config.json")
"""All heads together are as wide as the hidden size, and the gated MLP is 8/3 of it: it stores as much as the paper's
MLP without gate, of 4 times the hidden size."""
LOAD = TokenLoad(tokens=1000, element_bytes=2)


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_a_layer_stores_what_the_paper_counts(tp):
    """arXiv 2205.05198, equation 4 with fused attention: 34 sbh / t; less 2 for dropout masks, and 4 more for RoPE."""
    parts = layer_activations(GPT, 0, ParallelConfig(tp=tp), LOAD)
    without_softmax = sum(parts.values()) - parts["core_attn"]
    assert without_softmax == (34 - 2 + 4) * 1000 * GPT.hidden_size // tp


def test_without_sequence_parallelism_norms_are_replicated():
    """The paper's table 2: 10 of the 34 are not divided by t, two of them for dropout masks."""
    whole, split = (
        layer_activations(GPT, 0, ParallelConfig(tp=4, sequence_parallel=sequence), LOAD) for sequence in (False, True)
    )
    replicated = sum(whole.values()) - sum(split.values())
    assert replicated == (10 - 2) * 1000 * GPT.hidden_size * 3 // 4


def test_full_recomputation_keeps_the_input_of_each_layer():
    """The paper: 2 sbh per layer, and one layer while it is recomputed."""
    everything = sum(layer_activations(GPT, 0, ParallelConfig(), LOAD).values())
    (full,) = stage_activations(GPT, ParallelConfig(), RecomputeConfig(granularity="full"), LOAD)
    assert full.stored == 36 * 2 * 1000 * GPT.hidden_size
    assert full.recomputed == everything
    (blocks,) = stage_activations(GPT, ParallelConfig(), RecomputeConfig(granularity="full", layers=4), LOAD)
    assert (blocks.stored, blocks.recomputed) == (full.stored // 4, 4 * everything)
    part = RecomputeConfig(granularity="full", method="block", layers=30)
    (block,) = stage_activations(GPT, ParallelConfig(), part, LOAD)
    assert (block.stored, block.recomputed) == (full.stored // 36 * 30 + 6 * everything, everything)


def test_selective_recomputation_drops_its_modules():
    (none,) = stage_activations(GPT, ParallelConfig(), RecomputeConfig(), LOAD)
    parts = layer_activations(GPT, 0, ParallelConfig(), LOAD)
    some = RecomputeConfig(granularity="selective", modules=("mlp", "layernorm"))
    (selective,) = stage_activations(GPT, ParallelConfig(), some, LOAD)
    dropped = parts["mlp"] + parts["layernorm"]
    assert (selective.stored, selective.recomputed) == (none.stored - 36 * dropped, dropped)


def test_recomputation_of_experts_includes_shared_experts():
    model = load_architecture(DEEPSEEK_V3, origin="config.json")
    none, moe = (
        stage_activations(model, ParallelConfig(), recompute, LOAD)[0].stored
        for recompute in (RecomputeConfig(), RecomputeConfig(granularity="selective", modules=("moe",)))
    )
    parts = layer_activations(model, 3, ParallelConfig(), LOAD)
    assert none - moe == 58 * (parts["moe"] + parts["moe_act"] + parts["shared_experts"])


def test_micro_batches_in_flight():
    assert [chunks_in_flight(ParallelConfig(pp=4), stage) for stage in range(4)] == [4, 3, 2, 1]
    for pp, vpp in ((4, 2), (2, 3)):
        # the paper, section 4.2.3: interleaved, the first stage stores 1 + (p - 1) / (p m) times as much
        factor = 1 + (pp - 1) / (pp * vpp)
        assert chunks_in_flight(ParallelConfig(pp=pp, vpp=vpp), 0) == pytest.approx(pp * vpp * factor)


def test_the_head_is_on_the_last_stage():
    first, last = stage_activations(GPT, ParallelConfig(pp=2), RecomputeConfig(), LOAD, head_peak=HEAD_PEAK_FLOAT32)
    assert first.head == 0
    assert last.head == 2 * 2 * 1000 * 1536 + int(1.2 * 4 * 1000 * 151936)
    assert first.stored == 2 * last.stored
    fused = head_bytes(GPT, 2, LOAD, HEAD_PEAK_FUSED)
    assert fused == 2 * 2 * 1000 * 1536 + int(0.1 * 4 * 1000 * 151936 / 2)
    value = GPT.with_value_head(from_lm=True)
    assert head_bytes(value, 1, LOAD, HEAD_PEAK_FUSED) == 2 * 2 * 1000 * 1536


def test_experts_store_what_they_receive():
    """DeepSeek-V3: 8 of 256 experts of width 2,048 for each token, and latents that tp does not divide."""
    model = load_architecture(DEEPSEEK_V3, origin="config.json")
    parts = layer_activations(model, 3, ParallelConfig(), LOAD)
    assert parts["moe_act"] == 2 * 8000 * 2048
    assert parts["moe"] == 2 * 8000 * (7168 + 2 * 2048 + 7168) + 1000 * (4 * 256 + 8 * 8)
    assert parts["shared_experts"] == 2 * 1000 * 3 * 2048
    assert "moe" not in layer_activations(model, 0, ParallelConfig(), LOAD)
    latents = 2 * 1000 * (2 * (1536 + 512) + 64)
    for tp in (1, 4):
        split = layer_activations(model, 0, ParallelConfig(tp=tp), LOAD)
        assert split["attention"] == latents + 2 * 1000 * 128 * 128 // tp
        assert split["mla_up_proj"] == 2 * 1000 * 128 * (192 + 192 + 256) // tp
