"""Qwen3-Next and Qwen3.5: three of four layers are gated delta nets, the fourth is attention with an output gate.

A quarter of each attention head is rotated; norms are zero-centered. Mixtures of experts have a gated shared expert.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import NonNegativeInt, PositiveInt

from megarl.megatron.families.architecture import Layer, ModelArchitecture
from megarl.megatron.families.attention import Attention, GatedDeltaNet
from megarl.megatron.families.config_json import DtypeName, HfConfig
from megarl.megatron.families.feed_forward import HfExpertNames, MixtureOfExperts, Routing
from megarl.model_files.json_object import JsonMapping
from megarl.model_files.model_config import alternating_layers

_NAMES = HfExpertNames(shared="mlp.shared_expert")


class _Config(HfConfig):
    attention_kinds: ClassVar[tuple[str, ...]] = ("linear_attention", "full_attention")
    partial_rotary: ClassVar[bool] = True

    partial_rotary_factor: float | None = 0.25
    num_key_value_heads: PositiveInt = 4
    head_dim: PositiveInt = 256
    attn_output_gate: Literal[True] = True
    full_attention_interval: PositiveInt = 4
    linear_conv_kernel_dim: PositiveInt = 4
    linear_key_head_dim: PositiveInt = 128
    linear_value_head_dim: PositiveInt = 128
    linear_num_key_heads: PositiveInt = 16
    linear_num_value_heads: PositiveInt = 32
    mamba_ssm_dtype: DtypeName | None = None

    def attention_of_layers(self, *, origin: str, fused_projections: bool) -> list[Attention]:
        attention = self.grouped_query_attention(origin=origin, qk_norm=True, output_gate=True)
        delta_net = GatedDeltaNet(
            hidden_size=self.hidden_size,
            num_key_heads=self.linear_num_key_heads,
            num_value_heads=self.linear_num_value_heads,
            key_head_dim=self.linear_key_head_dim,
            value_head_dim=self.linear_value_head_dim,
            conv_kernel=self.linear_conv_kernel_dim,
            fused_projections=fused_projections,
            float32_state=self.mamba_ssm_dtype == "float32",
        )
        kinds = self.layer_types or alternating_layers(
            self.num_hidden_layers, self.full_attention_interval, "full_attention", "linear_attention"
        )
        return [attention if kind == "full_attention" else delta_net for kind in kinds]


class _MoeConfig(_Config):
    num_key_value_heads: PositiveInt = 2
    intermediate_size: PositiveInt = 1  # of layers without experts, which Qwen3.5 does not have
    num_experts: PositiveInt = 256
    num_experts_per_tok: PositiveInt = 8
    moe_intermediate_size: PositiveInt = 512
    shared_expert_intermediate_size: PositiveInt = 512
    norm_topk_prob: bool = True
    decoder_sparse_step: PositiveInt = 1
    mlp_only_layers: tuple[NonNegativeInt, ...] | None = None

    def layers(self, *, origin: str, fused_projections: bool) -> list[Layer]:
        experts = MixtureOfExperts(
            hidden_size=self.hidden_size,
            num_experts=self.num_experts,
            ffn_size=self.moe_intermediate_size,
            routing=Routing(top_k=self.num_experts_per_tok, norm_topk_prob=self.norm_topk_prob),
            hf_names=_NAMES,
            shared_ffn_size=self.shared_expert_intermediate_size,
            shared_gate=True,
        )
        without, step = self.mlp_only_layers or (), self.decoder_sparse_step
        return [
            Layer(attention=attention, mlp=self.gated_mlp() if i in without or (i + 1) % step else experts)
            for i, attention in enumerate(self.attention_of_layers(origin=origin, fused_projections=fused_projections))
        ]


class _NextConfig(_MoeConfig):
    num_experts: PositiveInt = 512
    num_experts_per_tok: PositiveInt = 10


def read_next(config: JsonMapping, *, origin: str) -> ModelArchitecture:
    """Return the architecture that the config.json of a Qwen3-Next model describes."""
    c = _NextConfig.read(config, origin=origin)
    layers = c.layers(origin=origin, fused_projections=True)
    return c.to_architecture("Qwen3NextForCausalLM", origin=origin, layers=layers, zero_centered_norms=True)


def read_dense(config: JsonMapping, *, origin: str) -> ModelArchitecture:
    """Return the architecture that the config.json of a Qwen3.5 model without experts describes."""
    c = _Config.read(config, origin=origin)
    mlp = c.gated_mlp()
    layers = [Layer(attention=a, mlp=mlp) for a in c.attention_of_layers(origin=origin, fused_projections=False)]
    return c.to_architecture("Qwen3_5ForCausalLM", origin=origin, layers=layers, zero_centered_norms=True)


def read_moe(config: JsonMapping, *, origin: str) -> ModelArchitecture:
    """Return the architecture that the config.json of a Qwen3.5 model with experts describes."""
    c = _MoeConfig.read(config, origin=origin)
    layers = c.layers(origin=origin, fused_projections=False)
    return c.to_architecture("Qwen3_5MoeForCausalLM", origin=origin, layers=layers, zero_centered_norms=True)
