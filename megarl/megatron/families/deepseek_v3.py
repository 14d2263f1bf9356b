"""DeepSeek-V3 (arXiv 2412.19437): latent attention, first layers dense, then routed experts and shared ones.

A checkpoint also holds, for each layer that predicts a further token, a copy of the embedding and of the head
(`model.layers.61.embed_tokens.weight`, `...shared_head.head.weight`): the main model's serve both here and in SGLang,
so the table leaves the copies out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megarl.megatron.families.decoder import Decoder
from megarl.megatron.families.parts import GatedMlp, LatentAttention, LayerPart, MixtureOfExperts


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepseekV3Model(Decoder):
    """What of config.json decides where weights lie."""

    architecture: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    tie_embeddings: bool
    attention: LatentAttention
    experts: MixtureOfExperts
    mlp: GatedMlp
    """Of the dense layers."""
    num_dense_layers: int
    """The first ones."""
    mtp_depth: int
    """Tokens after the next that are predicted, a layer each."""

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> DeepseekV3Model:
        """Read the content of a config.json."""
        hidden, ffn = int(config["hidden_size"]), int(config["moe_intermediate_size"])
        q_rank = config.get("q_lora_rank")
        return cls(
            architecture="DeepseekV3ForCausalLM",
            num_layers=int(config["num_hidden_layers"]),
            hidden_size=hidden,
            vocab_size=int(config["vocab_size"]),
            tie_embeddings=bool(config.get("tie_word_embeddings", False)),
            attention=LatentAttention(
                hidden_size=hidden,
                num_heads=int(config["num_attention_heads"]),
                q_rank=None if q_rank is None else int(q_rank),
                kv_rank=int(config["kv_lora_rank"]),
                nope_dim=int(config["qk_nope_head_dim"]),
                rope_dim=int(config["qk_rope_head_dim"]),
                v_dim=int(config["v_head_dim"]),
            ),
            experts=MixtureOfExperts(
                hidden_size=hidden,
                num_experts=int(config["n_routed_experts"]),
                ffn_size=ffn,
                shared_ffn_size=ffn * int(config.get("n_shared_experts") or 0),
                router_bias=True,
            ),
            mlp=GatedMlp(hidden_size=hidden, ffn_size=int(config["intermediate_size"])),
            num_dense_layers=int(config["first_k_dense_replace"]),
            mtp_depth=int(config.get("num_nextn_predict_layers") or 0),
        )

    @property
    def num_mtp_layers(self) -> int:
        """See `Decoder.num_mtp_layers`."""
        return self.mtp_depth

    @property
    def num_experts(self) -> int:
        """See `Decoder.num_experts`."""
        return self.experts.num_experts

    def layer(self, number: int) -> tuple[LayerPart, ...]:
        """See `Decoder.layer`."""
        return self.attention, self.mlp if number < self.num_dense_layers else self.experts
