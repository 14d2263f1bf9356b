"""The sections `trainer.megatron`, fields of megatron-core's configurations, and `trainer.moe`.

megatron-core 0.19.2 has 322 fields of TransformerConfig and MLATransformerConfig, 38 of DistributedDataParallelConfig
and 63 of OptimizerConfig. Each is in exactly one of two tables of its part: allowed, with its type, or refused, with
the reason. The tables are data, because a configuration is checked in processes that do not import torch.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal, TypeAlias, cast

from pydantic import Field, field_validator, model_validator
from pydantic_core.core_schema import ValidationInfo

from megarl.config.section import Section

MEGATRON_VERSION = "0.19.2"
"""Version of megatron-core that the tables describe."""

Part = Literal["model", "ddp", "optimizer"]
"""Key below `trainer.megatron` that passes the fields of one of megatron-core's configuration classes."""

CLASS_OF: Mapping[Part, str] = {
    "model": "TransformerConfig",
    "ddp": "DistributedDataParallelConfig",
    "optimizer": "OptimizerConfig",
}
"""megatron-core's class by part."""


def _by_name(table: Mapping[str, str]) -> dict[str, str]:
    return {name: kind for kind, names in table.items() for name in names.split()}


ALLOWED: Mapping[Part, Mapping[str, str]] = {
    "model": _by_name(
        {
            "bool": "activation_func_fp8_input_store apply_rope_fusion batch_p2p_sync bias_activation_fusion "
            "bias_dropout_fusion clone_scatter_output_in_embedding cpu_offloading cpu_offloading_activations "
            "cpu_offloading_double_buffering cpu_offloading_retain_pinned_cpu_buffers deallocate_pipeline_outputs "
            "deterministic_mode "
            "disable_bf16_reduced_precision_matmul disable_parameter_transpose_cache distribute_saved_activations "
            "fine_grained_activation_offloading first_last_layers_bf16 fp8_wgrad fused_residual_rmsnorm "
            "gradient_accumulation_fusion moe_hybridep_pad_uneven_dispatch_inputs moe_permute_fusion "
            "moe_permute_fusion_into_hybridep moe_router_fusion moe_router_padding_for_fp8 "
            "moe_router_padding_for_quantization moe_shared_expert_overlap overlap_p2p_comm_warmup_flush "
            "tp_only_amax_red use_te_activation_func",
            "int": "cpu_offloading_num_layers delta_offload_bytes_across_pp_ranks min_offloaded_tensor_size "
            "mlp_chunks_for_training moe_hybridep_num_sms_preprocessing "
            "num_layers_at_end_in_bf16 num_layers_at_start_in_bf16",
            "int | null": "fine_grained_offloading_max_inflight_offloads flash_attention_version moe_deepep_num_sms "
            "moe_flex_dispatcher_num_sms moe_hybridep_num_blocks_permute moe_hybridep_num_blocks_unpermute "
            "moe_hybridep_num_sms",
            "float": "activation_offload_fraction",
            "float | null": "moe_z_loss_coeff",
            "auto | flash | fused": "attention_backend",
            "local | transformer_engine": "transformer_impl",
            "p2p | a2a | list": "cp_comm_type",
            "e4m3 | hybrid | null": "fp8",
            "tensorwise | blockwise | mxfp8": "fp8_recipe",
            "alltoall | flex": "moe_token_dispatcher_type",
            "deepep | hybridep | ncclep": "moe_flex_dispatcher_backend",
            "fp32 | fp64": "moe_router_dtype",
            "list": "offload_modules",
        }
    ),
    "ddp": _by_name(
        {
            "bool": "average_in_collective grad_reduce_in_fp32 overlap_grad_reduce overlap_param_gather "
            "pad_buckets_for_high_nccl_busbw reduce_scatter_with_fp32_accumulation",
            "int | null": "bucket_size",
        }
    ),
    "optimizer": _by_name(
        {
            "bool": "apply_wd_to_qk_layernorm decoupled_weight_decay optimizer_cpu_offload "
            "overlap_cpu_optimizer_d2h_h2d pin_cpu_grads pin_cpu_params use_precision_aware_optimizer "
            "use_torch_optimizer_for_cpu_offload",
            "float": "optimizer_offload_fraction",
            "float | null": "decoupled_lr decoupled_min_lr",
            "float32 | bfloat16": "exp_avg_dtype exp_avg_sq_dtype main_grads_dtype",
        }
    ),
}
"""Fields that may be set -> their type: `bool`, `int`, `float`, `list` (of strings), names of values, or `null`."""


