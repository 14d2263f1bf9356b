"""The parts of a decoder layer: attention and what follows it, each with its megatron-core and Hugging Face names.

Names on megatron-core's side are those within a layer (`self_attention.linear_qkv.weight`), experts numbered globally.
Transformer Engine fuses a norm into the linear that follows it, under the linear's name (`...layer_norm_weight`), and
its grouped linear numbers experts at the end (`mlp.experts.linear_fc1.weight7`); both spellings are understood.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, Protocol

from megarl.megatron.families.mapping import ParameterMap, Rows, split_columns, split_rows, whole

_EXPERT = re.compile(
    r"mlp\.experts\.(?:local_experts\.(\d+)\.linear_fc(?P<local>[12])\.weight|linear_fc(?P<grouped>[12])\.weight(\d+))"
)


@dataclass(frozen=True, slots=True)
class Units:
    """What ranks can only divide among themselves whole."""

    what: str
    """As `model.layers.0.self_attn.q_proj.weight has query heads`."""
    total: int
    axis: Literal["tp", "etp", "ep"]
    repeats: bool = False
    """Where an engine has more ranks than there are, several ranks hold the same."""


class LayerPart(Protocol):
    """A part of a layer; `prefix` is that of the layer's Hugging Face tensors."""

    def names(self) -> list[str]:
        """Of its parameters, in megatron-core's first spelling."""

    def map(self, prefix: str, name: str) -> ParameterMap | None:
        """How its parameter `name` is made; None where the part has none of that name."""

    def units(self, prefix: str) -> list[Units]:
        """What tensor- and expert-parallel ranks must divide."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedQueryAttention:
    """Query heads that share key-value heads in groups; optionally biased, optionally with norms per head."""

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    qkv_bias: bool
    qk_norm: bool

    def names(self) -> list[str]:
        """See `LayerPart.names`."""
        attention = ["linear_qkv.weight"]
        attention += ["linear_qkv.bias"] if self.qkv_bias else []
        attention += ["q_layernorm.weight", "k_layernorm.weight"] if self.qk_norm else []
        attention += ["linear_proj.weight"]
        return ["input_layernorm.weight", *(f"self_attention.{name}" for name in attention)]

    def map(self, prefix: str, name: str) -> ParameterMap | None:
        """See `LayerPart.map`."""
        hidden, theirs = self.hidden_size, prefix + "self_attn."
        match name.removeprefix("self_attention."):
            case "input_layernorm.weight" | "linear_qkv.layer_norm_weight":
                return whole(prefix + "input_layernorm.weight", hidden)
            case "q_layernorm.weight":
                return whole(theirs + "q_norm.weight", self.head_dim)
            case "k_layernorm.weight":
                return whole(theirs + "k_norm.weight", self.head_dim)
            case "linear_qkv.weight":
                return self._interleaved(theirs, "weight", (hidden,))
            case "linear_qkv.bias":
                return self._interleaved(theirs, "bias", ())
            case "linear_proj.weight":
                return split_columns(theirs + "o_proj.weight", hidden, self.num_heads * self.head_dim)
        return None

    def units(self, prefix: str) -> list[Units]:
        """See `LayerPart.units`."""
        return [
            Units(f"{prefix}self_attn.q_proj.weight has query heads", self.num_heads, "tp"),
            Units(f"{prefix}self_attn.k_proj.weight has key-value heads", self.num_kv_heads, "tp", repeats=True),
        ]

    def _interleaved(self, theirs: str, kind: str, rest: tuple[int, ...]) -> ParameterMap:
        """Per key-value group: its query heads, its key head, its value head."""
        d, per_group = self.head_dim, self.num_heads // self.num_kv_heads
        heads = {"q": self.num_heads, "k": self.num_kv_heads, "v": self.num_kv_heads}
        rows = []
        for group in range(self.num_kv_heads):
            for x, count in (("q", per_group), ("k", 1), ("v", 1)):
                start = group * count * d
                shape = (heads[x] * d, *rest)
                rows.append(Rows(f"{theirs}{x}_proj.{kind}", shape, start, start + count * d))
        return ParameterMap((tuple(rows),), 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention:
    """Multi-head latent attention (arXiv 2412.19437, section 2.1.1); every tensor rank holds the down projections."""

    hidden_size: int
    num_heads: int
    q_rank: int | None
    """Of the queries' latent; None: queries are projected at once."""
    kv_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int

    def names(self) -> list[str]:
        """See `LayerPart.names`."""
        queries = ["linear_q_down_proj.weight", "q_layernorm.weight", "linear_q_up_proj.weight"]
        keys = ["linear_kv_down_proj.weight", "kv_layernorm.weight", "linear_kv_up_proj.weight"]
        attention = [*(["linear_q_proj.weight"] if self.q_rank is None else queries), *keys, "linear_proj.weight"]
        return ["input_layernorm.weight", *(f"self_attention.{name}" for name in attention)]

    def map(self, prefix: str, name: str) -> ParameterMap | None:
        """See `LayerPart.map`."""
        if name == "input_layernorm.weight":
            return whole(prefix + name, self.hidden_size)
        ours, theirs = name.removeprefix("self_attention."), prefix + "self_attn."
        return self._queries(ours, theirs) or self._keys(ours, theirs)

    def units(self, prefix: str) -> list[Units]:
        """See `LayerPart.units`."""
        query = "q_proj" if self.q_rank is None else "q_b_proj"
        return [Units(f"{prefix}self_attn.{query}.weight has query heads", self.num_heads, "tp")]

    def _queries(self, ours: str, theirs: str) -> ParameterMap | None:
        hidden, rows = self.hidden_size, self.num_heads * (self.nope_dim + self.rope_dim)
        if self.q_rank is None:
            is_query = ours == "linear_q_proj.weight"
            return split_rows(theirs + "q_proj.weight", height=rows, width=hidden) if is_query else None
        match ours:
            case "linear_q_down_proj.weight":
                return whole(theirs + "q_a_proj.weight", self.q_rank, hidden)
            case "q_layernorm.weight" | "linear_q_up_proj.layer_norm_weight":
                return whole(theirs + "q_a_layernorm.weight", self.q_rank)
            case "linear_q_up_proj.weight":
                return split_rows(theirs + "q_b_proj.weight", height=rows, width=self.q_rank)
        return None

    def _keys(self, ours: str, theirs: str) -> ParameterMap | None:
        match ours:
            case "linear_kv_down_proj.weight":
                return whole(theirs + "kv_a_proj_with_mqa.weight", self.kv_rank + self.rope_dim, self.hidden_size)
            case "kv_layernorm.weight" | "linear_kv_up_proj.layer_norm_weight":
                return whole(theirs + "kv_a_layernorm.weight", self.kv_rank)
            case "linear_kv_up_proj.weight":
                rows = self.num_heads * (self.nope_dim + self.v_dim)
                return split_rows(theirs + "kv_b_proj.weight", height=rows, width=self.kv_rank)
            case "linear_proj.weight":
                return split_columns(theirs + "o_proj.weight", self.hidden_size, self.num_heads * self.v_dim)
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedMlp:
    """down(silu(gate(x)) * up(x))."""

    hidden_size: int
    ffn_size: int

    def names(self) -> list[str]:
        """See `LayerPart.names`."""
        return ["pre_mlp_layernorm.weight", "mlp.linear_fc1.weight", "mlp.linear_fc2.weight"]

    def map(self, prefix: str, name: str) -> ParameterMap | None:
        """See `LayerPart.map`."""
        match name:
            case "pre_mlp_layernorm.weight" | "mlp.linear_fc1.layer_norm_weight":
                return whole(prefix + "post_attention_layernorm.weight", self.hidden_size)
            case "mlp.linear_fc1.weight":
                return gate_up(prefix + "mlp.", self.hidden_size, self.ffn_size)
            case "mlp.linear_fc2.weight":
                return split_columns(prefix + "mlp.down_proj.weight", self.hidden_size, self.ffn_size)
        return None

    def units(self, prefix: str) -> list[Units]:
        """See `LayerPart.units`."""
        return [Units(f"{prefix}mlp.gate_proj.weight has rows", self.ffn_size, "tp")]


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtureOfExperts:
    """A router, gated MLPs of which it picks a few for each token, and optionally one that sees every token."""

    hidden_size: int
    num_experts: int
    ffn_size: int
    """Of one routed expert."""
    shared_ffn_size: int = 0
    """Of the shared experts together, which are one MLP; 0: none."""
    router_bias: bool = False
    """Whether a bias per expert, kept in float32, corrects what the router picks (`expert_bias`, a buffer)."""

    def names(self) -> list[str]:
        """See `LayerPart.names`."""
        names = ["pre_mlp_layernorm.weight", "mlp.router.weight"]
        names += ["mlp.router.expert_bias"] if self.router_bias else []
        names += [
            f"mlp.experts.local_experts.{expert}.linear_fc{i}.weight"
            for expert in range(self.num_experts)
            for i in (1, 2)
        ]
        if self.shared_ffn_size:
            names += [f"mlp.shared_experts.linear_fc{i}.weight" for i in (1, 2)]
        return names

    def map(self, prefix: str, name: str) -> ParameterMap | None:
        """See `LayerPart.map`."""
        expert = _EXPERT.fullmatch(name)
        if expert:
            return self._expert(prefix, int(expert[1] or expert[4]), expert["local"] or expert["grouped"])
        hidden, shared = self.hidden_size, prefix + "mlp.shared_experts."
        match name:
            case "pre_mlp_layernorm.weight":
                return whole(prefix + "post_attention_layernorm.weight", hidden)
            case "mlp.router.weight":
                return whole(prefix + "mlp.gate.weight", self.num_experts, hidden)
            case "mlp.router.expert_bias":
                return whole(prefix + "mlp.gate.e_score_correction_bias", self.num_experts, dtype="float32")
            case "mlp.shared_experts.linear_fc1.weight":
                return gate_up(shared, hidden, self.shared_ffn_size)
            case "mlp.shared_experts.linear_fc2.weight":
                return split_columns(shared + "down_proj.weight", hidden, self.shared_ffn_size)
        return None

    def units(self, prefix: str) -> list[Units]:
        """See `LayerPart.units`."""
        units = [
            Units(f"{prefix}mlp has experts", self.num_experts, "ep"),
            Units(f"{prefix}mlp.experts.0.gate_proj.weight has rows", self.ffn_size, "etp"),
        ]
        if self.shared_ffn_size:
            units.append(Units(f"{prefix}mlp.shared_experts.gate_proj.weight has rows", self.shared_ffn_size, "tp"))
        return units

    def _expert(self, prefix: str, expert: int, linear: str) -> ParameterMap:
        theirs = f"{prefix}mlp.experts.{expert}."
        if linear == "1":
            return gate_up(theirs, self.hidden_size, self.ffn_size, expert)
        return split_columns(theirs + "down_proj.weight", self.hidden_size, self.ffn_size, expert)


def gate_up(prefix: str, hidden_size: int, ffn_size: int, expert: int | None = None) -> ParameterMap:
    """megatron-core's `linear_fc1`: each rank's share of gate above its share of up."""
    tensors = (f"{prefix}gate_proj.weight", f"{prefix}up_proj.weight")
    return split_rows(*tensors, height=ffn_size, width=hidden_size, expert=expert)
