"""Builds megatron-core's TransformerConfig from a model architecture and a parallel layout."""

from __future__ import annotations

import os
from functools import partial

import torch
import torch.nn.functional as F
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from torch import Tensor

from megarl.config.megatron import MegatronConfig, MoeConfig
from megarl.config.trainer import ParallelConfig, RecomputeConfig
from megarl.errors import ConfigError
from megarl.megatron.families.architecture import ModelArchitecture
from megarl.megatron.families.attention import GatedDeltaNet, GroupedQueryAttention, LatentAttention
from megarl.megatron.families.feed_forward import GatedMlp, MixtureOfExperts, Routing
from megarl.megatron.mcore_fields import attention_backend, find_attention_problem, override_model_fields
from megarl.megatron.modeling.layer_spec import layer_backend
from megarl.megatron.modeling.rotary import score_scale
from megarl.megatron.modeling.router import LOAD_BALANCING_TYPES
from megarl.megatron.runtime import platform

_ACTIVATIONS = {"silu": F.silu, "gelu_tanh": partial(F.gelu, approximate="tanh"), "quick_gelu": quick_gelu}


def transformer_config(
    architecture: ModelArchitecture,
    parallel: ParallelConfig,
    dtype: torch.dtype,
    recompute: RecomputeConfig,
    megatron: MegatronConfig | None = None,
    moe: MoeConfig | None = None,
) -> TransformerConfig:
    """Return the TransformerConfig of a model on this machine.

    Raises:
        ConfigError: `megatron` or `recompute` has fields that need Transformer Engine, which is missing, or it has no
            attention for this machine's GPU.
    """
    megatron, moe = megatron or MegatronConfig(), moe or MoeConfig()
    backend = layer_backend(architecture, megatron, dtype)
    if not backend.has_te:
        problems = [*megatron.find_te_problems(), *recompute.find_te_problems()]
        if problems:
            raise ConfigError("\n".join(problems))
    mlps = [layer.mlp for layer in architecture.layers]
    options: dict[str, object] = {
        "num_layers": architecture.num_layers,
        "hidden_size": architecture.hidden_size,
        "ffn_hidden_size": next((m.ffn_size for m in mlps if isinstance(m, GatedMlp)), mlps[0].ffn_size),
        "layernorm_epsilon": architecture.norm_eps,
        "layernorm_zero_centered_gamma": architecture.zero_centered_norms,
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": _ACTIVATIONS[architecture.activation],
        "activation_func_clamp_value": architecture.mlp_clamp,
        "glu_linear_offset": 0.0 if architecture.mlp_clamp is None else 1.0,
        "add_bias_linear": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        # Initialization marks parameters as sharded; unmarked ones enter the gradient norm on the first rank only. The
        # values are loaded later. On the CPU, megarl's CUDA emulation takes megatron-core's device path, because its
        # CPU path builds full parameters on every rank.
        "perform_initialization": True,
        "use_cpu_initialization": False,
        "init_method": _keep_values,
        "output_layer_init_method": _keep_values,
        "embedding_init_method": _keep_values,
        "variable_seq_lengths": True,  # packs differ in length between micro-batches
        # megatron-core requires this dispatcher for variable lengths, in dense models too
        "moe_token_dispatcher_type": "alltoall",
    }
    options |= _parallelism(parallel) | _recomputation(recompute) | backend.fusions(architecture)
    options |= _moe(architecture, architecture.experts, moe) if architecture.experts else {}
    options = override_model_fields(options, megatron, moe=architecture.experts is not None)
    if backend.has_te:
        capability = platform.compute_capability()
        problem = find_attention_problem(architecture, megatron, capability, cp=parallel.cp)
        if problem is not None and backend.te_layers:
            raise ConfigError(problem)
        # also for torch's layers: megatron-core writes it to the environment, where all models of a process need the
        # same value
        options["attention_backend"] = attention_backend(megatron, capability)
    options["attention_backend"] = AttnBackend[str(options.get("attention_backend", "auto"))]
    if options.get("deterministic_mode"):
        # Transformer Engine's own switch, without which megatron-core refuses its attention
        os.environ["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] = "0"
    latent = architecture.attentions(LatentAttention)
    if latent:
        return MLATransformerConfig(**options, **_latent(architecture, latent[0]))
    for net in architecture.attentions(GatedDeltaNet):
        options |= _delta_net(architecture, net)
    return TransformerConfig(**options, **_grouped_query(architecture.attentions(GroupedQueryAttention)[0]))


def token_multiple(config: TransformerConfig) -> int:
    """Return the number that the tokens of a pack, over all context-parallel ranks, need to be a multiple of."""
    tp: int = config.tensor_model_parallel_size if config.sequence_parallel else 1
    return int(config.context_parallel_size) * tp * (_fp8_rows(config) if config.fp8 else 1)


def _fp8_rows(config: TransformerConfig) -> int:
    """Return what the number of rows of an FP8 matrix product needs to be a multiple of, as in megatron-core."""
    from megatron.core.fp8_utils import get_fp8_align_size

    return int(get_fp8_align_size(config.fp8_recipe))


def _keep_values(parameter: Tensor) -> Tensor:
    """Skip initialization: values are read from files later."""
    return parameter


def _parallelism(parallel: ParallelConfig) -> dict[str, object]:
    interleaved = {
        "virtual_pipeline_model_parallel_size": parallel.vpp,
        # With batched p2p, interleaved stages of variable lengths receive wrong activations.
        "overlap_p2p_comm": True,
        "batch_p2p_comm": False,
        # megatron-core would free outputs right after the start of an overlapped send, which reads them later
        "deallocate_pipeline_outputs": False,
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
        "deallocate_pipeline_outputs": True,  # the next stage has them
        **(interleaved if parallel.vpp > 1 else {}),
    }


def _recomputation(recompute: RecomputeConfig) -> dict[str, object]:
    match recompute.granularity:
        case "none":
            return {}
        case "selective":
            return {"recompute_granularity": "selective", "recompute_modules": list(recompute.modules)}
        case "full":
            return {
                "recompute_granularity": "full",
                "recompute_method": recompute.method,
                "recompute_num_layers": recompute.layers,
            }


def _grouped_query(attention: GroupedQueryAttention) -> dict[str, object]:
    return {
        "num_attention_heads": attention.num_heads,
        "num_query_groups": attention.num_kv_heads,
        "kv_channels": attention.head_dim,
        "add_qkv_bias": attention.qkv_bias,
        "qk_layernorm": attention.qk_norm or attention.full_qk_norm,
        "attention_output_gate": attention.output_gate,
        "softmax_scale": score_scale(attention),
    }


def _delta_net(architecture: ModelArchitecture, net: GatedDeltaNet) -> dict[str, object]:
    return {
        "experimental_attention_variant": "gated_delta_net",
        "linear_attention_freq": [int(isinstance(layer.attention, GatedDeltaNet)) for layer in architecture.layers],
        "linear_conv_kernel_dim": net.conv_kernel,
        "linear_key_head_dim": net.key_head_dim,
        "linear_value_head_dim": net.value_head_dim,
        "linear_num_key_heads": net.num_key_heads,
        "linear_num_value_heads": net.num_value_heads,
    }


def _latent(architecture: ModelArchitecture, attention: LatentAttention) -> dict[str, object]:
    rope = attention.rope
    yarn = {
        "rotary_scaling_factor": rope.scaling_parameter("factor", 1.0),
        "original_max_position_embeddings": int(
            rope.scaling_parameter("original_max_position_embeddings", architecture.max_positions)
        ),
        "beta_fast": rope.scaling_parameter("beta_fast", 32.0),
        "beta_slow": rope.scaling_parameter("beta_slow", 1.0),
        "mscale": rope.scaling_parameter("mscale", 1.0),
        "mscale_all_dim": rope.scaling_parameter("mscale_all_dim", 0.0),
    }
    return {
        "multi_latent_attention": True,
        "num_attention_heads": attention.num_heads,
        "num_query_groups": attention.num_heads,
        "kv_channels": attention.qk_nope_head_dim,
        "q_lora_rank": attention.q_lora_rank,
        "kv_lora_rank": attention.kv_lora_rank,
        "qk_head_dim": attention.qk_nope_head_dim,
        "qk_pos_emb_head_dim": attention.qk_rope_head_dim,
        "v_head_dim": attention.v_head_dim,
        "qk_layernorm": True,
        "rotary_base": rope.theta,
        **(
            {"rope_type": "yarn", **yarn}
            if rope.rope_type == "yarn"
            else {"rope_type": "rope", "rotary_scaling_factor": 1.0}
        ),
    }


def _moe(architecture: ModelArchitecture, experts: MixtureOfExperts, moe: MoeConfig) -> dict[str, object]:
    return {
        "num_moe_experts": experts.num_experts,
        "moe_ffn_hidden_size": experts.ffn_size,
        "moe_shared_expert_intermediate_size": experts.shared_ffn_size or None,
        "moe_shared_expert_gate": experts.shared_gate,
        "moe_layer_freq": [int(layer.has_routed_experts) for layer in architecture.layers],
        "moe_router_load_balancing_type": LOAD_BALANCING_TYPES[moe.aux_loss_scope] if moe.aux_loss_coeff else "none",
        "moe_aux_loss_coeff": moe.aux_loss_coeff,
        "moe_router_dtype": "fp32",
        # the fused kernel would choose the experts itself
        **({} if moe.router_replay == "none" else {"moe_router_fusion": False}),
        **_routing(experts.routing),
        # The bias is part of the policy and stays as loaded; with the default rate every optimizer step would move it.
        "moe_router_enable_expert_bias": experts.expert_bias,
        "moe_router_bias_update_rate": 0.0,
    }


def _routing(routing: Routing) -> dict[str, object]:
    groups = {"moe_router_num_groups": routing.num_groups, "moe_router_group_topk": routing.topk_group}
    return {
        "moe_router_topk": routing.top_k,
        "moe_router_score_function": routing.scoring_func,
        # Softmax over the selected experts alone sums to 1; taken before selection, it does not.
        "moe_router_pre_softmax": routing.scoring_func == "sigmoid" or not routing.norm_topk_prob,
        "moe_router_topk_scaling_factor": routing.routed_scaling_factor
        if routing.routed_scaling_factor != 1.0
        else None,
        **(groups if routing.num_groups > 1 else {}),
    }
