"""Megatron shards made of random Hugging Face tensors by independent code, and what the pieces say lies where."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from megarl.megatron.families.architecture import Decoder
from megarl.megatron.families.load_architecture import read_family
from megarl.megatron.families.parameter_map import pieces
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
"""What the vocabulary becomes when it is padded to divide by 16."""


def make_model(architecture: str, kv_heads: int, tied: bool) -> Decoder:
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
    return read_family(config, origin="test")


def random_tensors(model: Decoder) -> Arrays:
    rng = np.random.default_rng(0)
    return {name: rng.normal(size=spec.shape) for name, spec in model.tensors("float32").items()}


def shards_of(hf: Arrays, model: Decoder, tp: int) -> list[Arrays]:
    """Every rank's parameters, as megatron-core shards them."""
    return [rank_of(hf, model, tp, rank) for rank in range(tp)]


def rank_of(hf: Arrays, model: Decoder, tp: int, rank: int) -> Arrays:
    out = {"decoder.final_layernorm.weight": hf["model.norm.weight"]}
    head = "model.embed_tokens.weight" if model.tie_embeddings else "lm_head.weight"
    embeddings = {"embedding.word_embeddings.weight": "model.embed_tokens.weight", "output_layer.weight": head}
    for name, source in embeddings.items():
        padded = np.concatenate([hf[source], np.zeros((PADDED_VOCAB - VOCAB, HIDDEN))])
        out[name] = np.split(padded, tp)[rank]
    for layer in range(LAYERS):
        theirs, ours = f"model.layers.{layer}.", f"decoder.layers.{layer}."
        for kind in ("weight", "bias") if model.attention.qkv_bias else ("weight",):
            out[f"{ours}self_attention.linear_qkv.{kind}"] = np.split(fused_qkv(hf, theirs, kind, model), tp)[rank]
        gate, up = (np.split(hf[f"{theirs}mlp.{x}_proj.weight"], tp)[rank] for x in ("gate", "up"))
        out[f"{ours}mlp.linear_fc1.weight"] = np.concatenate([gate, up])
        out[f"{ours}mlp.linear_fc2.weight"] = np.split(hf[f"{theirs}mlp.down_proj.weight"], tp, axis=1)[rank]
        out[f"{ours}self_attention.linear_proj.weight"] = np.split(hf[f"{theirs}self_attn.o_proj.weight"], tp, 1)[rank]
        out[f"{ours}input_layernorm.weight"] = hf[f"{theirs}input_layernorm.weight"]
        out[f"{ours}pre_mlp_layernorm.weight"] = hf[f"{theirs}post_attention_layernorm.weight"]
        if model.attention.qk_norm:
            out[f"{ours}self_attention.q_layernorm.weight"] = hf[f"{theirs}self_attn.q_norm.weight"]
            out[f"{ours}self_attention.k_layernorm.weight"] = hf[f"{theirs}self_attn.k_norm.weight"]
    return out


def fused_qkv(hf: Arrays, prefix: str, kind: str, model: Decoder) -> np.ndarray:
    """[groups, query heads of the group + key head + value head, head_dim, ...], flattened."""
    groups = model.attention.num_kv_heads
    q, k, v = (hf[f"{prefix}self_attn.{x}_proj.{kind}"] for x in "qkv")
    rest = q.shape[1:]
    parts = (x.reshape(groups, -1, HEAD_DIM, *rest) for x in (q, k, v))
    return np.concatenate(list(parts), axis=1).reshape(-1, *rest)


@pytest.mark.parametrize(("tp", "family"), CASES)
def test_pieces_are_where_the_elements_are(tp: int, family: dict[str, Any]) -> None:
    model = make_model(**family)
    hf = random_tensors(model)
    held = {name: np.zeros(array.shape, int) for name, array in hf.items()}
    shards = shards_of(hf, model, tp)
    assert set(shards[0]) == set(model.maps())
    for rank, shard in enumerate(shards):
        for name, parameter in shard.items():
            covered = np.zeros(parameter.shape, int)
            for piece in pieces(name, model.parameter_map(name), parameter.shape, rank=rank, size=tp):
                assert piece.local == name
                here, there = parameter[slices(piece.local_box)], hf[piece.tensor][slices(piece.box)]
                assert np.array_equal(here, there), (name, piece)
                covered[slices(piece.local_box)] += 1
                held[piece.tensor][slices(piece.box)] += 1
            # what no piece covers is padding
            assert covered.max() == 1 or not parameter.any()
            assert not parameter[covered == 0].any(), name
    tied = {"model.embed_tokens.weight"} if model.tie_embeddings else set()
    for name, count in held.items():
        replicated = "norm" in name
        assert (count == (tp if replicated else 2 if name in tied else 1)).all(), name


def test_padding_past_a_whole_shard_gives_a_rank_without_pieces() -> None:
    model = make_model("Qwen3ForCausalLM", 8, False)
    name = "output_layer.weight"
    mapping = model.parameter_map(name)
    rows = 128  # 331 rows on 4 ranks of 128: the last one holds nothing but padding
    counts = [list(pieces(name, mapping, (rows, HIDDEN), rank=rank, size=4)) for rank in range(4)]
    assert [len(c) for c in counts] == [1, 1, 1, 0]
    assert counts[2][0].box[0] == (256, 331)
    assert counts[2][0].local_box[0] == (0, 75)


def test_names_of_fused_norms_are_those_of_the_norms() -> None:
    model = make_model("Qwen3ForCausalLM", 8, False)
    for fused, plain in (
        ("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight"),
        ("mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight"),
    ):
        assert model.parameter_map(f"decoder.layers.1.{fused}") == model.parameter_map(f"decoder.layers.1.{plain}")


def test_shards_that_are_too_small_are_a_mistake() -> None:
    model = make_model("Qwen3ForCausalLM", 8, False)
    mapping = model.parameter_map("output_layer.weight")
    with pytest.raises(AssertionError, match="331 rows do not fit 2 shards of 165"):
        list(pieces("output_layer.weight", mapping, (165, HIDDEN), rank=0, size=2))
