"""Layer specs without Transformer Engine: megatron-core's local modules where they work, else `torch_layers`."""

from __future__ import annotations

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
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
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from megarl.megatron.families.architecture import ModelArchitecture
from megarl.megatron.families.attention import LatentAttention
from megarl.megatron.modeling.torch_attention import TorchAttention
from megarl.megatron.modeling.torch_layers import DuplicatedLinear, PostNormLinear, RMSNorm

_CAUSAL = {"attn_mask_type": AttnMaskType.causal}


def torch_block_spec(architecture: ModelArchitecture, layers: range) -> TransformerBlockSubmodules:
    """Return the block spec of a model chunk with these (global) layer numbers."""
    return TransformerBlockSubmodules(layer_specs=[_layer(architecture, i) for i in layers], layer_norm=RMSNorm)


def _layer(architecture: ModelArchitecture, number: int) -> ModuleSpec:
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=RMSNorm,
            self_attention=_attention(architecture),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=RMSNorm,
            mlp=_moe(architecture) if architecture.has_routed_experts(number) else _mlp(architecture),
            mlp_bda=get_bias_dropout_add,
        ),
    )


def _attention(architecture: ModelArchitecture) -> ModuleSpec:
    attention = architecture.attention
    if isinstance(attention, LatentAttention):
        return _latent_attention()
    qk_norm = RMSNorm if attention.qk_norm else IdentityOp
    submodules = SelfAttentionSubmodules(
        linear_qkv=ColumnParallelLinear,
        core_attention=ModuleSpec(
            module=TorchAttention, params={"softcap": attention.softcap, "windows": architecture.window_sizes}
        ),
        linear_proj=PostNormLinear if attention.post_norm else RowParallelLinear,
        q_layernorm=qk_norm,
        k_layernorm=qk_norm,
    )
    return ModuleSpec(module=SelfAttention, params=_CAUSAL, submodules=submodules)


def _latent_attention() -> ModuleSpec:
    # MLASelfAttention accepts only down projections of classes that it knows by name. It also assumes that Transformer
    # Engine is present and otherwise fails comparing with the missing classes.
    multi_latent_attention.Linear = DuplicatedLinear
    multi_latent_attention.HAVE_TE = False
    submodules = MLASelfAttentionSubmodules(
        linear_q_proj=ColumnParallelLinear,
        linear_q_down_proj=DuplicatedLinear,
        linear_q_up_proj=ColumnParallelLinear,
        linear_kv_down_proj=DuplicatedLinear,
        linear_kv_up_proj=ColumnParallelLinear,
        core_attention=TorchAttention,
        linear_proj=RowParallelLinear,
        q_layernorm=RMSNorm,
        kv_layernorm=RMSNorm,
    )
    return ModuleSpec(module=MLASelfAttention, params=_CAUSAL, submodules=submodules)


def _mlp(architecture: ModelArchitecture) -> ModuleSpec:
    down = PostNormLinear if architecture.mlp.post_norm else RowParallelLinear
    return ModuleSpec(module=MLP, submodules=MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=down))


def _moe(architecture: ModelArchitecture) -> ModuleSpec:
    assert architecture.experts is not None
    linears = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    shared = ModuleSpec(module=SharedExpertMLP, submodules=linears) if architecture.experts.shared_ffn_size else None
    experts = ModuleSpec(module=SequentialMLP, submodules=linears)
    return ModuleSpec(module=MoELayer, submodules=MoESubmodules(experts=experts, shared_experts=shared))
