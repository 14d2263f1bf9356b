"""Which modules a model's layers are built of, torch only: megatron-core's own where they serve, else `layers`."""

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

from megarl.megatron.families.architecture import Decoder
from megarl.megatron.families.attention import LatentAttention
from megarl.megatron.modeling.torch_attention import TorchAttention
from megarl.megatron.modeling.torch_layers import DuplicatedLinear, PostNormLinear, RMSNorm

_CAUSAL = {"attn_mask_type": AttnMaskType.causal}


def torch_block(model: Decoder, layers: range) -> TransformerBlockSubmodules:
    """The `layers` of a model chunk."""
    return TransformerBlockSubmodules(layer_specs=[_layer(model, i) for i in layers], layer_norm=RMSNorm)


def _layer(model: Decoder, number: int) -> ModuleSpec:
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=RMSNorm,
            self_attention=_attention(model),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=RMSNorm,
            mlp=_mixture(model) if model.is_routed(number) else _mlp(model),
            mlp_bda=get_bias_dropout_add,
        ),
    )


def _attention(model: Decoder) -> ModuleSpec:
    attention = model.attention
    if isinstance(attention, LatentAttention):
        return _latent_attention()
    qk_norm = RMSNorm if attention.qk_norm else IdentityOp
    submodules = SelfAttentionSubmodules(
        linear_qkv=ColumnParallelLinear,
        core_attention=ModuleSpec(
            module=TorchAttention, params={"softcap": attention.softcap, "windows": model.windows}
        ),
        linear_proj=PostNormLinear if attention.post_norm else RowParallelLinear,
        q_layernorm=qk_norm,
        k_layernorm=qk_norm,
    )
    return ModuleSpec(module=SelfAttention, params=_CAUSAL, submodules=submodules)


def _latent_attention() -> ModuleSpec:
    # It admits down projections of classes that it knows by name, and takes Transformer Engine for present where it is
    # not: without it, comparing with its missing classes fails.
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


def _mlp(model: Decoder) -> ModuleSpec:
    down = PostNormLinear if model.mlp.sandwiched else RowParallelLinear
    return ModuleSpec(module=MLP, submodules=MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=down))


def _mixture(model: Decoder) -> ModuleSpec:
    assert model.experts is not None
    linears = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    shared = ModuleSpec(module=SharedExpertMLP, submodules=linears) if model.experts.shared_ffn_size else None
    experts = ModuleSpec(module=SequentialMLP, submodules=linears)
    return ModuleSpec(module=MoELayer, submodules=MoESubmodules(experts=experts, shared_experts=shared))
