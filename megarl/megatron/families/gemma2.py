"""Gemma 2 (arXiv 2408.00118): pre- and post-norms, sliding windows in every other layer, soft-capped scores."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar, Literal

from pydantic import PositiveFloat, PositiveInt

from megarl.megatron.families.architecture import Layer, ModelArchitecture
from megarl.megatron.families.config_json import HfConfig
from megarl.model_files.json_object import JsonMapping


class _Config(HfConfig):
    num_key_value_heads: PositiveInt | None = 4
    tie_word_embeddings: bool = True
    # a duplicate of hidden_activation; Hugging Face reads the latter
    hidden_act: Literal["gelu_pytorch_tanh", "gelu"] = "gelu_pytorch_tanh"  # type: ignore[assignment]
    hidden_activation: Literal["gelu_pytorch_tanh"] | None = "gelu_pytorch_tanh"
    head_dim: PositiveInt | None = 256
    query_pre_attn_scalar: PositiveFloat = 256
    sliding_window: PositiveInt | None = 4096
    attention_kinds: ClassVar[tuple[str, ...]] = ("sliding_attention", "full_attention")
    attn_logit_softcapping: PositiveFloat | None = 50.0
    final_logit_softcapping: PositiveFloat | None = 30.0
    use_bidirectional_attention: Literal[False] | None = None

    def window_sizes(self) -> tuple[int, ...]:
        kinds = self.layer_types or [
            "full_attention" if i % 2 else "sliding_attention" for i in range(self.num_hidden_layers)
        ]
        return tuple((self.sliding_window or 0) if kind == "sliding_attention" else 0 for kind in kinds)


def read(config: JsonMapping, *, origin: str) -> ModelArchitecture:
    """Return the architecture that the content of a config.json describes; `origin` is its name in errors."""
    c = _Config.read(config, origin=origin)
    attention = c.grouped_query_attention(
        origin=origin, post_norm=True, scale=c.query_pre_attn_scalar**-0.5, softcap=c.attn_logit_softcapping
    )
    mlp = c.gated_mlp(post_norm=True)
    return c.to_architecture(
        "Gemma2ForCausalLM",
        origin=origin,
        layers=[Layer(attention=replace(attention, window=window), mlp=mlp) for window in c.window_sizes()],
        activation="gelu_tanh",
        zero_centered_norms=True,
        embedding_scale=c.hidden_size**0.5,
        logit_softcap=c.final_logit_softcapping,
    )
