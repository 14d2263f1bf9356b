"""Models of a given size, all of whose dimensions are multiples of 1, 2, 3, 4, 6 and 8, and their engine layouts.

hidden H = 48 k    query heads 48, key-value heads 24, each 2 k wide    MLP 3 H    8 layers    vocabulary 1536

The mixture of experts has 24 experts of H / 2 instead of the MLP, in all layers but the first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from megarl.megatron.families.architecture import Layer, ModelArchitecture
from megarl.megatron.families.attention import GroupedQueryAttention, Rope
from megarl.megatron.families.feed_forward import GatedMlp, MixtureOfExperts, Routing
from megarl.reshard.layout.layout import Box, ShardPiece, TensorSpec, WeightLayout

LAYERS, HEADS, VOCAB = 8, 48, 1536
EXPERTS = 24
MAX_UNITS = 400


def synthetic_model(megabytes: float, *, is_moe: bool = False) -> ModelArchitecture:
    """Return a model of about `megabytes` (10**6 bytes) in bfloat16.

    Args:
        is_moe: with routed experts; else dense.
    """
    sizes = {unit: _parameters(unit * HEADS, is_moe=is_moe) for unit in range(1, MAX_UNITS)}
    unit = min(sizes, key=lambda u: abs(2 * sizes[u] - megabytes * 1e6))
    hidden = unit * HEADS
    experts = MixtureOfExperts(
        hidden_size=hidden, num_experts=EXPERTS, ffn_size=hidden // 2, routing=Routing(top_k=4), expert_bias=False
    )
    attention = GroupedQueryAttention(
        hidden_size=hidden,
        num_heads=HEADS,
        num_kv_heads=HEADS // 2,
        head_dim=2 * unit,
        rope=Rope(theta=1e6, max_positions=4096),
        qk_norm=True,
    )
    dense = Layer(attention=attention, mlp=GatedMlp(hidden_size=hidden, ffn_size=3 * hidden))
    return ModelArchitecture(
        name="Qwen3MoeForCausalLM" if is_moe else "Qwen3ForCausalLM",
        hidden_size=hidden,
        vocab_size=VOCAB,
        max_positions=4096,
        norm_eps=1e-6,
        tie_embeddings=False,
        layers=(dense, *[Layer(attention=attention, mlp=experts) if is_moe else dense] * (LAYERS - 1)),
    )


def _parameters(hidden: int, *, is_moe: bool) -> int:
    attention, mlp = 6 * hidden * hidden, 9 * hidden * hidden
    layers = LAYERS * (attention + mlp)
    if is_moe:
        layers += (LAYERS - 1) * (EXPERTS * 3 * hidden * hidden // 2 - mlp)
    return layers + 2 * VOCAB * hidden


def engine_layouts(model: ModelArchitecture, tp: int, dtype: str, *, ep: int = 1, dp: int = 1) -> list[WeightLayout]:
    """Return SGLang's layout by tensor rank, with fused q, k, v and fused gate, up; every expert is split."""
    assert ep == dp == 1, (ep, dp)
    tensors = model.tensors(dtype)
    return [WeightLayout(tensors, tuple(_pieces(tensors, rank, tp))) for rank in range(tp)]


FUSED = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj", "gate_proj": "gate_up_proj"}
FUSED["up_proj"] = "gate_up_proj"
BY_COLUMNS = ("o_proj", "down_proj")
ROUTER = "gate"


def _pieces(tensors: Mapping[str, TensorSpec], rank: int, size: int) -> Iterator[ShardPiece]:
    filled: dict[str, int] = {}
    for name, spec in tensors.items():
        kind = name.split(".")[-2]
        local = name.replace(kind, FUSED.get(kind, kind))
        box = list(spec.box)
        if len(box) == 2 and kind != ROUTER:
            dim = 1 if kind in BY_COLUMNS else 0
            part = spec.shape[dim] // size
            box[dim] = (rank * part, (rank + 1) * part)
        local_box: Box = tuple((0, stop - start) for start, stop in box)
        at = filled.get(local, 0)
        filled[local] = at + local_box[0][1]
        yield ShardPiece(name, tuple(box), local, ((at, filled[local]), *local_box[1:]))
