"""GLM-4.5, 4.6 and 4.7 (arXiv 2508.06471): half of each head is rotated, first layers dense, sigmoid router, MTP.

As in a DeepSeek-V3 folder, each MTP layer holds a copy of the embedding and of the head.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

from pydantic import NonNegativeInt, PositiveFloat, PositiveInt

from megarl.megatron.families.architecture import Layer, ModelArchitecture
from megarl.megatron.families.config_json import HfConfig
from megarl.megatron.families.feed_forward import MixtureOfExperts, Routing
from megarl.model_files.json_object import JsonMapping
from megarl.model_files.model_config import MTP_KEY, OTHER_MTP_KEY


class _Config(HfConfig):
    partial_rotary: ClassVar[bool] = True
    other_names: ClassVar[Mapping[str, str]] = {
        "num_local_experts": "n_routed_experts",
        OTHER_MTP_KEY: MTP_KEY,
    }

    partial_rotary_factor: float | None = 0.5
    num_key_value_heads: PositiveInt = 8
    attention_bias: bool = False  # type: ignore[assignment]
    use_qk_norm: bool = False
    n_routed_experts: PositiveInt = 128
    num_experts_per_tok: PositiveInt = 8
    moe_intermediate_size: PositiveInt = 1408
    n_shared_experts: NonNegativeInt = 1
    n_group: Literal[1] = 1
    topk_group: Literal[1] = 1
    routed_scaling_factor: PositiveFloat = 1.0
    norm_topk_prob: Literal[True] = True
    first_k_dense_replace: NonNegativeInt = 1
    num_nextn_predict_layers: NonNegativeInt | None = None


def read(config: JsonMapping, *, origin: str) -> ModelArchitecture:
    """Return the architecture that the content of a config.json describes; `origin` is its name in errors."""
    c = _Config.read(config, origin=origin)
    attention = c.grouped_query_attention(origin=origin, qkv_bias=c.attention_bias, qk_norm=c.use_qk_norm)
    experts = MixtureOfExperts(
        hidden_size=c.hidden_size,
        num_experts=c.n_routed_experts,
        ffn_size=c.moe_intermediate_size,
        routing=Routing(
            top_k=c.num_experts_per_tok, scoring_func="sigmoid", routed_scaling_factor=c.routed_scaling_factor
        ),
        shared_ffn_size=c.moe_intermediate_size * c.n_shared_experts,
        expert_bias=True,
    )
    return c.to_architecture(
        "Glm4MoeForCausalLM",
        origin=origin,
        layers=c.uniform_layers(attention, experts=experts, dense=range(c.first_k_dense_replace)),
        mtp_layers=(Layer(attention=attention, mlp=experts),) * (c.num_nextn_predict_layers or 0),
    )