@dataclass(frozen=True, slots=True)
class RefusedFields:
    """Fields that are refused for the same reason."""

    reason: str
    """Completes the sentence `<field>: ...`."""
    names: tuple[str, ...]
    """Names, and patterns such as `fsdp_*`."""


def _refused(table: Mapping[str, str]) -> tuple[RefusedFields, ...]:
    return tuple(RefusedFields(reason, tuple(names.split())) for reason, names in table.items())


REFUSED: Mapping[Part, tuple[RefusedFields, ...]] = {
    "model": _refused(
        {
            "megarl sets it from trainer.parallel": (
                "tensor_model_parallel_size pipeline_model_parallel_size virtual_pipeline_model_parallel_size "
                "sequence_parallel context_parallel_size expert_model_parallel_size expert_tensor_parallel_size "
                "num_layers_in_first_pipeline_stage num_layers_in_last_pipeline_stage"
            ),
            "megarl sets it from trainer.recompute": (
                "recompute_granularity recompute_method recompute_num_layers recompute_modules moe_layer_recompute "
                "num_microbatches_with_partial_activation_checkpoints"
            ),
            "megarl sets it from trainer.moe": "moe_aux_loss_coeff moe_router_load_balancing_type",
            "megarl sets it from model.dtype": ("params_dtype pipeline_dtype bf16 fp16 enable_autocast autocast_dtype"),
            "it follows from the model's config.json, which the engines read too": (
                "num_layers hidden_size num_attention_heads softmax_scale softmax_type num_query_groups "
                "ffn_hidden_size kv_channels layernorm_epsilon layernorm_zero_centered_gamma add_bias_linear "
                "add_qkv_bias gated_linear_unit activation_func glu_linear_offset activation_func_clamp_value "
                "num_moe_experts rotary_interleaved window_size window_attn_skip_freq normalization qk_layernorm "
                "qk_l2_norm attention_output_gate multi_latent_attention no_rope_freq "
                "experimental_attention_variant dsa_* linear_* moe_shared_expert_intermediate_size "
                "moe_shared_expert_gate moe_layer_freq moe_ffn_hidden_size moe_router_topk "
                "moe_router_topk_limited_devices moe_router_num_groups moe_router_group_topk "
                "moe_router_pre_softmax moe_router_topk_scaling_factor moe_router_score_function "
                "moe_router_enable_expert_bias moe_apply_probs_on_input moe_latent_size mrope_section "
                "is_hybrid_model mamba_* use_mamba_mem_eff_path heterogeneous_block_specs "
                "hetereogenous_dist_checkpoint apply_residual_connection_post_layernorm q_lora_rank kv_lora_rank "
                "qk_head_dim qk_pos_emb_head_dim v_head_dim rope_type rotary_base rotary_percent "
                "rotary_scaling_factor original_max_position_embeddings beta_fast beta_slow mscale mscale_all_dim "
                "use_fused_weighted_squared_relu"
            ),
            "engines compute the same log-probabilities without it, and the difference would bias training": (
                "apply_query_key_layer_scaling fp32_residual_connection qk_clip qk_clip_* use_mup mup_* "
                "moe_router_force_load_balancing moe_router_force_biased"
            ),
            "log-probabilities of the same tokens would differ from pass to pass": (
                "hidden_dropout attention_dropout moe_input_jitter_eps"
            ),
            "a token's log-probability would depend on the other tokens of its micro-batch": (
                "moe_token_dropping moe_expert_capacity_factor moe_expert_rank_capacity_factor "
                "moe_pad_expert_input_to_capacity moe_token_drop_policy"
            ),
            "the expert bias is a part of the policy, and would move at every step without a gradient": (
                "moe_router_bias_update_rate moe_router_quantile_balancing_ema"
            ),
            "weights are read from files and never initialized": (
                "perform_initialization use_cpu_initialization init_method output_layer_init_method init_method_std "
                "embedding_init_method embedding_init_method_std init_model_with_meta_device"
            ),
            "multi-token prediction layers are kept as they are and not trained": (
                "mtp_num_layers mtp_loss_scaling_factor mtp_standalone mtp_use_repeated_layer mtp_detach_heads "
                "mtp_hybrid_override_pattern mtp_grad_scale_func"
            ),
            "weight sync cuts pipeline stages by trainer.parallel.first_stage_layers and last_stage_layers": (
                "pipeline_model_parallel_layout account_for_embedding_in_pipeline_split "
                "account_for_loss_in_pipeline_split"
            ),
            "packs differ in length, and megarl chooses the pipeline's communication for it": (
                "variable_seq_lengths overlap_p2p_comm batch_p2p_comm use_ring_exchange_p2p"
            ),
            "the number of micro-batches differs from step to step": "microbatch_group_size_per_vp_stage",
            "its communication buffers and graphs hold micro-batches of one length, and packs differ in length": (
                "tp_comm_* cuda_graph_* enable_cuda_graph external_cuda_graph use_te_rng_tracker moe_ncclep_* "
                "delay_offload_until_cuda_graph"
            ),
            "a step whose activations do not fit its buffers would have to be run again": "moe_paged_stash*",
            # see its `attn_forward_func_with_cp`; for training in FP8 its `get_attention_backend` leaves FusedAttention
            # only, for which `nvte_get_fused_attn_backend` needs a batch and not `thd`
            "Transformer Engine does not train packed sequences with it": (
                "hierarchical_context_parallel_sizes fp8_dot_product_attention fp8_multi_head_attention"
            ),
            "megatron-core's own data loader would have to pack the samples, which megarl does": (
                "hybrid_context_parallel max_seqlen_per_dp_cp_rank"
            ),
            "megatron-core has no such kernel for packed sequences": "fused_single_qkv_rope",
            "its schedule replaces the model's forward pass, at whose end megarl computes log-probabilities": (
                "overlap_moe_expert_parallel_comm delay_wgrad_compute ep_overlap_early_attn_memory_release "
                "defer_embedding_wgrad_compute wgrad_deferral_limit overlap_dispatch_backward_with_experts_wgrad "
                "high_priority_a2a_comm_stream"
            ),
            "megarl computes the loss, its scale and the log-probabilities itself": (
                "calculate_per_token_loss cross_entropy_loss_fusion cross_entropy_fusion_impl grad_scale_func "
                "finalize_model_grads_func no_sync_func grad_sync_func param_sync_func timers barrier_with_L1_time "
                "moe_grad_scale_func experimental_attention_variant_loss_scale_func fp8_output_proj"
            ),
            "weight sync, checkpoints and offloading need parameters in model.dtype on the device": (
                "fp8_param fp4_param cpu_offloading_weights"
            ),
            "its state is not in checkpoints, so that a resumed run would differ": (
                "fp8_margin fp8_interval fp8_amax_history_len fp8_amax_compute_algo"
            ),
            "megarl has no FP4 path, no quantizers of users and no per-module quantization": (
                "fp4 fp4_recipe fp8_quantizer_factory fp4_quantizer_factory quant_recipe use_kitchen "
                "use_kitchen_attention kitchen_attention_backend"
            ),
            "it has no effect on megarl's models: RMSNorm, and attention of Transformer Engine or torch": (
                "persist_layer_norm memory_efficient_layer_norm masked_softmax_fusion attention_softmax_in_fp32"
            ),
            "it decides the names and shapes of parameters, which weight sync relies on": (
                "moe_grouped_gemm use_transformer_engine_op_fuser use_grouped_gemm_for_* "
                "moe_single_grouped_* moe_shared_expert_glu_interleave_size moe_mlp_glu_interleave_size "
                "mla_down_proj_fusion"
            ),
            "weight sync and checkpoints read full tensor-parallel shards, which it would divide further": (
                "tensor_parallel_num_weight_shards gtp_weight_remat_size expert_tensor_parallel_num_weight_shards "
                "expert_gtp_weight_remat_size"
            ),
            "megarl sets it from trainer.moe.router_replay": "moe_enable_routing_replay",
            "it is deprecated; set moe_token_dispatcher_type: flex and moe_flex_dispatcher_backend": (
                "moe_enable_deepep"
            ),
            "megarl creates the process groups": "pipeline_model_parallel_comm_backend",
            "it is for inference with megatron-core, and engines are SGLang's": (
                "flash_decode inference_* use_inference_optimized_layers mlp_chunks_for_prefill cache_mla_latents "
                "symmetric_ar_type batch_invariant_mode moe_pad_experts_for_cuda_graph_inference "
                "nccl_all_reduce_for_prefill"
            ),
            "it is for megatron-core's own logs and tests": (
                "test_mode config_logger_dir log_max_attention_logit moe_per_layer_logging _cpu_offloading_context"
            ),
        }
    ),
    "ddp": _refused(
        {
            "megarl sets it from trainer.optimizer.distributed": "use_distributed_optimizer",
            "checkpoints divide the optimizer state over all data-parallel ranks": (
                "num_distributed_optimizer_instances"
            ),
            "the update guard checks gradients and the loss before every update": (
                "check_for_nan_in_grad check_for_large_grads"
            ),
            "weight sync and checkpoints read full tensor-parallel shards, which FSDP does not keep": (
                "use_megatron_fsdp use_custom_fsdp data_parallel_sharding_strategy outer_dp_sharding_strategy "
                "fsdp_* megatron_fsdp_* suggested_communication_unit_size keep_fp8_transpose_cache "
                "gradient_reduce_div_fusion"
            ),
            "weight sync, checkpoints and offloading need parameters in model.dtype on the device": (
                "fp8_param_gather fp4_param_gather reuse_grad_buf_for_mxfp8_param_ag"
            ),
            "the size of buckets is set with bucket_size": "num_buckets",
            "all gradients are accumulated in one dtype, see grad_reduce_in_fp32": (
                "param_name_patterns_for_fp32_local_accumulation"
            ),
            "offloading frees the buffers that NCCL would have registered": "nccl_ub disable_symmetric_registration",
            "its schedule replaces the model's forward pass, at whose end megarl computes log-probabilities": (
                "delay_wgrad_compute"
            ),
            "every pipeline stage starts its own all-gathers": "align_param_gather",
        }
    ),
    "optimizer": _refused(
        {
            "megarl sets it from trainer.optimizer": (
                "lr min_lr weight_decay adam_beta1 adam_beta2 adam_eps clip_grad use_distributed_optimizer"
            ),
            "megarl sets it from model.dtype": "fp16 bf16 params_dtype",
            "megarl sets it from trainer.megatron.model.fp8_recipe": "fp8_recipe",
            "megarl sets it from trainer.megatron.ddp.overlap_param_gather": "overlap_param_gather",
            "trainer.optimizer.type and kwargs choose the optimizer": (
                "optimizer sgd_momentum muon_* adaptive_muon_* lion_* soap_*"
            ),
            "checkpoints hold ranges of parameters, as the distributed optimizer divides them": (
                "use_layer_wise_distributed_optimizer"
            ),
            "it skips updates without a record; limits.grad_norm with action: skip does it with one": (
                "grad_norm_skip_threshold"
            ),
            "its graph would keep addresses of memory that offloading frees": "optimizer_cuda_graph",
            "checkpoints hold float32 main parameters": "main_params_dtype store_param_remainders",
            "no scaling of the loss is needed in bfloat16 and float32": (
                "loss_scale initial_loss_scale min_loss_scale loss_scale_window hysteresis"
            ),
            "weight sync, checkpoints and offloading need parameters in model.dtype on the device": (
                "reuse_grad_buf_for_mxfp8_param_ag"
            ),
            "it divides the optimizer by model chunks, and the update guard decides on all of them": (
                "overlap_param_gather_with_optimizer_step"
            ),
            "it is for megatron-core's own logs": "log_num_zeros_in_grad barrier_with_L1_time timers config_logger_dir",
        }
    ),
}

