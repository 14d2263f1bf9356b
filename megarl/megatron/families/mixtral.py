"""Mixtral (arXiv 2401.04088): routed experts in every layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from pydantic import PositiveInt

from megarl.megatron.families.architecture import ModelArchitecture
from megarl.megatron.families.config_json import HfConfig
from megarl.megatron.families.feed_forward import HfExpertNames, MixtureOfExperts, Routing
from megarl.model_files.json_object import JsonMapping


class _Config(HfConfig):
    default_theta: ClassVar[float] = 1e6
    other_names: ClassVar[Mapping[str, str]] = {"num_experts": "num_local_experts"}

    num_key_value_heads: PositiveInt = 8
    num_local_experts: PositiveInt = 8
    num_experts_per_tok: PositiveInt = 2
    sliding_window: None = None


def read(config: JsonMapping, *, origin: str) -> ModelArchitecture:
    """Return the architecture that the content of a config.json describes; `origin` is its name in errors."""
    c = _Config.read(config, origin=origin)
    experts = MixtureOfExperts(
        hidden_size=c.hidden_size,
        num_experts=c.num_local_experts,
        ffn_size=c.intermediate_size,
        routing=Routing(top_k=c.num_experts_per_tok),
        hf_names=HfExpertNames(block="block_sparse_moe", gate="w1", up="w3", down="w2"),
    )
    layers = c.uniform_layers(c.grouped_query_attention(origin=origin), experts=experts)
    return c.to_architecture("MixtralForCausalLM", origin=origin, layers=layers)
