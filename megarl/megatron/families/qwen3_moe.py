"""Qwen3-MoE (arXiv 2505.09388): Qwen3's attention, and routed experts in all or some layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from pydantic import NonNegativeInt, PositiveInt

from megarl.megatron.families.architecture import ModelArchitecture
from megarl.megatron.families.config_json import HfConfig
from megarl.megatron.families.feed_forward import MixtureOfExperts, Routing
from megarl.model_files.json_object import JsonMapping


class _Config(HfConfig):
    other_names: ClassVar[Mapping[str, str]] = {"num_local_experts": "num_experts"}  # transformers 5 writes the first

    num_key_value_heads: PositiveInt = 4
    num_experts: PositiveInt = 128
    num_experts_per_tok: PositiveInt = 8
    moe_intermediate_size: PositiveInt = 768
    norm_topk_prob: bool = False
    decoder_sparse_step: PositiveInt = 1
    mlp_only_layers: tuple[NonNegativeInt, ...] | None = None


def read(config: JsonMapping, *, origin: str) -> ModelArchitecture:
    """Return the architecture that the content of a config.json describes; `origin` is its name in errors."""
    c = _Config.read(config, origin=origin)
    without, step = c.mlp_only_layers or (), c.decoder_sparse_step
    experts = MixtureOfExperts(
        hidden_size=c.hidden_size,
        num_experts=c.num_experts,
        ffn_size=c.moe_intermediate_size,
        routing=Routing(top_k=c.num_experts_per_tok, norm_topk_prob=c.norm_topk_prob),
    )
    dense = {i for i in range(c.num_hidden_layers) if i in without or (i + 1) % step}
    layers = c.uniform_layers(c.grouped_query_attention(origin=origin, qk_norm=True), experts=experts, dense=dense)
    return c.to_architecture("Qwen3MoeForCausalLM", origin=origin, layers=layers)