NEEDS_TE: Mapping[str, tuple[object, ...]] = {
    "activation_func_fp8_input_store": (True,),
    "apply_rope_fusion": (True,),
    "attention_backend": ("flash", "fused"),
    "bias_activation_fusion": (True,),
    "cpu_offloading": (True,),
    "fine_grained_activation_offloading": (True,),
    "flash_attention_version": (2, 3, 4),
    "fp8": ("e4m3", "hybrid"),
    "fused_residual_rmsnorm": (True,),
    "gradient_accumulation_fusion": (True,),
    "moe_permute_fusion": (True,),
    "moe_router_fusion": (True,),
    "moe_token_dispatcher_type": ("flex",),
    "transformer_impl": ("transformer_engine",),
    "use_te_activation_func": (True,),
}
"""Fields of `model` -> their values that need Transformer Engine, and so CUDA."""

NEEDS_TE_LAYERS = (
    "activation_func_fp8_input_store",
    "attention_backend",
    "cp_comm_type",
    "cpu_offloading",
    "fine_grained_activation_offloading",
    "flash_attention_version",
    "fp8",
    "fused_residual_rmsnorm",
    "use_te_activation_func",
)
"""Fields of `model` without effect on models whose layers are torch's, on GPUs too."""


FOR_ANY_OPTIMIZER = ("apply_wd_to_qk_layernorm", "decoupled_lr", "decoupled_min_lr")
"""Fields of `optimizer` that concern parameter groups; the others are those of Adam."""


