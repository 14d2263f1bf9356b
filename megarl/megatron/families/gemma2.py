"""Gemma 2 (arXiv 2408.00118): norms on both sides of attention and MLP, windows in every other layer, capped scores."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from pydantic import PositiveFloat, PositiveInt

from megarl.megatron.families.architecture import Decoder
from megarl.megatron.families.config_json import DecoderConfig


class _Config(DecoderConfig):
    tie_word_embeddings: bool = True
    # says the same as hidden_activation, which is the one that Hugging Face reads
    hidden_act: Literal["gelu_pytorch_tanh", "gelu"] = "gelu_pytorch_tanh"  # type: ignore[assignment]
    hidden_activation: Literal["gelu_pytorch_tanh"] | None = "gelu_pytorch_tanh"
    head_dim: PositiveInt | None = 256
    query_pre_attn_scalar: PositiveFloat = 256
    sliding_window: PositiveInt | None = 4096
    layer_types: tuple[Literal["sliding_attention", "full_attention"], ...] | None = None
    attn_logit_softcapping: PositiveFloat | None = 50.0
    final_logit_softcapping: PositiveFloat | None = 30.0
    use_bidirectional_attention: Literal[False] | None = None

    def windows(self) -> tuple[int, ...]:
        kinds = self.layer_types or [
            "full_attention" if i % 2 else "sliding_attention" for i in range(self.num_hidden_layers)
        ]
        return tuple((self.sliding_window or 0) if kind == "sliding_attention" else 0 for kind in kinds)


def read(config: Mapping[str, Any], *, origin: str) -> Decoder:
    """See `read_family`."""
    c = _Config.read(config, origin=origin)
    plain = c.decoder("Gemma2ForCausalLM", origin=origin)
    return replace(
        plain,
        attention=replace(
            c.grouped_query_attention(),
            post_norm=True,
            scale=c.query_pre_attn_scalar**-0.5,
            softcap=c.attn_logit_softcapping,
        ),
        mlp=replace(plain.mlp, sandwiched=True),
        activation="gelu_tanh",
        zero_centered_norms=True,
        embedding_scale=c.hidden_size**0.5,
        logit_softcap=c.final_logit_softcapping,
        windows=c.windows(),
    )
