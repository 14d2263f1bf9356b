"""Attention parts of a decoder layer, with the norms around them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from megarl.errors import ConfigError
from megarl.megatron.families.feed_forward import ShardingUnit
from megarl.megatron.families.parameter_map import ParameterMap, RowRange, replicated, split_columns, split_rows
from megarl.model_files.json_object import JsonMapping

REQUIRED_PARAMETERS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
}
"""Required scaling parameters of each supported RoPE type.

Types that depend on the sequence length (`dynamic`, `longrope`) are not supported: a token's log-probability would
depend on how long its sequence becomes.
"""

_POSITIVE = ("rope_theta", "factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow")
_NUMBERS = (*_POSITIVE, "low_freq_factor", "high_freq_factor", "mscale", "mscale_all_dim", "partial_rotary_factor")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """Rotary position embedding of a model.

    Examples:
        >>> Rope.read({"rope_theta": 5e5}, theta=1e4, max_positions=8192, origin="config.json").theta
        500000.0
    """

    theta: float
    """Base of the rotation frequencies; the longest wavelength is about 2 pi theta tokens."""
    max_positions: int
    """Maximum sequence length in tokens."""
    rope_type: str = "default"
    """RoPE type, a key of `REQUIRED_PARAMETERS`."""
    scaling: tuple[tuple[str, Any], ...] = field(default=())
    """Scaling parameters of config.json as (name, value) pairs; empty for type "default"."""
    fraction: float = 1.0
    """Share of a head's dimensions that are rotated, its first ones."""

    @classmethod
    def read(
        cls, parameters: JsonMapping, *, theta: float, max_positions: int, origin: str, partial: bool = False
    ) -> Rope:
        """Parse `rope_parameters` or `rope_scaling` of a config.json.

        Args:
            theta: base of the frequencies if the parameters have no `rope_theta`.
            partial: the family may rotate a part of a head's dimensions (`partial_rotary_factor`).

        Raises:
            ConfigError: the RoPE type is not supported or lacks a parameter, or a parameter is no number.
        """
        _require_numbers(parameters, origin)
        # transformers 4 names it `type`
        rope_type = parameters.get("rope_type") or parameters.get("type") or "default"
        if not isinstance(rope_type, str) or rope_type not in REQUIRED_PARAMETERS:
            raise ConfigError(
                f"{origin}: rope type {rope_type} is not supported; supported are {', '.join(REQUIRED_PARAMETERS)}"
            )
        stated_fraction = parameters.get("partial_rotary_factor")
        fraction = 1.0 if stated_fraction is None else float(stated_fraction)
        if not partial and fraction != 1.0:
            raise ConfigError(f"{origin}: partial_rotary_factor {stated_fraction} is not supported; supported is 1")
        if not 0 < fraction <= 1:
            raise ConfigError(f"{origin}: partial_rotary_factor needs to be above 0 and at most 1, got {fraction:g}")
        missing = [name for name in REQUIRED_PARAMETERS[rope_type] if parameters.get(name) is None]
        if missing:
            raise ConfigError(f"{origin}: rope type {rope_type} needs {', '.join(missing)}")
        read = ("type", "rope_type", "rope_theta", "partial_rotary_factor")
        stated = {k: v for k, v in parameters.items() if k not in read and v is not None}
        if rope_type in ("yarn", "llama3"):
            stated.setdefault("original_max_position_embeddings", max_positions)
        return cls(
            theta=float(parameters.get("rope_theta") or theta),
            max_positions=max_positions,
            rope_type=rope_type,
            scaling=tuple(stated.items()) if rope_type != "default" else (),
            fraction=fraction,
        )

    def scaling_parameter(self, name: str, default: float) -> float:
        """Return the scaling parameter `name`, or `default` if config.json does not set it."""
        return float(dict(self.scaling).get(name, default))