def classify(part: Part, name: str) -> list[str]:
    """Return the reason against a field for each table entry that names it: an empty one where it is allowed."""
    entries = [""] if name in ALLOWED[part] else []
    return entries + [
        refused.reason for refused in REFUSED[part] if any(fnmatchcase(name, pattern) for pattern in refused.names)
    ]


Fields: TypeAlias = dict[str, Any]
"""Fields of one of megatron-core's configurations, by name, as they are in YAML."""


class MegatronConfig(Section):
    """Fields of megatron-core's configurations, by its own names, for all models of the run that Megatron computes.

    They win over what megarl would set. `megarl check` prints what megarl sets and refuses fields that it needs itself.
    """

    model: Fields = Field(default={})
    """Fields of `TransformerConfig`, such as `fp8`, `cp_comm_type`, `attention_backend` or `moe_token_dispatcher_type`.
    Those whose names begin with `moe_` have no effect on models without experts. `transformer_impl: local` takes
    torch's layers instead of Transformer Engine's."""

    ddp: Fields = Field(default={})
    """Fields of `DistributedDataParallelConfig`, such as `overlap_grad_reduce`. Default: gradients are accumulated and
    reduced in float32; on CUDA with more than one data- or context-parallel rank, they are reduced during the backward
    pass (`overlap_grad_reduce`) and parameters are gathered during the next forward pass (`overlap_param_gather`)."""

    optimizer: Fields = Field(default={})
    """Fields of `OptimizerConfig`, such as `optimizer_cpu_offload`, for all trained models."""

    @field_validator("model", "ddp", "optimizer")
    @classmethod
    def _check_fields(cls, fields: Fields, info: ValidationInfo) -> Fields:
        assert info.field_name is not None
        problems = list(find_field_problems(cast("Part", info.field_name), fields))
        if problems:
            raise ValueError("; ".join(problems))
        return fields

    @model_validator(mode="after")
    def _check_combinations(self) -> MegatronConfig:
        if self.ddp.get("overlap_param_gather") and not self.ddp.get("overlap_grad_reduce"):
            raise ValueError("ddp.overlap_param_gather needs ddp.overlap_grad_reduce: true, as in Megatron")
        fp8, recipe = self.model.get("fp8"), self.model.get("fp8_recipe")
        if (fp8 is None) != (recipe is None):
            raise ValueError(
                f"model.fp8 and model.fp8_recipe need each other, got {fp8} and {recipe}; Megatron's default recipe, "
                "delayed scaling, has state that is not in checkpoints"
            )
        if self.model.get("moe_router_dtype") == "fp64" and self.model.get("moe_router_fusion"):
            raise ValueError("model.moe_router_fusion needs moe_router_dtype: fp32, got fp64")
        self._check_optimizer_dtypes()
        self._check_learning_rates()
        return self

    def _check_optimizer_dtypes(self) -> None:
        offloads, is_aware = self.offloads_adam, self.optimizer.get("use_precision_aware_optimizer")
        if offloads and is_aware is False:
            raise ValueError(
                "optimizer.optimizer_cpu_offload needs use_precision_aware_optimizer, which is then on by default, got "
                "false"
            )
        if offloads and self.optimizer.get("decoupled_weight_decay") is False:
            raise ValueError("optimizer.optimizer_cpu_offload needs decoupled_weight_decay, got false")
        for name in ("exp_avg_dtype", "exp_avg_sq_dtype", "main_grads_dtype"):
            if self.optimizer.get(name) == "bfloat16" and (offloads or not is_aware):
                raise ValueError(
                    f"optimizer.{name}: bfloat16 needs use_precision_aware_optimizer without optimizer_cpu_offload"
                )
        if self.optimizer.get("main_grads_dtype") == "bfloat16" and self.ddp.get("grad_reduce_in_fp32") is not False:
            raise ValueError("optimizer.main_grads_dtype: bfloat16 needs ddp.grad_reduce_in_fp32: false")

    def _check_learning_rates(self) -> None:
        lr, min_lr = self.optimizer.get("decoupled_lr"), self.optimizer.get("decoupled_min_lr")
        if min_lr is not None and lr is None:
            raise ValueError(f"optimizer.decoupled_min_lr needs decoupled_lr, got {min_lr:g} alone")
        if lr is not None and not 0 <= (min_lr or 0.0) <= lr:
            raise ValueError(
                f"optimizer.decoupled_min_lr needs to be from 0 to decoupled_lr = {lr:g}, got {min_lr or 0.0:g}"
            )

    @property
    def allows_te_layers(self) -> bool:
        """Whether layers may be Transformer Engine's; False: they are torch's."""
        return self.model.get("transformer_impl") != "local"

    @property
    def offloads_adam(self) -> bool:
        """Whether Adam's moments and float32 parameters are on the host, and updated there."""
        return bool(self.optimizer.get("optimizer_cpu_offload"))

    @property
    def adam_fields(self) -> list[str]:
        """Names of the fields of `optimizer` that only Adam has."""
        return [name for name in self.optimizer if name not in FOR_ANY_OPTIMIZER]

    def find_te_problems(self) -> Iterator[str]:
        """Yield one message for each field that needs Transformer Engine."""
        for name, values in NEEDS_TE.items():
            if self.model.get(name) in values:
                yield f"trainer.megatron.model.{name}: {self.model[name]} needs CUDA and Transformer Engine"
        if self.model.get("cp_comm_type") is not None:
            yield "trainer.megatron.model.cp_comm_type: needs CUDA and Transformer Engine"
        if self.optimizer.get("use_precision_aware_optimizer") and not self.offloads_adam:
            yield (
                "trainer.megatron.optimizer.use_precision_aware_optimizer: needs CUDA and Transformer Engine, or "
                "optimizer_cpu_offload"
            )


