"""Dense decoders with grouped-query attention and a gated MLP: Qwen2 (QKV bias), Qwen3 (q/k norm)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megarl.errors import ConfigError
from megarl.megatron.families import PLANNED_ARCHITECTURES, SUPPORTED_ARCHITECTURES, supported
from megarl.megatron.families.decoder import Decoder
from megarl.megatron.families.parts import GatedMlp, GroupedQueryAttention, LayerPart


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseModel(Decoder):
    """The sizes and switches that config.json states."""

    architecture: str
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    norm_eps: float
    rope_theta: float
    tie_embeddings: bool
    qkv_bias: bool
    qk_norm: bool

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], *, origin: str) -> DenseModel:
        """Read the content of a config.json; `origin` names it in errors.

        Raises:
            ConfigError: the architecture or one of its options is not supported.
        """
        architecture = (config.get("architectures") or ["(none)"])[0]
        if not supported(architecture):
            what = "cannot be trained yet" if architecture in PLANNED_ARCHITECTURES else "is not supported"
            raise ConfigError(
                f"{origin}: architecture {architecture} {what}; supported are {', '.join(SUPPORTED_ARCHITECTURES)}"
            )
        refuse_unsupported_options(config, origin)
        rope = config.get("rope_parameters") or {}
        heads = int(config["num_attention_heads"])
        return cls(
            architecture=architecture,
            num_layers=int(config["num_hidden_layers"]),
            hidden_size=int(config["hidden_size"]),
            ffn_hidden_size=int(config["intermediate_size"]),
            num_heads=heads,
            num_kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or config["hidden_size"] // heads),
            vocab_size=int(config["vocab_size"]),
            max_positions=int(config["max_position_embeddings"]),
            norm_eps=float(config["rms_norm_eps"]),
            rope_theta=float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0),
            tie_embeddings=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=architecture == "Qwen2ForCausalLM" or bool(config.get("attention_bias", False)),
            qk_norm=architecture == "Qwen3ForCausalLM",
        )

    def layer(self, number: int) -> tuple[LayerPart, ...]:
        """See `Decoder.layer`; all are alike."""
        attention = GroupedQueryAttention(
            hidden_size=self.hidden_size,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            qkv_bias=self.qkv_bias,
            qk_norm=self.qk_norm,
        )
        return attention, GatedMlp(hidden_size=self.hidden_size, ffn_size=self.ffn_hidden_size)


def refuse_unsupported_options(config: Mapping[str, Any], origin: str) -> None:
    """Options that change what layers compute or hold.

    Raises:
        ConfigError: one is set.
    """
    rope = (config.get("rope_parameters") or {}).get("rope_type") or (config.get("rope_scaling") or {}).get("type")
    if rope not in (None, "default"):
        raise ConfigError(f"{origin}: rope type {rope} is not supported; supported is default")
    if config.get("hidden_act", "silu") != "silu":
        raise ConfigError(f"{origin}: hidden_act {config['hidden_act']} is not supported; supported is silu")
    if config.get("use_sliding_window"):
        raise ConfigError(f"{origin}: use_sliding_window is not supported")
    if config.get("attention_bias"):
        raise ConfigError(f"{origin}: attention_bias is not supported")
