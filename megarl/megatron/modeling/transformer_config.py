"""megatron-core's configuration of a model, from what its config.json describes and how it is laid out."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from torch import Tensor

from megarl.config.trainer import ParallelConfig, RecomputeConfig
from megarl.megatron.families.architecture import Decoder
from megarl.megatron.families.attention import GroupedQueryAttention, LatentAttention
from megarl.megatron.families.feed_forward import MixtureOfExperts, Routing
from megarl.megatron.modeling.rotary_embedding import attention_factor
from megarl.megatron.runtime import platform


def transformer_config(
    model: Decoder, parallel: ParallelConfig, dtype: torch.dtype, recompute: RecomputeConfig
) -> TransformerConfig:
    """Every fusion that needs an accelerator package is off without one."""
    options = {
        "num_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "ffn_hidden_size": model.mlp.ffn_size,
        "layernorm_epsilon": model.norm_eps,
        "layernorm_zero_centered_gamma": model.zero_centered_norms,
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": F.silu if model.activation == "silu" else partial(F.gelu, approximate="tanh"),
        "add_bias_linear": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "gradient_accumulation_fusion": False,
        "apply_rope_fusion": False,
        "persist_layer_norm": False,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        # Initialisation is what marks parameters as sharded, and unmarked ones are left out of the gradient norm on all
        # ranks but the first. Values come from elsewhere. On the CPU, megarl's stand-in serves megatron-core's way for
        # devices; its own way for CPUs makes every parameter whole on every rank.
        "perform_initialization": True,
        "use_cpu_initialization": False,
        "init_method": _leave,
        "output_layer_init_method": _leave,
        "embedding_init_method": _leave,
        "variable_seq_lengths": True,  # packs differ in length from micro-batch to micro-batch
        # megatron-core asks for this dispatcher whenever lengths vary, in dense models too
        "moe_token_dispatcher_type": "alltoall",
    }
    options |= _parallelism(parallel) | _recomputation(recompute)
    options |= _mixture(model, model.experts) if model.experts else {}
    match model.attention:
        case GroupedQueryAttention() as attention:
            return TransformerConfig(**options, **_grouped_query(model, attention))
        case LatentAttention() as latent:
            return MLATransformerConfig(**options, **_latent(model, latent))


def _leave(parameter: Tensor) -> Tensor:
    """Values are read, or come from a checkpoint."""
    return parameter


def _parallelism(parallel: ParallelConfig) -> dict[str, Any]:
    interleaved = {
        "virtual_pipeline_model_parallel_size": parallel.vpp,
        # With the other way of sending between stages, interleaved stages of variable lengths get wrong activations.
        "overlap_p2p_comm": True,
        "batch_p2p_comm": False,
    }
    return {
        "tensor_model_parallel_size": parallel.tp,
        "pipeline_model_parallel_size": parallel.pp,
        "context_parallel_size": parallel.cp,
        "expert_model_parallel_size": parallel.ep,
        "expert_tensor_parallel_size": parallel.expert_tp,
        "sequence_parallel": parallel.uses_sequence_parallel,
        "num_layers_in_first_pipeline_stage": parallel.first_stage_layers,
        "num_layers_in_last_pipeline_stage": parallel.last_stage_layers,
        **(interleaved if parallel.vpp > 1 else {}),
    }


def _recomputation(recompute: RecomputeConfig) -> dict[str, Any]:
    match recompute.granularity:
        case "none":
            return {}
        case "selective":
            return {"recompute_granularity": "selective", "recompute_modules": list(recompute.modules)}
        case "full":
            return {
                "recompute_granularity": "full",
                "recompute_method": "uniform",
                "recompute_num_layers": recompute.layers,
            }


def _grouped_query(model: Decoder, attention: GroupedQueryAttention) -> dict[str, Any]:
    scale = attention.scale if attention.scale is not None else attention.head_dim**-0.5
    return {
        "num_attention_heads": attention.num_heads,
        "num_query_groups": attention.num_kv_heads,
        "kv_channels": attention.head_dim,
        "add_qkv_bias": attention.qkv_bias,
        "qk_layernorm": attention.qk_norm,
        # What rotary embeddings multiply queries and keys by goes into their product's scale.
        "softmax_scale": scale * attention_factor(model.rope, attention.head_dim) ** 2,
    }


def _latent(model: Decoder, attention: LatentAttention) -> dict[str, Any]:
    rope = model.rope
    yarn = {
        "rotary_scaling_factor": rope.get("factor", 1.0),
        "original_max_position_embeddings": int(rope.get("original_max_position_embeddings", model.max_positions)),
        "beta_fast": rope.get("beta_fast", 32.0),
        "beta_slow": rope.get("beta_slow", 1.0),
        "mscale": rope.get("mscale", 1.0),
        "mscale_all_dim": rope.get("mscale_all_dim", 0.0),
    }
    return {
        "multi_latent_attention": True,
        "num_attention_heads": attention.num_heads,
        "num_query_groups": attention.num_heads,
        "kv_channels": attention.nope_dim,
        "q_lora_rank": attention.q_rank,
        "kv_lora_rank": attention.kv_rank,
        "qk_head_dim": attention.nope_dim,
        "qk_pos_emb_head_dim": attention.rope_dim,
        "v_head_dim": attention.v_dim,
        "qk_layernorm": True,
        "rotary_base": rope.theta,
        **(
            {"rope_type": "yarn", **yarn}
            if rope.kind == "yarn"
            else {"rope_type": "rope", "rotary_scaling_factor": 1.0}
        ),
    }


def _mixture(model: Decoder, experts: MixtureOfExperts) -> dict[str, Any]:
    return {
        "num_moe_experts": experts.num_experts,
        "moe_ffn_hidden_size": experts.ffn_size,
        "moe_shared_expert_intermediate_size": experts.shared_ffn_size or None,
        "moe_layer_freq": [int(model.is_routed(i)) for i in range(model.num_layers)],
        "moe_grouped_gemm": platform.uses_transformer_engine(),
        "moe_permute_fusion": False,
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_router_dtype": "fp32",
        **_routing(experts.routing),
        # Every optimizer step would move the bias at the default rate: it is part of the policy, and stays as it came.
        "moe_router_enable_expert_bias": experts.router_bias,
        "moe_router_bias_update_rate": 0.0,
    }


def _routing(routing: Routing) -> dict[str, Any]:
    groups = {"moe_router_num_groups": routing.groups, "moe_router_group_topk": routing.top_groups}
    return {
        "moe_router_topk": routing.top_k,
        "moe_router_score_function": routing.score,
        # Scores over the experts picked add up to 1; over all of them, they do not.
        "moe_router_pre_softmax": routing.score == "sigmoid" or not routing.normalised,
        "moe_router_topk_scaling_factor": routing.scaling if routing.scaling != 1.0 else None,
        **(groups if routing.groups > 1 else {}),
    }