class MoeConfig(Section):
    """Training of the routers of models with experts."""

    freeze_router: bool = False
    """Keep the weights of the routers as they are. Tokens are still routed to other experts as hidden states change."""

    aux_loss_coeff: float = Field(default=0.0, ge=0)
    """Coefficient of the load-balancing loss (arXiv 2101.03961, equation 4) that is added to the loss of every trained
    model, summed over layers. 0: none. It is a mean over the tokens of an update; padding does not count."""

    aux_loss_scope: Literal["micro_batch", "sequence", "global_batch"] = "micro_batch"
    """Tokens among which the load-balancing loss balances experts: those of a micro-batch; of a sequence (arXiv
    2412.19437, equations 17 to 20), which does not depend on how sequences are packed; or of all micro-batches and
    data-parallel ranks so far in an update. Each micro-batch or sequence weighs by its tokens."""

    router_replay: Literal["none", "R2", "R3"] = "none"
    """Where the policy's experts of a token come from when a step passes over it again (arXiv 2510.11370). `none`: from
    the router, each time. `R2`: from the first pass of the step, which computes the old log-probabilities if there is
    such a pass. `R3`: from the engines, which return them with the completions; `limits.missing_routes` bounds the
    share of tokens without. The weights of the experts are always those of the router. Only for `megarl train`."""

    @model_validator(mode="after")
    def _check_frozen(self) -> MoeConfig:
        if self.freeze_router and self.aux_loss_coeff:
            raise ValueError(f"aux_loss_coeff trains the routers, which are frozen, got {self.aux_loss_coeff}")
        return self


