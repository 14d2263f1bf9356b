"""megatron-core's own modules of a tiny model, built on real ranks: their parameters' names and shapes."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

Shapes = dict[str, tuple[int, ...]]


def parameters_of_ranks(config: dict[str, Any], sizes: dict[str, int], padded_vocab: int) -> list[Shapes]:
    """On every rank: by rank, parameters and kept buffers by name, layers and experts numbered globally.

    Args:
        sizes: of tp, pp, ep, etp, and optionally vpp and the layers of the first and last stage.
    """
    from megarl.megatron import platform

    platform.prepare()
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state, tensor_parallel

    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(
        sizes["tp"],
        sizes["pp"],
        sizes.get("vpp"),
        expert_model_parallel_size=sizes["ep"],
        expert_tensor_parallel_size=sizes["etp"],
    )
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    mine: Shapes = {}
    with torch.no_grad():
        for chunk in range(sizes.get("vpp", 1)):
            mine |= _chunk(config, sizes, padded_vocab, chunk if "vpp" in sizes else None)
    everyone: list[Shapes] = [{}] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
    return everyone


def _chunk(config: dict[str, Any], sizes: dict[str, int], padded_vocab: int, vp_stage: int | None) -> Shapes:
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    settings = _transformer_config(config, sizes)
    last = parallel_state.is_pipeline_last_stage(ignore_virtual=vp_stage is None, vp_stage=vp_stage)
    predicts = last and config.get("num_nextn_predict_layers")
    model = GPTModel(
        config=settings,
        transformer_layer_spec=_block(settings, vp_stage),
        vocab_size=padded_vocab,
        max_sequence_length=64,
        position_embedding_type="rope",
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=vp_stage is None, vp_stage=vp_stage),
        post_process=last,
        share_embeddings_and_output_weights=config["tie_word_embeddings"],
        mtp_block_spec=_mtp(settings) if predicts else None,
        vp_stage=vp_stage,
    )
    experts = settings.num_moe_experts // settings.expert_model_parallel_size
    first_expert = parallel_state.get_expert_model_parallel_rank() * experts
    first_layer = get_transformer_layer_offset(settings, vp_stage=vp_stage)
    kept = {name: tuple(p.shape) for name, p in model.named_parameters()}
    kept |= {name: tuple(b.shape) for name, b in model.named_buffers() if name.endswith("expert_bias")}
    return {_global_name(name, first_layer, first_expert): shape for name, shape in kept.items()}


def _global_name(name: str, first_layer: int, first_expert: int) -> str:
    name = re.sub(r"^(decoder\.layers\.)(\d+)", lambda m: f"{m[1]}{int(m[2]) + first_layer}", name)
    return re.sub(r"(\.local_experts\.)(\d+)", lambda m: f"{m[1]}{int(m[2]) + first_expert}", name)


def _transformer_config(config: dict[str, Any], sizes: dict[str, int]) -> Any:
    import torch
    import torch.nn.functional as F
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    layers, latent = config["num_hidden_layers"], "kv_lora_rank" in config
    common = {
        "num_layers": layers,
        "hidden_size": config["hidden_size"],
        "ffn_hidden_size": config["intermediate_size"],
        "num_attention_heads": config["num_attention_heads"],
        "num_query_groups": config["num_key_value_heads"],
        "kv_channels": config.get("head_dim") or config["qk_nope_head_dim"],
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "add_bias_linear": False,
        "qk_layernorm": True,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "gradient_accumulation_fusion": False,
        "apply_rope_fusion": False,
        "use_cpu_initialization": True,
        "pipeline_dtype": torch.float32,
        "num_moe_experts": config.get("num_experts") or config["n_routed_experts"],
        "moe_ffn_hidden_size": config["moe_intermediate_size"],
        "moe_router_topk": config["num_experts_per_tok"],
        "moe_router_load_balancing_type": "none",
        "moe_token_dispatcher_type": "alltoall",
        "tensor_model_parallel_size": sizes["tp"],
        "pipeline_model_parallel_size": sizes["pp"],
        "virtual_pipeline_model_parallel_size": sizes.get("vpp"),
        "num_layers_in_first_pipeline_stage": sizes.get("first"),
        "num_layers_in_last_pipeline_stage": sizes.get("last"),
        "expert_model_parallel_size": sizes["ep"],
        "expert_tensor_parallel_size": sizes["etp"],
        "sequence_parallel": sizes["tp"] > 1,
    }
    if not latent:
        step, without = config["decoder_sparse_step"], config["mlp_only_layers"]
        frequency = [int(i not in without and (i + 1) % step == 0) for i in range(layers)]
        return TransformerConfig(**common, moe_layer_freq=frequency)
    return MLATransformerConfig(
        **common,
        multi_latent_attention=True,
        q_lora_rank=config["q_lora_rank"],
        kv_lora_rank=config["kv_lora_rank"],
        qk_head_dim=config["qk_nope_head_dim"],
        qk_pos_emb_head_dim=config["qk_rope_head_dim"],
        v_head_dim=config["v_head_dim"],
        rope_type="rope",
        rotary_scaling_factor=1.0,
        moe_shared_expert_intermediate_size=config["moe_intermediate_size"] * config["n_shared_experts"],
        moe_layer_freq=[int(i >= config["first_k_dense_replace"]) for i in range(layers)],
        moe_router_score_function="sigmoid",
        moe_router_enable_expert_bias=True,
        moe_router_pre_softmax=True,
        moe_router_num_groups=config["n_group"],
        moe_router_group_topk=config["topk_group"],
        mtp_num_layers=config["num_nextn_predict_layers"] or None,
    )


def _block(settings: Any, vp_stage: int | None) -> Any:
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    from megarl.megatron.layers import RMSNorm

    first = get_transformer_layer_offset(settings, vp_stage=vp_stage)
    here = range(first, first + get_num_layers_to_build(settings, vp_stage=vp_stage))
    specs = [_layer(settings, routed=bool(settings.moe_layer_freq[i])) for i in here]
    return TransformerBlockSubmodules(layer_specs=specs, layer_norm=RMSNorm)


def _layer(settings: Any, *, routed: bool) -> Any:
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.mlp import MLP, MLPSubmodules
    from megatron.core.transformer.moe.experts import SequentialMLP
    from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
    from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

    from megarl.megatron.layers import RMSNorm

    linears = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    mlp = ModuleSpec(module=MLP, submodules=linears)
    if routed:
        experts = ModuleSpec(module=SequentialMLP, submodules=linears)
        shared = ModuleSpec(module=SharedExpertMLP, submodules=linears)
        mlp = ModuleSpec(module=MoELayer, submodules=MoESubmodules(experts=experts, shared_experts=shared))
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=RMSNorm,
            self_attention=_attention(settings),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=RMSNorm,
            mlp=mlp,
            mlp_bda=get_bias_dropout_add,
        ),
    )


def _attention(settings: Any) -> Any:
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer import multi_latent_attention as mla
    from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.spec_utils import ModuleSpec

    from megarl.megatron.layers import RMSNorm, TorchAttention

    causal = {"attn_mask_type": AttnMaskType.causal}
    if not settings.multi_latent_attention:
        submodules = SelfAttentionSubmodules(
            linear_qkv=ColumnParallelLinear,
            core_attention=TorchAttention,
            linear_proj=RowParallelLinear,
            q_layernorm=RMSNorm,
            k_layernorm=RMSNorm,
        )
        return ModuleSpec(module=SelfAttention, params=causal, submodules=submodules)
    duplicated = _duplicated_linear()
    mla.Linear = duplicated  # it refuses classes that it does not know
    mla.HAVE_TE = False
    submodules = mla.MLASelfAttentionSubmodules(
        linear_q_proj=ColumnParallelLinear,
        linear_q_down_proj=duplicated,
        linear_q_up_proj=ColumnParallelLinear,
        linear_kv_down_proj=duplicated,
        linear_kv_up_proj=ColumnParallelLinear,
        core_attention=TorchAttention,
        linear_proj=RowParallelLinear,
        q_layernorm=RMSNorm,
        kv_layernorm=RMSNorm,
    )
    return ModuleSpec(module=mla.MLASelfAttention, params=causal, submodules=submodules)


@cache
def _duplicated_linear() -> Any:
    """What Transformer Engine's linear is with `parallel_mode="duplicated"`, which megatron-core gives it here."""
    import torch

    class DuplicatedLinear(torch.nn.Module):
        def __init__(self, input_size: int, output_size: int, **_: Any) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.empty(output_size, input_size))

    return DuplicatedLinear


def _mtp(settings: Any) -> Any:
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear
    from megatron.core.transformer import multi_token_prediction as mtp
    from megatron.core.transformer.spec_utils import ModuleSpec

    from megarl.megatron.layers import RMSNorm

    layer = ModuleSpec(
        module=mtp.MultiTokenPredictionLayer,
        submodules=mtp.MultiTokenPredictionLayerSubmodules(
            enorm=RMSNorm,
            hnorm=RMSNorm,
            eh_proj=ColumnParallelLinear,
            transformer_layer=_layer(settings, routed=True),
            layer_norm=RMSNorm,
        ),
    )
    submodules = mtp.MultiTokenPredictionBlockSubmodules(layer_specs=[layer])
    return ModuleSpec(module=mtp.MultiTokenPredictionBlock, submodules=submodules)
