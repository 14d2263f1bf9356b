"""torch-only layers behind megatron-core's interfaces, used where Transformer Engine is not importable.

megatron-core's own local pieces refuse what is needed here: `WrappedTorchNorm` sequence parallelism, local
`DotProductAttention` packed sequences.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import Tensor

from megarl.megatron.packing import TorchPackedSeqParams


class RMSNorm(torch.nn.Module):
    """Root-mean-square norm in float32 whatever the parameters' dtype."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        # Each tensor-parallel rank sees its slice of the sequence, so megatron-core must all-reduce this gradient.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """Normalises the last dimension."""
        return F.rms_norm(x.float(), (x.shape[-1],), self.weight.float(), self.eps).to(x.dtype)


class TorchAttention(MegatronModule):  # type: ignore[misc]
    """Causal self-attention over a pack; queries may have more heads than keys and values."""

    def __init__(self, config: TransformerConfig, softmax_scale: float | None = None, **_: Any) -> None:
        super().__init__(config)
        self.softmax_scale = softmax_scale

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: TorchPackedSeqParams | None = None,
    ) -> Tensor:
        """[T, heads * head_dim] from query [T, heads, head_dim], key and value [T, kv_heads, head_dim]."""
        assert isinstance(packed_seq_params, TorchPackedSeqParams), "torch attention takes packed sequences only"
        out_TD = torch.empty_like(query).flatten(1)
        outputs, indices = [], []
        for group in packed_seq_params.groups:
            q, k, v = (x[group.gather_nL].transpose(1, 2) for x in (query, key, value))
            o = F.scaled_dot_product_attention(
                q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1], scale=self.softmax_scale
            )
            flat = o.transpose(1, 2).reshape(-1, out_TD.shape[1])
            outputs.append(flat[group.padded_index_K])
            indices.append(group.token_index_K)
        return out_TD.index_copy(0, torch.cat(indices), torch.cat(outputs))


def _layer(config: TransformerConfig) -> ModuleSpec:
    qk_norm = RMSNorm if config.qk_layernorm else IdentityOp
    attention = ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=ColumnParallelLinear,
            core_attention=TorchAttention,
            linear_proj=RowParallelLinear,
            q_layernorm=qk_norm,
            k_layernorm=qk_norm,
        ),
    )
    linears = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    mlp = ModuleSpec(module=MLP, submodules=linears)
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=RMSNorm,
            self_attention=attention,
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=RMSNorm,
            mlp=mlp,
            mlp_bda=get_bias_dropout_add,
        ),
    )


def torch_block(config: TransformerConfig) -> TransformerBlockSubmodules:
    """This pipeline rank's layers, torch only."""
    return TransformerBlockSubmodules(
        layer_specs=[_layer(config)] * get_num_layers_to_build(config), layer_norm=RMSNorm
    )