def find_field_problems(part: Part, fields: Mapping[str, object]) -> Iterator[str]:
    """Yield one message, beginning with its name, for each field that `trainer.megatron` cannot set."""
    for name, value in fields.items():
        entries = classify(part, name)
        if not entries:
            known = [*ALLOWED[part], *(each for refused in REFUSED[part] for each in refused.names)]
            close = difflib.get_close_matches(name, [each for each in known if "*" not in each], n=1)
            hint = f"; did you mean {close[0]}?" if close else _find_other_part(part, name)
            yield f"{name}: megatron-core's {CLASS_OF[part]} has no such field{hint}"
        elif entries[0]:
            yield f"{name}: {entries[0]}"
        elif not _has_type(value, ALLOWED[part][name]):
            yield f"{name}: needs {ALLOWED[part][name].replace(' |', ',')}, got {value!r}"


def _find_other_part(part: Part, name: str) -> str:
    for other, class_name in CLASS_OF.items():
        if other != part and classify(other, name):
            return f"; {class_name} has one, set in trainer.megatron.{other}"
    return ""


def _has_type(value: object, kind: str) -> bool:
    return any(_matches(value, each) for each in kind.split(" | "))


def _matches(value: object, kind: str) -> bool:
    match kind:
        case "bool":
            return isinstance(value, bool)
        case "int":
            return isinstance(value, int) and not isinstance(value, bool)
        case "float":
            return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
        case "list":
            return isinstance(value, list) and all(isinstance(each, str) for each in value)
        case "null":
            return value is None
        case _:
            return value == kind
