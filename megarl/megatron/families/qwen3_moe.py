"""Qwen3-MoE: grouped-query attention with q/k norm, and a mixture of experts in all layers or in some."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megarl.megatron.families.decoder import Decoder
from megarl.megatron.families.parts import GatedMlp, GroupedQueryAttention, LayerPart, MixtureOfExperts


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen3MoeModel(Decoder):
    """What of config.json decides where weights lie."""

    architecture: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    tie_embeddings: bool
    attention: GroupedQueryAttention
    experts: MixtureOfExperts
    mlp: GatedMlp
    """Of the dense layers."""
    dense_layers: frozenset[int]
    """Those without experts."""

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Qwen3MoeModel:
        """Read the content of a config.json."""
        hidden, heads, layers = (
            int(config[key]) for key in ("hidden_size", "num_attention_heads", "num_hidden_layers")
        )
        step, without = int(config.get("decoder_sparse_step", 1)), config.get("mlp_only_layers") or ()
        return cls(
            architecture="Qwen3MoeForCausalLM",
            num_layers=layers,
            hidden_size=hidden,
            vocab_size=int(config["vocab_size"]),
            tie_embeddings=bool(config.get("tie_word_embeddings", False)),
            attention=GroupedQueryAttention(
                hidden_size=hidden,
                num_heads=heads,
                num_kv_heads=int(config.get("num_key_value_heads") or heads),
                head_dim=int(config.get("head_dim") or hidden // heads),
                qkv_bias=False,
                qk_norm=True,
            ),
            experts=MixtureOfExperts(
                hidden_size=hidden,
                # transformers 5 writes the second name
                num_experts=int(config["num_experts"] if "num_experts" in config else config["num_local_experts"]),
                ffn_size=int(config["moe_intermediate_size"]),
            ),
            mlp=GatedMlp(hidden_size=hidden, ffn_size=int(config["intermediate_size"])),
            dense_layers=frozenset(i for i in range(layers) if i in without or (i + 1) % step),
        )

    @property
    def num_experts(self) -> int:
        """See `Decoder.num_experts`."""
        return self.experts.num_experts

    def layer(self, number: int) -> tuple[LayerPart, ...]:
        """See `Decoder.layer`."""
        return self.attention, self.mlp if number in self.dense_layers else self.experts
