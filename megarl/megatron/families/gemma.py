"""Gemma 2 (arXiv 2408.00118) and Gemma 3 text models (arXiv 2503.19786): norms before and after, sliding windows.

Gemma 2 caps attention scores and logits; Gemma 3 normalizes queries and keys, and its layers with a sliding window have
rotary frequencies of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, Literal, Self

from pydantic import PositiveFloat, PositiveInt, model_validator

from megarl.megatron.families.architecture import Layer, ModelArchitecture
from megarl.megatron.families.attention import GroupedQueryAttention, Rope
from megarl.megatron.families.config_json import HfConfig
from megarl.model_files.json_object import JsonMapping
from megarl.model_files.model_config import alternating_layers

_SLIDING, _FULL = "sliding_attention", "full_attention"


class _Config(HfConfig):
    attention_kinds: ClassVar[tuple[str, ...]] = (_SLIDING, _FULL)

    num_key_value_heads: PositiveInt = 4
    tie_word_embeddings: bool = True
    # a duplicate of hidden_activation; Hugging Face reads the latter
    hidden_act: Literal["gelu_pytorch_tanh", "gelu"] = "gelu_pytorch_tanh"  # type: ignore[assignment]
    hidden_activation: Literal["gelu_pytorch_tanh"] = "gelu_pytorch_tanh"
    head_dim: PositiveInt = 256
    query_pre_attn_scalar: PositiveFloat = 256
    sliding_window: PositiveInt | None = 4096
    sliding_window_pattern: PositiveInt
    """Every layer of this number attends to all tokens, the others to a window."""
    attn_logit_softcapping: PositiveFloat | None = None
    final_logit_softcapping: PositiveFloat | None = None
    use_bidirectional_attention: Literal[False] | None = None

    def attention(self, *, origin: str, **features: Any) -> GroupedQueryAttention:
        return self.grouped_query_attention(
            origin=origin,
            post_norm=True,
            scale=self.query_pre_attn_scalar**-0.5,
            softcap=self.attn_logit_softcapping,
            **features,
        )

    def gemma(self, name: str, by_kind: Mapping[str, GroupedQueryAttention], *, origin: str) -> ModelArchitecture:
        """Return the architecture whose layers have these kinds of attention, without their windows."""
        windowed = replace(by_kind[_SLIDING], window=self.sliding_window or 0)
        mlp = self.gated_mlp(post_norm=True)
        kinds = self.layer_types or alternating_layers(
            self.num_hidden_layers, self.sliding_window_pattern, _FULL, _SLIDING
        )
        return self.to_architecture(
            name,
            origin=origin,
            layers=[Layer(attention=windowed if kind == _SLIDING else by_kind[_FULL], mlp=mlp) for kind in kinds],
            activation="gelu_tanh",
            zero_centered_norms=True,
            embedding_scale=self.hidden_size**0.5,
            logit_softcap=self.final_logit_softcapping,
        )


class _Gemma2Config(_Config):
    sliding_window_pattern: Literal[2] = 2
    attn_logit_softcapping: PositiveFloat | None = 50.0
    final_logit_softcapping: PositiveFloat | None = 30.0


class _Gemma3Config(_Config):
    default_theta: ClassVar[float] = 1e6
    sliding_window_pattern: PositiveInt = 6
    rope_local_base_freq: PositiveFloat = 10_000.0

    @model_validator(mode="after")
    def _check_rope_by_kind(self) -> Self:
        # transformers reads neither of the two in this model
        shared = {key: of for key, of in (self.rope_parameters or {}).items() if not isinstance(of, Mapping)}
        if shared not in ({}, {"rope_type": "default"}):
            raise ValueError(f"rope_parameters needs those of {_SLIDING} and {_FULL} each, got {', '.join(shared)}")
        scaling = self.rope_scaling or {}
        if "rope_type" not in scaling and scaling.get("type", "default") != "default":
            raise ValueError(f"rope_scaling needs the key rope_type, got type {scaling['type']}")
        return self

    def rope_of(self, kind: str, *, origin: str) -> Rope:
        """Return the rotary position embedding of the layers of a kind; transformers 5 writes it by kind."""
        by_kind = self.rope_parameters or {}
        stated = by_kind.get(kind)
        if isinstance(stated, Mapping):
            return self.model_copy(update={"rope_parameters": dict(stated)}).rope(origin=origin)
        if kind == _FULL:
            return self.rope(origin=origin)
        return Rope(theta=self.rope_local_base_freq, max_positions=self.max_position_embeddings)


def read_gemma2(config: JsonMapping, *, origin: str) -> ModelArchitecture:
    """Return the architecture that the config.json of a Gemma 2 model describes; `origin` is its name in errors."""
    c = _Gemma2Config.read(config, origin=origin)
    attention = c.attention(origin=origin)
    return c.gemma("Gemma2ForCausalLM", {_SLIDING: attention, _FULL: attention}, origin=origin)


def read_gemma3(config: JsonMapping, *, origin: str) -> ModelArchitecture:
    """Return the architecture that the config.json of a Gemma 3 text model describes."""
    c = _Gemma3Config.read(config, origin=origin)
    by_kind = {
        kind: c.attention(origin=origin, qk_norm=True, rope=c.rope_of(kind, origin=origin))
        for kind in (_SLIDING, _FULL)
    }
    return c.gemma("Gemma3ForCausalLM", by_kind, origin=origin)
