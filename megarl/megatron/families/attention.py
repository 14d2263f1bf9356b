"""The attentions of a decoder layer, with the norms around them."""

from __future__ import annotations

from dataclasses import dataclass

from megarl.megatron.families.layer_parts import Units
from megarl.megatron.families.parameter_map import ParameterMap, Rows, split_columns, split_rows, whole


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedQueryAttention:
    """Query heads that share key-value heads in groups (arXiv 2305.13245)."""

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    qkv_bias: bool = False
    qk_norm: bool = False
    """Whether each head's query and key are normalised."""
    post_norm: bool = False
    """Whether what attention adds to the residual stream is normalised first."""
    scale: float | None = None
    """Of the scores; None: head_dim ** -0.5."""
    softcap: float | None = None
    """Scores are bent into (-softcap, softcap) by tanh."""

    def names(self) -> list[str]:
        """See `LayerPart.names`."""
        attention = ["linear_qkv.weight"]
        attention += ["linear_qkv.bias"] if self.qkv_bias else []
        attention += ["q_layernorm.weight", "k_layernorm.weight"] if self.qk_norm else []
        attention += ["linear_proj.weight"]
        attention += ["linear_proj.post_layernorm.weight"] if self.post_norm else []
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
            case "linear_proj.post_layernorm.weight" if self.post_norm:
                return whole(prefix + "post_attention_layernorm.weight", hidden)
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
