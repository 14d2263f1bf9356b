"""Layer specs: those of Transformer Engine as megatron-core makes them, and those of torch.

Specs of torch have megatron-core's local modules where they work, else `torch_layers`.

Layers, fused kernels and the description of packs follow from the choice between the two and from nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, override

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.multi_latent_attention import MLASelfAttention, MLASelfAttentionSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules

from megarl.config.megatron import MegatronConfig
from megarl.megatron.families.architecture import ModelArchitecture
from megarl.megatron.families.attention import Attention, GatedDeltaNet, GroupedQueryAttention, LatentAttention
from megarl.megatron.families.feed_forward import GatedMlp, MixtureOfExperts
from megarl.megatron.mcore_fields import fusion_fields, needs_torch_layers
from megarl.megatron.modeling.rotary import score_scale
from megarl.megatron.modeling.router import BiasedRouter, PackLayer, PackRouter
from megarl.megatron.modeling.sparse_attention import SparseAttention
from megarl.megatron.modeling.torch_layers import (
    AllHeadsNorm,
    BiasedColumnLinear,
    BiasedRowLinear,
    DuplicatedLinear,
    PostNormLinear,
    RMSNorm,
    TorchAttention,
)
from megarl.megatron.runtime import platform

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megarl.megatron.families.architecture import ModelArchitecture


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerBackend:
    """What a model is computed with."""

    has_te: bool
    """Transformer Engine's kernels can be called: CUDA and the package are there."""

    te_layers: bool
    """The layers are Transformer Engine's; False: those of `torch_layers` and megatron-core's local ones."""

    def block_spec(
        self, architecture: ModelArchitecture, config: TransformerConfig, layers: range, vp_stage: int | None
    ) -> TransformerBlockSubmodules:
        """Return the block spec of a model chunk with these (global) layer numbers."""
        return te_block_spec(config, vp_stage) if self.te_layers else torch_block_spec(architecture, layers)

    def fusions(self, architecture: ModelArchitecture) -> dict[str, bool]:
        """Return megatron-core's fields of fused kernels."""
        has_kernel = find_spec("fused_weight_gradient_mlp_cuda") is not None
        return fusion_fields(architecture, has_te=self.has_te, te_layers=self.te_layers, has_wgrad_kernel=has_kernel)


def layer_backend(architecture: ModelArchitecture, megatron: MegatronConfig, dtype: torch.dtype) -> LayerBackend:
    """Return the backend of a model on this machine, with parameters of `dtype`."""
    has_te, name = platform.uses_transformer_engine(), str(dtype).removeprefix("torch.")
    return LayerBackend(has_te=has_te, te_layers=has_te and not needs_torch_layers(architecture, megatron, name))


_CAUSAL = {"attn_mask_type": AttnMaskType.causal}


class LatentSelfAttention(MLASelfAttention):  # type: ignore[misc]
    """Multi-head latent attention with exactly the layers of its spec.

    Where a model has no query latent (DeepSeek-V2-Lite, Moonlight), megatron-core replaces the query projection of the
    spec by one with a norm before it, a second norm of the hidden states that these models do not have.
    """

    @override
    def _resolve_qk_norm_config(self, submodules: MLASelfAttentionSubmodules) -> dict[str, Any]:
        names = ("linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj", "q_layernorm", "kv_layernorm")
        return {name: getattr(submodules, name) for name in names}


def te_block_spec(config: TransformerConfig, vp_stage: int | None) -> TransformerBlockSubmodules:
    """Return the block spec of a model chunk with Transformer Engine's layers."""
    block = get_gpt_decoder_block_spec(config, use_transformer_engine=True, vp_stage=vp_stage)
    for layer in block.layer_specs:
        layer.module = PackLayer
        if layer.submodules.mlp.func is MoELayer:
            layer.submodules.mlp.keywords["submodules"].router = PackRouter
        attention = layer.submodules.self_attention
        if attention.module is MLASelfAttention:
            attention.module = LatentSelfAttention
    return block


