"""gpt-oss (arXiv 2508.10925): attention sinks, every other layer with a window, experts with biases, clamped SwiGLU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from pydantic import PositiveFloat, PositiveInt, field_validator

from megarl.megatron.families.architecture import Layer, ModelArchitecture
from megarl.megatron.families.config_json import HfConfig
from megarl.megatron.families.feed_forward import HfExpertNames, MixtureOfExperts, Routing
from megarl.model_files.json_object import JsonMapping
from megarl.model_files.model_config import alternating_layers

_KINDS = ("sliding_attention", "full_attention")
_ALPHA = 1.702
"""Factor of the gate in the sigmoid; megatron-core has no other."""
_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
"""Hugging Face's default of `rope_parameters`."""


class _Config(HfConfig):
    attention_kinds: ClassVar[tuple[str, ...]] = _KINDS
    default_theta: ClassVar[float] = 150_000.0
    other_names: ClassVar[Mapping[str, str]] = {"num_experts": "num_local_experts"}

    num_key_value_heads: PositiveInt = 8
    head_dim: PositiveInt = 64
    attention_bias: bool = True  # type: ignore[assignment]
    sliding_window: PositiveInt | None = 128
    num_local_experts: PositiveInt = 128
    num_experts_per_tok: PositiveInt = 4
    swiglu_alpha: float = _ALPHA
    swiglu_limit: PositiveFloat = 7.0

    @field_validator("swiglu_alpha")
    @classmethod
    def _check_alpha(cls, alpha: float) -> float:
        if alpha != _ALPHA:
            raise ValueError(f"swiglu_alpha {alpha} is not supported; supported is {_ALPHA}")
        return alpha


def read(config: JsonMapping, *, origin: str) -> ModelArchitecture:
    """Return the architecture that the content of a config.json describes; `origin` is its name in errors."""
    c = _Config.read(config, origin=origin)
    if not c.rope_scaling and not c.rope_parameters:
        c = c.model_copy(update={"rope_parameters": _ROPE})
    rope, biases = c.rope(origin=origin), {"qkv_bias": c.attention_bias, "output_bias": c.attention_bias}
    windows = dict(zip(_KINDS, (c.sliding_window or 0, 0), strict=True))
    attention = {
        kind: c.grouped_query_attention(origin=origin, rope=rope, sinks=True, window=window, **biases)
        for kind, window in windows.items()
    }
    experts = MixtureOfExperts(
        hidden_size=c.hidden_size,
        num_experts=c.num_local_experts,
        ffn_size=c.intermediate_size,
        routing=Routing(top_k=c.num_experts_per_tok),
        hf_names=HfExpertNames(router="router"),
        biases=True,
        is_stacked=True,
    )
    sliding, full = _KINDS
    kinds = c.layer_types or alternating_layers(c.num_hidden_layers, 2, full, sliding)
    return c.to_architecture(
        "GptOssForCausalLM",
        origin=origin,
        layers=[Layer(attention=attention[kind], mlp=experts) for kind in kinds],
        activation="quick_gelu",
        mlp_clamp=c.swiglu_limit,
    )
