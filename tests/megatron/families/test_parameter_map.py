"""Compares the shard pieces of parameter maps with Megatron shards built by independent code from random tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from megarl.megatron.families.architecture import ModelArchitecture
from megarl.megatron.families.load_architecture import load_architecture
from megarl.megatron.families.parameter_map import shard_pieces
from megarl.reshard.layout.layout import slices

Arrays = dict[str, np.ndarray]

CASES = [
    pytest.param(tp, {"architecture": architecture, "kv_heads": kv_heads, "tied": tied}, id=f"tp{tp}-{name}")
    for tp in (1, 2, 4, 8)
    for name, architecture, kv_heads, tied in (
        ("qwen3", "Qwen3ForCausalLM", 8, False),
        ("qwen2 tied", "Qwen2ForCausalLM", 8, True),
        ("qwen2 two kv heads", "Qwen2ForCausalLM", 2, False),
        ("qwen3 one kv head", "Qwen3ForCausalLM", 1, False),
    )
]
HEADS, HEAD_DIM, HIDDEN, FFN, VOCAB, LAYERS = 16, 4, 10, 24, 331, 2
PADDED_VOCAB = 336
"""Vocabulary size padded to a multiple of 16."""


def make_model(architecture: str, kv_heads: int, tied: bool) -> ModelArchitecture:
    config: dict[str, Any] = {
        "architectures": [architecture],
        "num_hidden_layers": LAYERS,
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_attention_heads": HEADS,
        "num_key_value_heads": kv_heads,
        "head_dim": HEAD_DIM,
        "vocab_size": VOCAB,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": tied,
    }
    return load_architecture(config, origin="test")


def random_tensors(model: ModelArchitecture) -> Arrays:
    rng = np.random.default_rng(0)
    return {name: rng.normal(size=spec.shape) for name, spec in model.tensors("float32").items()}


def shard_over_ranks(hf: Arrays, model: ModelArchitecture, tp: int) -> list[Arrays]:
    """The parameters of every tensor-parallel rank, sharded as in megatron-core."""
    return [shard_of_rank(hf, model, tp, rank) for rank in range(tp)]


def shard_of_rank(hf: Arrays, model: ModelArchitecture, tp: int, rank: int) -> Arrays:
    out = {"decoder.final_layernorm.weight": hf["model.norm.weight"]}
    head = "model.embed_tokens.weight" if model.tie_embeddings else "lm_head.weight"
    embeddings = {"embedding.word_embeddings.weight": "model.embed_tokens.weight", "output_layer.weight": head}
    for name, source in embeddings.items():
        padded = np.concatenate([hf[source], np.zeros((PADDED_VOCAB - VOCAB, HIDDEN))])
        out[name] = np.split(padded, tp)[rank]
    for layer in range(LAYERS):
        hf_prefix, mcore_prefix = f"model.layers.{layer}.", f"decoder.layers.{layer}."
        for kind in ("weight", "bias") if model.attention.qkv_bias else ("weight",):
            out[f"{mcore_prefix}self_attention.linear_qkv.{kind}"] = np.split(
                fused_qkv(hf, hf_prefix, kind, model), tp
            )[rank]
        gate, up = (np.split(hf[f"{hf_prefix}mlp.{x}_proj.weight"], tp)[rank] for x in ("gate", "up"))
        out[f"{mcore_prefix}mlp.linear_fc1.weight"] = np.concatenate([gate, up])
        out[f"{mcore_prefix}mlp.linear_fc2.weight"] = np.split(hf[f"{hf_prefix}mlp.down_proj.weight"], tp, axis=1)[rank]
        out[f"{mcore_prefix}self_attention.linear_proj.weight"] = np.split(
            hf[f"{hf_prefix}self_attn.o_proj.weight"], tp, 1
        )[rank]
        out[f"{mcore_prefix}input_layernorm.weight"] = hf[f"{hf_prefix}input_layernorm.weight"]
        out[f"{mcore_prefix}pre_mlp_layernorm.weight"] = hf[f"{hf_prefix}post_attention_layernorm.weight"]
        if model.attention.qk_norm:
            out[f"{mcore_prefix}self_attention.q_layernorm.weight"] = hf[f"{hf_prefix}self_attn.q_norm.weight"]
            out[f"{mcore_prefix}self_attention.k_layernorm.weight"] = hf[f"{hf_prefix}self_attn.k_norm.weight"]
    return out


def fused_qkv(hf: Arrays, prefix: str, kind: str, model: ModelArchitecture) -> np.ndarray:
    """The fused projection [groups * (query heads of the group + key head + value head) * head_dim, ...]."""
    groups = model.attention.num_kv_heads
    q, k, v = (hf[f"{prefix}self_attn.{x}_proj.{kind}"] for x in "qkv")
    rest = q.shape[1:]
    parts = (x.reshape(groups, -1, HEAD_DIM, *rest) for x in (q, k, v))
    return np.concatenate(list(parts), axis=1).reshape(-1, *rest)


@pytest.mark.parametrize(("tp", "family"), CASES)
def test_pieces_locate_every_element(tp: int, family: dict[str, Any]) -> None:
    model = make_model(**family)
    hf = random_tensors(model)
    held = {name: np.zeros(array.shape, int) for name, array in hf.items()}
    shards = shard_over_ranks(hf, model, tp)
    assert set(shards[0]) == set(model.parameter_maps())
    for rank, shard in enumerate(shards):
        for name, parameter in shard.items():
            covered = np.zeros(parameter.shape, int)
            for piece in shard_pieces(name, model.parameter_map(name), parameter.shape, rank=rank, size=tp):
                assert piece.local == name
                here, there = parameter[slices(piece.local_box)], hf[piece.tensor][slices(piece.box)]
                assert np.array_equal(here, there), (name, piece)
                covered[slices(piece.local_box)] += 1
                held[piece.tensor][slices(piece.box)] += 1
            # elements that no piece covers are padding
            assert covered.max() == 1 or not parameter.any()
            assert not parameter[covered == 0].any(), name
    tied = {"model.embed_tokens.weight"} if model.tie_embeddings else set()
    for name, count in held.items():
        replicated = "norm" in name
        assert (count == (tp if replicated else 2 if name in tied else 1)).all(), name


def test_rank_that_holds_only_padding_has_no_pieces() -> None:
    model = make_model("Qwen3ForCausalLM", 8, False)
    name = "output_layer.weight"
    mapping = model.parameter_map(name)
    rows = 128  # 331 rows on 4 ranks of 128: the last one holds nothing but padding
    counts = [list(shard_pieces(name, mapping, (rows, HIDDEN), rank=rank, size=4)) for rank in range(4)]
    assert [len(c) for c in counts] == [1, 1, 1, 0]
    assert counts[2][0].box[0] == (256, 331)
    assert counts[2][0].local_box[0] == (0, 75)


def test_fused_norms_map_to_the_same_tensors_as_separate_norms() -> None:
    model = make_model("Qwen3ForCausalLM", 8, False)
    for fused, plain in (
        ("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight"),
        ("mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight"),
    ):
        assert model.parameter_map(f"decoder.layers.1.{fused}") == model.parameter_map(f"decoder.layers.1.{plain}")


def test_shards_too_small_for_the_tensor_fail_an_assertion() -> None:
    model = make_model("Qwen3ForCausalLM", 8, False)
    mapping = model.parameter_map("output_layer.weight")
    with pytest.raises(AssertionError, match="331 rows do not fit 2 shards of 165"):
        list(shard_pieces("output_layer.weight", mapping, (165, HIDDEN), rank=0, size=2))