def torch_block_spec(architecture: ModelArchitecture, layers: range) -> TransformerBlockSubmodules:
    """Return the block spec of a model chunk with these (global) layer numbers."""
    return TransformerBlockSubmodules(layer_specs=[_layer(architecture, i) for i in layers], layer_norm=RMSNorm)


def _layer(architecture: ModelArchitecture, number: int) -> ModuleSpec:
    layer = architecture.layers[number]
    return ModuleSpec(
        module=PackLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=RMSNorm,
            self_attention=_attention(layer.attention),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=RMSNorm,
            mlp=_moe(layer.mlp) if isinstance(layer.mlp, MixtureOfExperts) else _mlp(layer.mlp),
            mlp_bda=get_bias_dropout_add,
        ),
    )


def _attention(attention: Attention) -> ModuleSpec:
    if isinstance(attention, LatentAttention):
        return _latent_attention(attention)
    if isinstance(attention, GatedDeltaNet):
        from megarl.megatron.modeling.delta_net import delta_net_spec

        return delta_net_spec()
    norms = [RMSNorm if attention.qk_norm else IdentityOp] * 2
    if attention.full_qk_norm:
        norms = [partial(AllHeadsNorm, num_heads=heads) for heads in (attention.num_heads, attention.num_kv_heads)]
    submodules = SelfAttentionSubmodules(
        linear_qkv=ColumnParallelLinear,
        core_attention=ModuleSpec(
            module=TorchAttention,
            params={
                "scale": score_scale(attention),
                "softcap": attention.softcap,
                "window": attention.window,
                "sinks": attention.sinks,
            },
        ),
        linear_proj=_output_linear(attention),
        q_layernorm=norms[0],
        k_layernorm=norms[1],
    )
    return ModuleSpec(module=SelfAttention, params=_CAUSAL, submodules=submodules)


def _output_linear(attention: GroupedQueryAttention) -> type[RowParallelLinear]:
    if attention.output_bias:
        return BiasedRowLinear
    return PostNormLinear if attention.post_norm else RowParallelLinear


def _latent_attention(attention: LatentAttention) -> ModuleSpec:
    # MLASelfAttention accepts only down projections of classes that it knows by name
    multi_latent_attention.Linear = DuplicatedLinear
    submodules = MLASelfAttentionSubmodules(
        linear_q_proj=ColumnParallelLinear,
        linear_q_down_proj=DuplicatedLinear,
        linear_q_up_proj=ColumnParallelLinear,
        linear_kv_down_proj=DuplicatedLinear,
        linear_kv_up_proj=ColumnParallelLinear,
        core_attention=ModuleSpec(module=SparseAttention, params={"attention": attention})
        if attention.indexer
        else TorchAttention,
        linear_proj=RowParallelLinear,
        q_layernorm=RMSNorm,
        kv_layernorm=RMSNorm,
    )
    return ModuleSpec(module=LatentSelfAttention, params=_CAUSAL, submodules=submodules)


def _mlp(mlp: GatedMlp) -> partial[MLP]:
    down = PostNormLinear if mlp.post_norm else RowParallelLinear
    return partial(MLP.as_mlp_submodule, submodules=MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=down))


def _moe(mixture: MixtureOfExperts) -> ModuleSpec:
    linears = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    router = PackRouter
    if mixture.biases:
        linears, router = MLPSubmodules(linear_fc1=BiasedColumnLinear, linear_fc2=BiasedRowLinear), BiasedRouter
    shared = ModuleSpec(module=SharedExpertMLP, submodules=linears) if mixture.shared_ffn_size else None
    experts = ModuleSpec(module=SequentialMLP, submodules=linears)
    return ModuleSpec(module=MoELayer, submodules=MoESubmodules(experts=experts, shared_experts=shared, router=router))
