"""SGLang's options that `rollout.engine.extra_args` allows and refuses, with the reasons.

SGLang 0.5.23 has 546 options. Each is in exactly one of three tables: `ALLOWED_OPTIONS`, `OWN_KEYS` (another key of the
configuration sets it) and `REFUSED_OPTIONS` (it cannot work, with the reason). The tables are data, because a
configuration is checked in processes that do not import SGLang.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

SGLANG_VERSION = "0.5.23"
"""Version of SGLang that the tables describe."""

ALLOWED_OPTIONS = frozenset(
    """
    attention_backend bf16_gemm_backend context_length decode_attention_backend dsa_decode_backend
    dsa_paged_mqa_logits_backend dsa_prefill_backend dsa_topk_backend dsa_triton_union dsv4_attn_backend
    dsv4_prefill_backend enable_dsa_fused_indexer enable_fused_qk_norm_rope
    enable_lean_attention enable_tf32_matmul flashinfer_autotune_skip_ops disable_flashinfer_autotune
    flashinfer_mla_disable_ragged grammar_backend linear_attn_backend linear_attn_decode_backend
    linear_attn_prefill_backend mamba_backend prefill_attention_backend sampling_backend
    triton_attention_num_kv_splits triton_attention_reduce_in_fp32 triton_attention_split_tile_size

    attn_dp_size dp_size enable_dp_attention enable_dp_lm_head load_balance_method moe_dense_tp_size
    deepep_config deepep_mode disable_shared_experts_fusion enable_fused_moe_sum_all_reduce ep_size moe_a2a_backend
    moe_runner_backend
    expert_balancedness_report_mode expert_distribution_recorder_buffer_size expert_distribution_recorder_mode

    cuda_graph_backend_decode cuda_graph_backend_prefill cuda_graph_bs_decode cuda_graph_bs_prefill cuda_graph_config
    cuda_graph_max_bs_decode cuda_graph_max_bs_prefill cuda_graph_max_seq_len_prefill cuda_graph_prefill_max_context
    debug_cuda_graph disable_cuda_graph disable_cuda_graph_padding disable_decode_cuda_graph disable_prefill_cuda_graph
    enable_cudagraph_gc enable_profile_cuda_graph enable_torch_compile enable_torch_compile_debug_mode
    torch_compile_max_bs

    boundary_reduction disable_aiter_allreduce_fusion_in_decode disable_aiter_allreduce_fusion_in_prefill
    disable_custom_all_reduce dist_timeout enable_aiter_allreduce_fusion enable_flashinfer_allreduce_fusion
    enable_layerwise_nvtx_marker enable_mscclpp enable_nccl_nvls enable_p2p_check enable_symm_mem
    enable_torch_symm_mem enforce_disable_flashinfer_allreduce_fusion flashinfer_allreduce_fusion_backend pre_warm_nccl

    c128_page_size chunked_prefill_size disable_chunked_prefix_cache disable_hybrid_swa_memory disable_overlap_schedule
    disable_radix_cache enable_decoder_swa_bounded_replay enable_encoder_swa_bounded_replay enable_int8_mamba_checkpoint
    enable_linear_replayssm enable_mamba_cache_stochastic_rounding enable_mixed_chunk enable_page_major_kv_layout
    enable_single_batch_overlap enable_unified_memory int8_mamba_ckpt_size kv_cache_dtype linear_replayssm_cache_len
    mamba_cache_philox_rounds mamba_full_memory_ratio mamba_max_states_per_path mamba_radix_cache_strategy
    mamba_ssm_dtype mamba_track_interval max_mamba_cache_size max_prefill_tokens max_queued_requests
    min_free_slots_delay num_continuous_decode_steps page_size prefill_decode_interval prefill_decode_interval_min_bs
    prefill_kv_cache_dequant_dtype prefill_max_requests qsa_indexer_dtype radix_eviction_policy
    radix_eviction_policy_config retraction_policy schedule_conservativeness schedule_policy scheduler_recv_interval
    stream_interval swa_full_tokens_ratio swa_prefix_tails
    abort_on_priority_when_disabled default_priority_value disable_priority_preemption enable_priority_scheduling
    priority_scheduling_preemption_threshold schedule_low_priority_values_first

    gc_threshold numa_node sleep_on_idle soft_watchdog_timeout watchdog_timeout
    load_format model_checksum model_config_parser model_impl model_loader_extra_config
    weight_loader_disable_mmap weight_loader_drop_cache_after_load weight_loader_prefetch_checkpoints
    weight_loader_prefetch_num_threads

    bucket_e2e_request_latency bucket_inter_token_latency bucket_time_to_first_token crash_dump_folder
    debug_tensor_dump_input_file debug_tensor_dump_layers debug_tensor_dump_output_folder decode_log_interval
    enable_cache_report enable_metrics enable_metrics_for_all_schedulers enable_mfu_metrics
    enable_request_time_stats_logging enable_return_aux_hidden_states enable_return_hidden_states
    enable_return_indexer_topk enable_trace export_metrics_to_file
    export_metrics_to_file_dir extra_metric_labels forward_hooks gc_warning_threshold_secs
    generation_tokens_buckets kv_canary kv_canary_real_data kv_canary_sweep_interval load_snapshot_publish_interval
    log_level log_requests log_requests_format log_requests_level log_requests_target msprobe_dump_config
    otlp_service_name otlp_traces_endpoint prompt_tokens_buckets return_aux_hidden_state_layer_ids
    return_hidden_states_mode sampling_mask_max_tokens show_time_cost stat_loggers trace_modules
    """.split()  # noqa: SIM905 -- one name a line would take 200 lines
)
"""Kernels, CUDA graphs, collectives, scheduling, size and dtype of the KV cache, logs: none of them changes where a
weight update writes, which processes or ports an engine has, or what it samples from."""

NUMERIC_OPTIONS = frozenset(
    """
    attn_dp_size bucket_e2e_request_latency bucket_inter_token_latency bucket_time_to_first_token c128_page_size
    chunked_prefill_size context_length cuda_graph_bs_decode cuda_graph_bs_prefill cuda_graph_max_bs_decode
    cuda_graph_max_bs_prefill cuda_graph_max_seq_len_prefill cuda_graph_prefill_max_context debug_tensor_dump_layers
    decode_log_interval default_priority_value dist_timeout dp_size dsa_triton_union ep_size
    expert_distribution_recorder_buffer_size gc_threshold gc_warning_threshold_secs int8_mamba_ckpt_size
    kv_canary_sweep_interval linear_replayssm_cache_len load_snapshot_publish_interval log_requests_level
    mamba_cache_philox_rounds mamba_full_memory_ratio mamba_max_states_per_path mamba_track_interval
    max_mamba_cache_size max_prefill_tokens max_queued_requests min_free_slots_delay moe_dense_tp_size
    num_continuous_decode_steps
    numa_node page_size prefill_decode_interval prefill_decode_interval_min_bs prefill_max_requests
    priority_scheduling_preemption_threshold return_aux_hidden_state_layer_ids sampling_mask_max_tokens
    schedule_conservativeness scheduler_recv_interval soft_watchdog_timeout stream_interval swa_full_tokens_ratio
    swa_prefix_tails torch_compile_max_bs triton_attention_num_kv_splits triton_attention_split_tile_size
    watchdog_timeout weight_loader_prefetch_num_threads
    """.split()  # noqa: SIM905 -- one name a line would take 60 lines
)
"""Allowed options that are numbers or lists of numbers, or null."""

LAYOUT_OPTIONS = (
    "attn_dp_size",
    "dp_size",
    "enable_dp_attention",
    "enable_dp_lm_head",
    "moe_a2a_backend",
    "moe_dense_tp_size",
)
"""Allowed options besides `ep_size` that change which rank of an engine holds which weights."""

SIZE_OPTIONS = ("attn_dp_size", "dp_size", "ep_size")
"""Options that are sizes of at least 1."""

OWN_KEYS: Mapping[str, str] = {
    "custom_weight_loader": "weight_sync",
    "device": "placement.device",
    "dist_init_addr": "placement",
    "dtype": "model.dtype",
    "enable_deterministic_inference": "rollout.engine.deterministic",
    "enable_fp32_lm_head": "model.fp32_lm_head",
    "enable_memory_saver": "rollout.engine.release_memory",
    "enable_return_routed_experts": "trainer.moe.router_replay",
    "max_running_requests": "rollout.engine.max_running_requests",
    "max_total_tokens": "rollout.engine.max_total_tokens",
    "mem_fraction_static": "rollout.engine.mem_fraction",
    "model_path": "model.path",
    "nccl_port": "rollout.engine.base_port",
    "nnodes": "rollout.tp",
    "node_rank": "placement",
    "random_seed": "seed",
    "skip_tokenizer_init": "rollout",
    "tp_size": "rollout.tp",
    "trust_remote_code": "model.trust_remote_code",
    "weight_version": "weight_sync",
}
"""Options that megarl sets -> the key or section of the configuration that they follow from."""

ALLOWED_VALUES: Mapping[str, tuple[tuple[object, ...], str]] = {
    "moe_a2a_backend": (
        ("none", "deepep"),
        "the layouts of engines with other backends have not been compared with SGLang's loader",
    ),
    "load_format": (
        ("auto", "safetensors"),
        "the engine serves the weights of model.path until the first sync, and other formats change their layout",
    ),
    "model_impl": (("auto", "sglang"), "only the models of SGLang itself have been compared with the trainer's"),
    "moe_runner_backend": (
        ("auto", "deep_gemm", "flashinfer_cutlass", "triton", "triton_kernel"),
        "the other backends repack the experts after loading, so that a sync cannot write shards into them",
    ),
}
"""Allowed options that may have some values only -> (values, why no others)."""


@dataclass(frozen=True, slots=True)
class RefusedOptions:
    """Options that are refused for the same reason."""

    reason: str
    """Completes the sentence `<option>: ...`."""
    names: tuple[str, ...]
    """Names, and patterns such as `lora_*`."""


REFUSED_OPTIONS = tuple(
    RefusedOptions(reason, tuple(names.split()))
    for reason, names in (
        (
            "speculative decoding needs weights of a draft model, which no weight sync sends",
            "speculative_algorithm speculative_draft_model_path speculative_* _speculative_* decoupled_spec_* "
            "enable_draft_weights_cpu_backup enable_linear_replayssm_spec enable_multi_layer_eagle "
            "linear_attn_verify_backend spec_trace_dir",
        ),
        (
            "a weight sync reaches the tensor-parallel ranks of one pipeline stage only; raise rollout.tp instead",
            "pp_size pp_* enable_dynamic_chunking",
        ),
        (
            "an engine is one replica, and its ranks have to be those of rollout.tp; raise rollout.replicas instead",
            "dwdp_size moe_dp_size enable_dp_attention_local_control_broadcast enable_dense_mlp_attn_tp "
            "enable_tp_lm_head_all_to_all enable_prefill_delayer prefill_delayer_*",
        ),
        (
            "context parallelism or other sharding within the engine changes which rank holds which weights",
            "attn_cp_size dcp_size dcp_* cp_strategy enable_prefill_cp enable_cp_* enable_dsa_cache_layer_split "
            "enable_kv_cache_sharding enable_attn_tp_input_scattered disable_attn_tp_gather enable_layernorm_sp "
            "enable_shared_experts_attn_tp shared_experts_tp_size enable_scattered_sconv enable_two_batch_overlap "
            "tbo_token_distribution_threshold",
        ),
        (
            "the engine's ranks have to run on the devices that placement gives them",
            "base_gpu_id gpu_id_step use_ray",
        ),
        (
            "a sync sends weights in model.dtype, and quantized weights have another layout",
            "quantization quantization_param_path quantize_and_serve modelopt_* rl_quant_profile "
            "fp4_gemm_runner_backend fp8_gemm_runner_backend enable_quant_communications enable_w4a4_mxfp4_megamoe "
            "flashinfer_mxfp4_moe_precision disable_flashinfer_cutlass_moe_fp4_allgather "
            "enable_deepseek_v4_fp4_indexer",
        ),
        (
            "a sync does not update adapters",
            "enable_lora enable_lora_* lora_* max_lora_* max_loras_* max_loaded_loras experts_shared_outer_loras "
            "uno_lora_path",
        ),
        (
            "it moves or copies experts while the engine runs, and a sync writes each where it was at first",
            "enable_eplb eplb_* ep_num_redundant_experts ep_dispatch_algorithm init_expert_location elastic_ep_* "
            "enable_elastic_expert_backup ep_join_* max_ep_size mooncake_ib_device enable_waterfill "
            "enforce_shared_experts_fusion",
        ),
        (
            "it belongs to a way to exchange tokens whose layouts have not been compared with SGLang's loader",
            "deepep_v2_mode deepep_dispatcher_output_dtype fuseep_mode flashinfer_a2a_dispatch_type "
            "enable_megamoe_for_layernorm_sp",
        ),
        (
            "weights that are kept elsewhere than in the model's parameters stay as they were in a sync",
            "cpu_offload_gb offload_* ple_offload_* enable_paged_experts paged_experts_num_resident kt_* "
            "enable_weights_cpu_backup weight_cache_* enable_nvidia_megakernel enable_amd_monokernel",
        ),
        (
            "keys and values that are kept elsewhere than in the KV cache may outlive the weights they were "
            "computed with",
            "enable_hierarchical_cache hicache_* enable_lmcache lmcache_config_file enable_flexkv "
            "flexkv_config_file enable_unified_cache_external_linker unified_cache_external_linker_* "
            "enable_linker_mla_dedup "
            "radix_cache_backend enable_hisparse hisparse_config enable_session_radix_cache enable_streaming_session",
        ),
        (
            "engines load the model from model.path, and the trainer reads the same folder",
            "revision download_dir json_model_override_args delete_ckpt_after_loading decrypted_* "
            "remote_instance_weight_loader_* engine_info_bootstrap_port modelexpress_config startup_weight_load_mode "
            "checkpoint_engine_wait_weights_before_ready is_embedding",
        ),
        (
            "prefill and decoding have to run in the same processes, which a weight sync updates together",
            "disaggregation_* encoder_* language_only language_model_only enable_adaptive_dispatch_to_encoder "
            "enable_pd_role_switch enable_pdmux pdmux_config_path sm_group_num num_reserved_decode_tokens "
            "optimistic_prefill_attempts",
        ),
        (
            "tokens have to be sampled from the model's own distribution, which the trainer compares with",
            "enable_watermark watermark_* enable_custom_logit_processor preferred_sampling_params sampling_defaults "
            "rl_on_policy_target mlx_enable_sampling allow_auto_truncate dllm_*",
        ),
        (
            "prompts are text without images or sound, as token ids",
            "enable_multimodal mm_* enable_broadcast_mm_inputs_process enable_prefix_mm_cache enable_mm_global_cache "
            "allowed_media_domains media_url_max_file_size_mb trust_mm_content_hashes limit_mm_data_per_request "
            "image_processor_backend disable_fast_image_processor enable_precise_embedding_interpolation asr_* "
            "enable_mis prefill_only_disable_kv_cache",
        ),
        (
            "engines have no HTTP server and no tokenizer: requests and answers are token ids",
            "host port api_key admin_api_key served_model_name fastapi_root_path grpc_* smg_grpc_mode sidecar "
            "sidecar_args enable_http_worker_reuseport enable_http2 http2_* ssl_* enable_ssl_refresh "
            "skip_server_warmup warmups enable_response_store tokenizer_path tokenizer_mode tokenizer_backend "
            "tokenizer_worker_num "
            "detokenizer_worker_num chat_template trust_request_chat_template hf_chat_template_name "
            "completion_template file_storage_path return_input_ids return_output_ids reasoning_parser "
            "default_chat_template_kwargs strip_thinking_cache enable_strict_thinking tool_call_parser tool_server "
            "batch_notify_size stream_response_default_include_usage incremental_streaming_output "
            "constrained_json_* enable_dynamic_batch_tokenizer dynamic_batch_tokenizer_* "
            "enable_tokenizer_batch_encode disable_tokenizer_batch_decode disable_outlines_disk_cache "
            "custom_sigquit_handler log_level_http uvicorn_access_log_exclude_prefixes tokenizer_metrics_*",
        ),
        (
            "the engines of a node would open the same port",
            "kv_events_config load_publish_endpoint smg_http_sidecar_port enable_forward_pass_metrics "
            "forward_pass_metrics_* gated_launch_port",
        ),
        (
            "SGLang derives it from other options",
            "_radix_eviction_policy_explicitly_set _swa_full_tokens_ratio_explicitly_set aux_hidden_state_capture "
            "uses_mamba_radix_cache",
        ),
    )
)

REFUSED_VARIABLES: Mapping[str, str] = {
    "SGLANG_OPT_FUSE_SWIGLU_INTERLEAVED": "SGLang would reorder the rows of the experts again after every sync",
}
"""Environment variables that engines must not have -> why."""


def find_option_problems(options: Mapping[str, object]) -> Iterator[str]:
    """Yield one message, beginning with its name, for each option that engines cannot have."""
    for name, value in options.items():
        problem = _find_problem(name, value)
        if problem is not None:
            yield f"{name}: {problem}"


def find_variable_problems(environment: Mapping[str, str]) -> Iterator[str]:
    """Yield one message for each environment variable that engines must not have."""
    for name, reason in REFUSED_VARIABLES.items():
        if environment.get(name, "").lower() not in ("", "0", "false", "no", "n", "off"):
            yield f"the environment variable {name} must not be set for engines: {reason}"


def classify(name: str) -> list[str]:
    """Return the reason against an option for each table entry that names it: an empty one where it is allowed."""
    entries = [""] if name in ALLOWED_OPTIONS else []
    if name in OWN_KEYS:
        entries.append(f"megarl sets this argument itself, from {OWN_KEYS[name]}")
    return entries + [
        refused.reason for refused in REFUSED_OPTIONS if any(fnmatchcase(name, pattern) for pattern in refused.names)
    ]


def _find_problem(name: str, value: object) -> str | None:
    entries = classify(name)
    if not entries:
        known = [*ALLOWED_OPTIONS, *OWN_KEYS, *(each for refused in REFUSED_OPTIONS for each in refused.names)]
        close = difflib.get_close_matches(name, [each for each in known if "*" not in each], n=1)
        return f"SGLang has no such argument{f'; did you mean {close[0]}?' if close else ''}"
    if entries[0]:
        return entries[0]
    if name in NUMERIC_OPTIONS and any(
        isinstance(each, bool | str) for each in (value if isinstance(value, list) else [value])
    ):
        return f"needs a number, got {value!r}"
    if name in SIZE_OPTIONS and not (isinstance(value, int) and value >= 1):
        return f"needs a size of at least 1, got {value}"
    if name in ALLOWED_VALUES and value not in ALLOWED_VALUES[name][0]:
        values, reason = ALLOWED_VALUES[name]
        return f"needs to be one of {', '.join(map(str, values))}, got {value}: {reason}"
    return None
