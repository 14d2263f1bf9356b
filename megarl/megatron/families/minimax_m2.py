"""MiniMax-M2: queries and keys of all heads are normalized together, half of each head is rotated, sigmoid router."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal, Self

from pydantic import PositiveInt, model_validator

from megarl.megatron.families.architecture import ModelArchitecture
from megarl.megatron.families.attention import Rope
from megarl.megatron.families.config_json import HfConfig
from megarl.megatron.families.feed_forward import HfExpertNames, MixtureOfExperts, Routing
from megarl.model_files.json_object import JsonMapping

_NAMES = HfExpertNames(
    block="block_sparse_moe", gate="w1", up="w3", down="w2", expert_bias="e_score_correction_bias"
)  # fmt: skip


class _Config(HfConfig):
    default_theta: ClassVar[float] = 5e6
    partial_rotary: ClassVar[bool] = True
    other_names: ClassVar[Mapping[str, str]] = {"num_experts": "num_local_experts"}

    num_key_value_heads: PositiveInt = 8
    head_dim: PositiveInt = 128
    rotary_dim: PositiveInt | None = None
    """Number of dimensions of a head that are rotated."""
    num_local_experts: PositiveInt = 256
    num_experts_per_tok: PositiveInt = 8
    scoring_func: Literal["sigmoid"] = "sigmoid"
    shared_intermediate_size: Literal[0] = 0
    use_qk_norm: Literal[True] = True
    qk_norm_type: Literal["per_layer"] = "per_layer"
    use_routing_bias: Literal[True] = True

    @model_validator(mode="after")
    def _check_rotated(self) -> Self:
        # transformers takes the fraction then, SGLang the number
        stated, rotated = self.partial_rotary_factor, self.rotary_dim
        if stated is not None and rotated is not None and stated * self.head_dim != rotated:
            raise ValueError(
                f"partial_rotary_factor {stated} and rotary_dim {rotated} of head_dim {self.head_dim} differ; remove "
                "one"
            )
        return self

    def rope(self, *, origin: str) -> Rope:
        """Return the rotary position embedding of all layers, with the fraction that `rotary_dim` states."""
        if self.rotary_dim is None:
            return super().rope(origin=origin)
        stated = self.model_copy(update={"partial_rotary_factor": self.rotary_dim / self.head_dim, "rotary_dim": None})
        return stated.rope(origin=origin)


def read(config: JsonMapping, *, origin: str) -> ModelArchitecture:
    """Return the architecture that the content of a config.json describes; `origin` is its name in errors."""
    c = _Config.read(config, origin=origin)
    experts = MixtureOfExperts(
        hidden_size=c.hidden_size,
        num_experts=c.num_local_experts,
        ffn_size=c.intermediate_size,
        routing=Routing(top_k=c.num_experts_per_tok, scoring_func="sigmoid"),
        hf_names=_NAMES,
        expert_bias=True,
    )
    layers = c.uniform_layers(c.grouped_query_attention(origin=origin, full_qk_norm=True), experts=experts)
    return c.to_architecture("MiniMaxM2ForCausalLM", origin=origin, layers=layers)