def _require_numbers(parameters: JsonMapping, origin: str) -> None:
    """Raise a ConfigError for parameters by layer type, which no supported family has, and for wrong values."""
    for name, value in parameters.items():
        if isinstance(value, Mapping):
            raise ConfigError(
                f"{origin}: RoPE parameters by layer type are not supported, got some under {name}; all layers need "
                "the same"
            )
        if name not in _NUMBERS or value is None:
            continue
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not is_number or (name in _POSITIVE and value <= 0):
            needs = "a positive number" if name in _POSITIVE else "a number"
            raise ConfigError(f"{origin}: RoPE parameter {name} needs {needs}, got {value!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedQueryAttention:
    """Grouped-query attention (arXiv 2305.13245).

    Examples:
        >>> rope = Rope(theta=10_000, max_positions=512)
        >>> attention = GroupedQueryAttention(hidden_size=64, num_heads=4, num_kv_heads=2, head_dim=16, rope=rope)
        >>> attention.parameter_names()
        ['input_layernorm.weight', 'self_attention.linear_qkv.weight', 'self_attention.linear_proj.weight']
    """

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: Rope
    window: int = 0
    """Sliding-window size in tokens, the token itself included; 0: full attention."""
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False
    """The query and key of each head are normalized."""
    full_qk_norm: bool = False
    """The queries of all heads are normalized together, and so are the keys (MiniMax-M2)."""
    output_gate: bool = False
    """The output of each head is multiplied by the sigmoid of a gate, which the query projection computes (Qwen3.5)."""
    sinks: bool = False
    """Each head has one more score, a parameter, which takes part in the softmax and has no value (gpt-oss)."""
    post_norm: bool = False
    """The attention output is normalized before it is added to the residual stream (Gemma 2)."""
    scale: float | None = None
    """Scale of the attention scores; None: head_dim ** -0.5."""
    softcap: float | None = None
    """Soft cap of the attention scores: softcap * tanh(scores / softcap); None: no cap."""

    def parameter_names(self) -> list[str]:
        """Return the megatron-core names of the parameters."""
        attention = ["linear_qkv.weight"]
        attention += ["linear_qkv.bias"] if self.qkv_bias else []
        attention += ["q_layernorm.weight", "k_layernorm.weight"] if self.qk_norm or self.full_qk_norm else []
        attention += ["core_attention.softmax_offset"] if self.sinks else []
        attention += ["linear_proj.weight"]
        attention += ["linear_proj.bias"] if self.output_bias else []
        attention += ["linear_proj.post_layernorm.weight"] if self.post_norm else []
        return ["input_layernorm.weight", *(f"self_attention.{name}" for name in attention)]

    def map_parameter(self, prefix: str, name: str) -> ParameterMap | None:
        """Return the map of parameter `name`; None if there is no such parameter."""
        hidden, hf_prefix = self.hidden_size, prefix + "self_attn."
        match name.removeprefix("self_attention."):
            case "input_layernorm.weight" | "linear_qkv.layer_norm_weight":
                return replicated(prefix + "input_layernorm.weight", hidden)
            case "q_layernorm.weight" if self.full_qk_norm:
                return replicated(hf_prefix + "q_norm.weight", self.num_heads * self.head_dim)
            case "k_layernorm.weight" if self.full_qk_norm:
                return replicated(hf_prefix + "k_norm.weight", self.num_kv_heads * self.head_dim)
            case "q_layernorm.weight":
                return replicated(hf_prefix + "q_norm.weight", self.head_dim)
            case "k_layernorm.weight":
                return replicated(hf_prefix + "k_norm.weight", self.head_dim)
            case "core_attention.softmax_offset":
                return split_rows(hf_prefix + "sinks", height=self.num_heads)
            case "linear_qkv.weight":
                return self._interleaved_qkv(hf_prefix, "weight", (hidden,))
            case "linear_qkv.bias":
                return self._interleaved_qkv(hf_prefix, "bias", ())
            case "linear_proj.weight":
                return split_columns(hf_prefix + "o_proj.weight", hidden, self.num_heads * self.head_dim)
            case "linear_proj.bias":
                return replicated(hf_prefix + "o_proj.bias", hidden)
            case "linear_proj.post_layernorm.weight" if self.post_norm:
                return replicated(prefix + "post_attention_layernorm.weight", hidden)
        return None

    def sharding_units(self, prefix: str) -> list[ShardingUnit]:
        """Return the units that parallel ranks must divide evenly."""
        return [
            ShardingUnit(f"{prefix}self_attn.q_proj.weight has query heads", self.num_heads, "tp"),
            ShardingUnit(
                f"{prefix}self_attn.k_proj.weight has key-value heads",
                self.num_kv_heads,
                "tp",
                can_replicate=not self.full_qk_norm,
            ),
        ]

    @property
    def score_width(self) -> int:
        """Query heads times (query-key dimension + value dimension): multiplications per attended position."""
        return self.num_heads * 2 * self.head_dim

    def _interleaved_qkv(self, hf_prefix: str, kind: str, rest: tuple[int, ...]) -> ParameterMap:
        """Map `linear_qkv`: for each key-value group its query heads, their gates, its key head and its value head.

        Hugging Face's query projection has the gate of each head after the head.
        """
        d, per_group = self.head_dim, self.num_heads // self.num_kv_heads
        query_shape = (self.num_heads * d * (2 if self.output_gate else 1), *rest)
        stride = 2 * d if self.output_gate else d
        rows = []
        for group in range(self.num_kv_heads):
            heads = range(group * per_group, (group + 1) * per_group)
            for offset in (0, d) if self.output_gate else (0,):
                starts = [head * stride + offset for head in heads]
                if not self.output_gate:  # the heads of a group follow one another
                    rows.append(RowRange(f"{hf_prefix}q_proj.{kind}", query_shape, starts[0], starts[-1] + d))
                else:
                    rows += [RowRange(f"{hf_prefix}q_proj.{kind}", query_shape, start, start + d) for start in starts]
            for x in ("k", "v"):
                shape = (self.num_kv_heads * d, *rest)
                rows.append(RowRange(f"{hf_prefix}{x}_proj.{kind}", shape, group * d, (group + 1) * d))
        return ParameterMap((tuple(rows),), 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Indexer:
    """Lightning indexer of DeepSeek sparse attention (DeepSeek-V3.2): it selects the keys that a query attends to.

    The score of a key is the sum over heads of weight * relu(query of the head * key). Selecting has no gradient, so
    the parameters are never trained. They are replicated over tensor-parallel ranks.
    """

    num_heads: int
    head_dim: int
    top_k: int
    """Number of keys that a query attends to: those with the highest scores, the earlier of equal ones."""
    interleaved_rope: bool
    """RoPE rotates neighboring dimensions together; False: those half of the rotated dimensions apart."""

    @property
    def score_width(self) -> int:
        """Multiplications per position that a query may attend to."""
        return self.num_heads * self.head_dim

    def parameter_names(self) -> list[str]:
        """Return the megatron-core names of the parameters, relative to the indexer."""
        return ["linear_wq_b.weight", "linear_wk.weight", "k_norm.weight", "k_norm.bias", "linear_weights_proj.weight"]

    def map_parameter(self, hf_prefix: str, name: str, latent: LatentAttention) -> ParameterMap | None:
        """Return the map of parameter `name` of the indexer of `latent`; None if there is no such parameter."""
        match name:
            case "linear_wq_b.weight":
                assert latent.q_lora_rank is not None, "an indexer reads the query latent"
                return replicated(hf_prefix + "wq_b.weight", self.score_width, latent.q_lora_rank, frozen=True)
            case "linear_wk.weight":
                return replicated(hf_prefix + "wk.weight", self.head_dim, latent.hidden_size, frozen=True)
            case "k_norm.weight" | "k_norm.bias":  # published in float32, and so in SGLang
                return replicated(hf_prefix + name, self.head_dim, dtype="float32", frozen=True)
            case "linear_weights_proj.weight":
                return replicated(hf_prefix + "weights_proj.weight", self.num_heads, latent.hidden_size, frozen=True)
        return None


_INDEXER = "core_attention.indexer."


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention:
    """Multi-head latent attention, MLA (arXiv 2412.19437, section 2.1.1).

    The down projections are replicated over tensor-parallel ranks.

    Examples:
        >>> attention = LatentAttention(
        ...     hidden_size=64,
        ...     num_heads=4,
        ...     q_lora_rank=None,
        ...     kv_lora_rank=16,
        ...     qk_nope_head_dim=8,
        ...     qk_rope_head_dim=4,
        ...     v_head_dim=8,
        ...     rope=Rope(theta=10_000, max_positions=512),
        ... )
        >>> attention.parameter_names()[1]
        'self_attention.linear_q_proj.weight'
    """

    hidden_size: int
    num_heads: int
    q_lora_rank: int | None
    """Rank of the query latent; None: queries have no low-rank projection."""
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    rope: Rope
    indexer: Indexer | None = None
    """What selects the keys that a query attends to; None: it attends to all before it."""

    @property
    def window(self) -> int:
        """Maximum number of positions that a token attends to; 0: all before it."""
        return self.indexer.top_k if self.indexer else 0

    @property
    def score_width(self) -> int:
        """Query heads times (query-key dimension + value dimension): multiplications per attended position."""
        return self.num_heads * (self.qk_nope_head_dim + self.qk_rope_head_dim + self.v_head_dim)

    def parameter_names(self) -> list[str]:
        """Return the megatron-core names of the parameters."""
        queries = ["linear_q_down_proj.weight", "q_layernorm.weight", "linear_q_up_proj.weight"]
        keys = ["linear_kv_down_proj.weight", "kv_layernorm.weight", "linear_kv_up_proj.weight"]
        attention = [*(["linear_q_proj.weight"] if self.q_lora_rank is None else queries), *keys, "linear_proj.weight"]
        attention += [_INDEXER + name for name in self.indexer.parameter_names()] if self.indexer else []
        return ["input_layernorm.weight", *(f"self_attention.{name}" for name in attention)]

    def map_parameter(self, prefix: str, name: str) -> ParameterMap | None:
        """Return the map of parameter `name`; None if there is no such parameter."""
        if name == "input_layernorm.weight":
            return replicated(prefix + name, self.hidden_size)
        mcore_name, hf_prefix = name.removeprefix("self_attention."), prefix + "self_attn."
        if self.indexer and mcore_name.startswith(_INDEXER):
            return self.indexer.map_parameter(hf_prefix + "indexer.", mcore_name.removeprefix(_INDEXER), self)
        return self._map_query(mcore_name, hf_prefix) or self._map_key_value_output(mcore_name, hf_prefix)

    def sharding_units(self, prefix: str) -> list[ShardingUnit]:
        """Return the units that parallel ranks must divide evenly."""
        query = "q_proj" if self.q_lora_rank is None else "q_b_proj"
        return [ShardingUnit(f"{prefix}self_attn.{query}.weight has query heads", self.num_heads, "tp")]

    def _map_query(self, mcore_name: str, hf_prefix: str) -> ParameterMap | None:
        hidden, rows = self.hidden_size, self.num_heads * (self.qk_nope_head_dim + self.qk_rope_head_dim)
        if self.q_lora_rank is None:
            is_query = mcore_name == "linear_q_proj.weight"
            return split_rows(hf_prefix + "q_proj.weight", height=rows, width=hidden) if is_query else None
        match mcore_name:
            case "linear_q_down_proj.weight":
                return replicated(hf_prefix + "q_a_proj.weight", self.q_lora_rank, hidden)
            case "q_layernorm.weight" | "linear_q_up_proj.layer_norm_weight":
                return replicated(hf_prefix + "q_a_layernorm.weight", self.q_lora_rank)
            case "linear_q_up_proj.weight":
                return split_rows(hf_prefix + "q_b_proj.weight", height=rows, width=self.q_lora_rank)
        return None

    def _map_key_value_output(self, mcore_name: str, hf_prefix: str) -> ParameterMap | None:
        match mcore_name:
            case "linear_kv_down_proj.weight":
                return replicated(
                    hf_prefix + "kv_a_proj_with_mqa.weight", self.kv_lora_rank + self.qk_rope_head_dim, self.hidden_size
                )
            case "kv_layernorm.weight" | "linear_kv_up_proj.layer_norm_weight":
                return replicated(hf_prefix + "kv_a_layernorm.weight", self.kv_lora_rank)
            case "linear_kv_up_proj.weight":
                rows = self.num_heads * (self.qk_nope_head_dim + self.v_head_dim)
                return split_rows(hf_prefix + "kv_b_proj.weight", height=rows, width=self.kv_lora_rank)
            case "linear_proj.weight":
                return split_columns(hf_prefix + "o_proj.weight", self.hidden_size, self.num_heads * self.v_head_dim)
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedDeltaNet:
    """Gated delta net (arXiv 2412.06464): linear attention with a state per head, after a causal convolution.

    megatron-core's `in_proj` stacks queries, keys, values, output gates z, write strengths b and decays a.

    Examples:
        >>> attention = GatedDeltaNet(
        ...     hidden_size=64,
        ...     num_key_heads=2,
        ...     num_value_heads=4,
        ...     key_head_dim=8,
        ...     value_head_dim=16,
        ...     conv_kernel=4,
        ... )
        >>> attention.map_parameter("", "self_attention.A_log").parts[0][0].shape
        (4,)
    """

    hidden_size: int
    num_key_heads: int
    """Number of query heads, and of key heads."""
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_kernel: int
    """Tokens that the convolution of queries, keys and values spans."""
    fused_projections: bool = False
    """Hugging Face stores q, k, v, z as one tensor, and b, a as another, each interleaved by key head (Qwen3-Next)."""
    float32_state: bool = False
    """`A_log` and the weight of the norm are float32, whatever the model's dtype (Qwen3.5)."""

    window: ClassVar[int] = 0
    score_width: ClassVar[int] = 0
    """It computes no attention scores."""

    @property
    def _sections(self) -> dict[str, int]:
        """Rows of each section of `in_proj`, per key head."""
        values = self.num_value_heads // self.num_key_heads
        key, value = self.key_head_dim, values * self.value_head_dim
        return {"q": key, "k": key, "v": value, "z": value, "b": values, "a": values}

    @property
    def _state_dtype(self) -> str | None:
        return "float32" if self.float32_state else None

    def parameter_names(self) -> list[str]:
        """Return the megatron-core names of the parameters."""
        names = ("in_proj.weight", "conv1d.weight", "dt_bias", "A_log", "out_norm.weight", "out_proj.weight")
        return ["input_layernorm.weight", *(f"self_attention.{name}" for name in names)]

    def map_parameter(self, prefix: str, name: str) -> ParameterMap | None:
        """Return the map of parameter `name`; None if there is no such parameter."""
        hf_prefix, values = prefix + "linear_attn.", self.num_value_heads
        match name.removeprefix("self_attention."):
            case "input_layernorm.weight" | "in_proj.layer_norm_weight":
                return replicated(prefix + "input_layernorm.weight", self.hidden_size)
            case "in_proj.weight":
                return self._map_in_proj(hf_prefix)
            case "conv1d.weight":
                rows = {x: self._sections[x] * self.num_key_heads for x in "qkv"}
                return _stacked(hf_prefix + "conv1d.weight", list(rows.values()), (1, self.conv_kernel))
            case "dt_bias":
                return split_rows(hf_prefix + "dt_bias", height=values)
            case "A_log":
                return split_rows(hf_prefix + "A_log", height=values, dtype=self._state_dtype)
            case "out_norm.weight":
                return replicated(hf_prefix + "norm.weight", self.value_head_dim, dtype=self._state_dtype)
            case "out_proj.weight":
                return split_columns(hf_prefix + "out_proj.weight", self.hidden_size, values * self.value_head_dim)
        return None

    def sharding_units(self, prefix: str) -> list[ShardingUnit]:
        """Return the units that parallel ranks must divide evenly."""
        return [ShardingUnit(f"{prefix}linear_attn has key heads", self.num_key_heads, "tp * cp")]

    def _map_in_proj(self, hf_prefix: str) -> ParameterMap:
        heads, hidden, sections = self.num_key_heads, self.hidden_size, self._sections
        if not self.fused_projections:
            parts = _stacked(f"{hf_prefix}in_proj_qkv.weight", [sections[x] * heads for x in "qkv"], (hidden,)).parts
            for x in "zba":
                parts += split_rows(f"{hf_prefix}in_proj_{x}.weight", height=sections[x] * heads, width=hidden).parts
            return ParameterMap(parts, 0)
        parts = ()
        for tensor, names in (("in_proj_qkvz", "qkvz"), ("in_proj_ba", "ba")):
            stride, start = sum(sections[x] for x in names), 0
            for x in names:
                starts = [head * stride + start for head in range(heads)]
                shape, stop = (heads * stride, hidden), sections[x]
                parts += (tuple(RowRange(f"{hf_prefix}{tensor}.weight", shape, at, at + stop) for at in starts),)
                start += sections[x]
        return ParameterMap(parts, 0)


def _stacked(tensor: str, heights: Sequence[int], rest: tuple[int, ...]) -> ParameterMap:
    """Map a parameter to a tensor of sections of `heights` rows, which are split separately."""
    parts, start, shape = [], 0, (sum(heights), *rest)
    for height in heights:
        parts.append((RowRange(tensor, shape, start, start + height),))
        start += height
    return ParameterMap(tuple(parts), 0)


Attention = GroupedQueryAttention | LatentAttention | GatedDeltaNet
"""Attention of a layer."""
