"""A dense model of a given size, all of whose dimensions are multiples of 1, 2, 3, 4, 6 and 8, and its engine layout.

hidden H = 48 k    query heads 48, key-value heads 24, each 2 k wide    MLP 3 H    8 layers    vocabulary 1536
"""

from __future__ import annotations

from collections.abc import Iterator

from megarl.megatron.families.architecture import ModelArchitecture
from megarl.megatron.families.attention import GroupedQueryAttention
from megarl.megatron.families.feed_forward import GatedMlp
from megarl.megatron.families.rope import Rope
from megarl.reshard.layout.layout import Box, ShardPiece, TensorSpec, WeightLayout

LAYERS, HEADS, VOCAB = 8, 48, 1536


def synthetic_model(megabytes: float) -> ModelArchitecture:
    """Return a model of about `megabytes` (10**6 bytes) in bfloat16."""
    sizes = {unit: _parameters(unit * HEADS) for unit in range(1, 400)}
    unit = min(sizes, key=lambda u: abs(2 * sizes[u] - megabytes * 1e6))
    hidden = unit * HEADS
    return ModelArchitecture(
        name="Qwen3ForCausalLM",
        num_layers=LAYERS,
        hidden_size=hidden,
        vocab_size=VOCAB,
        max_positions=4096,
        norm_eps=1e-6,
        tie_embeddings=False,
        rope=Rope(theta=1e6, max_positions=4096),
        attention=GroupedQueryAttention(
            hidden_size=hidden, num_heads=HEADS, num_kv_heads=HEADS // 2, head_dim=2 * unit, qk_norm=True
        ),
        mlp=GatedMlp(hidden_size=hidden, ffn_size=3 * hidden),
    )


def _parameters(hidden: int) -> int:
    return LAYERS * 15 * hidden * hidden + 2 * VOCAB * hidden


def engine_layouts(model: ModelArchitecture, tp: int, dtype: str, *, ep: int = 1) -> list[WeightLayout]:
    """Return SGLang's layout of a dense model by tensor rank, with fused q, k, v and fused gate, up."""
    assert ep == 1, ep
    tensors = model.tensors(dtype)
    return [WeightLayout(tensors, tuple(_pieces(tensors, rank, tp))) for rank in range(tp)]


FUSED = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj", "gate_proj": "gate_up_proj"}
FUSED["up_proj"] = "gate_up_proj"
BY_COLUMNS = ("o_proj", "down_proj")


def _pieces(tensors: dict[str, TensorSpec], rank: int, size: int) -> Iterator[ShardPiece]:
    filled: dict[str, int] = {}
    for name, spec in tensors.items():
        kind = name.split(".")[-2]
        local = name.replace(kind, FUSED.get(kind, kind))
        box = list(spec.box)
        if len(box) == 2:
            dim = 1 if kind in BY_COLUMNS else 0
            part = spec.shape[dim] // size
            box[dim] = (rank * part, (rank + 1) * part)
        local_box: Box = tuple((0, stop - start) for start, stop in box)
        at = filled.get(local, 0)
        filled[local] = at + local_box[0][1]
        yield ShardPiece(name, tuple(box), local, ((at, filled[local]), *local_box[1:]))
