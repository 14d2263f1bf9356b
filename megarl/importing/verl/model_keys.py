"""verl's keys of the optimizer, of parallel sizes, memory and the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megarl.importing.peer_settings import NotConvertible, Settings
from megarl.importing.tables import (
    Row,
    flag,
    mapped,
    missing,
    no_effect,
    number,
    refused,
    text,
)
from megarl.importing.verl import run_layout as layout
from megarl.importing.verl.loss_settings import ACTOR
from megarl.importing.verl.run_layout import MEGATRON, MODEL, REF, ROLLOUT, TRANSFORMER

OPTIMIZER: Sequence[Row] = (
    number(f"{ACTOR}.optim.lr", "trainer.optimizer.lr", always=True),
    mapped(
        (f"{ACTOR}.optim.lr_warmup_steps", f"{ACTOR}.optim.lr_warmup_steps_ratio"),
        "trainer.optimizer.warmup_steps",
        layout.convert_warmup,
        "counts optimizer steps, times num_mini_batches * ppo_epochs of verl's",
    ),
    mapped(
        (f"{ACTOR}.optim.lr_decay_style", f"{ACTOR}.optim.lr_scheduler_type", f"{ACTOR}.optim.warmup_style"),
        "trainer.optimizer.decay",
        layout.convert_decay,
        "constant, linear, cosine, or a function of yours; the last two are FSDP's",
    ),
    mapped(
        (f"{ACTOR}.optim.min_lr", f"{ACTOR}.optim.min_lr_ratio"),
        "trainer.optimizer.min_lr",
        layout.convert_min_lr,
        "min_lr_ratio is FSDP's",
    ),
    number(f"{ACTOR}.optim.weight_decay", "trainer.optimizer.weight_decay", "verl: 0.01; megarl: 0", always=True),
    mapped(
        f"{ACTOR}.optim.betas",
        ("trainer.optimizer.beta1", "trainer.optimizer.beta2"),
        lambda s: layout.convert_betas(s, f"{ACTOR}.optim", "trainer.optimizer"),
        "verl: 0.9, 0.999; megarl: 0.9, 0.95",
        always=True,
    ),
    mapped(
        (f"{ACTOR}.optim.clip_grad", f"{ACTOR}.grad_clip"),
        "trainer.optimizer.clip_grad",
        layout.convert_clip_grad,
        always=True,
    ),
    mapped(
        f"{ACTOR}.optim.override_optimizer_config.*",
        "trainer.megatron.optimizer",
        lambda s: layout.convert_fields(s, f"{ACTOR}.optim.override_optimizer_config.*", "optimizer"),
        "fields of `OptimizerConfig`",
    ),
    missing(
        f"{ACTOR}.optim.optimizer",
        "trainer.optimizer.type takes adam, sgd or a class of yours",
        off=("adam", "AdamW", "Adam", "adamw"),
    ),
    missing(f"{ACTOR}.optim.lr_warmup_init", "warm-up begins at lr / warmup_steps", off=(0, 0.0, None)),
    missing(f"{ACTOR}.optim.lr_decay_steps", "the decay ends with the run"),
    no_effect((f"{ACTOR}.optim.total_training_steps", f"{ACTOR}.optim.optimizer_impl"), "follows from trainer.steps"),
    missing(
        (f"{ACTOR}.optim.*",),
        "set trainer.optimizer by hand",
        off=(None, False, 0, 0.0, 0.5, True, "constant", "exponential"),
    ),
)

PARALLEL: Sequence[Row] = (
    text(f"{MODEL}.path", "model.path", "a folder or a hub id", always=True),
    flag(
        f"{MODEL}.trust_remote_code",
        "model.trust_remote_code",
        "a model on the hub needs its commit: `NAME@` and 40 hexadecimal digits",
    ),
    mapped(
        (
            *(f"{MEGATRON}.{key}" for key in layout.SIZES),
            f"{MEGATRON}.sequence_parallel",
            f"{TRANSFORMER}.num_layers_in_first_pipeline_stage",
            f"{TRANSFORMER}.num_layers_in_last_pipeline_stage",
            *layout.SP_KEYS,
        ),
        (
            *(f"trainer.parallel.{name}" for name in layout.SIZES.values()),
            "trainer.parallel.sequence_parallel",
            "trainer.parallel.first_stage_layers",
            "trainer.parallel.last_stage_layers",
        ),
        layout.convert_parallel,
        "in this order; FSDP's ulysses_sequence_parallel_size is `cp`",
        always=True,
    ),
    mapped(
        f"{REF}.model.path",
        "algorithm.reference.path",
        lambda s: {"algorithm.reference.path": s.text(f"{REF}.model.path")} if layout.uses_reference(s) else {},
        "default: the policy's",
    ),
    mapped(
        f"{REF}.megatron.*_parallel_size",
        "algorithm.reference.parallel",
        layout.convert_reference_parallel,
        "default: those of the policy",
    ),
    mapped(
        (
            f"{TRANSFORMER}.recompute_granularity",
            f"{TRANSFORMER}.recompute_modules",
            f"{TRANSFORMER}.recompute_method",
            f"{TRANSFORMER}.recompute_num_layers",
            f"{MODEL}.enable_gradient_checkpointing",
        ),
        (
            "trainer.recompute.granularity",
            "trainer.recompute.modules",
            "trainer.recompute.method",
            "trainer.recompute.layers",
        ),
        layout.convert_recompute,
        "enable_gradient_checkpointing is FSDP's, and `full`",
        always=True,
    ),
    mapped(
        (f"{TRANSFORMER}.moe_aux_loss_coeff", f"{TRANSFORMER}.moe_router_load_balancing_type"),
        ("trainer.moe.aux_loss_coeff", "trainer.moe.aux_loss_scope"),
        layout.convert_aux_loss,
        "aux_loss is `micro_batch`, seq_aux_loss `sequence`, global_aux_loss `global_batch`",
    ),
    mapped(
        (
            f"{ACTOR}.router_replay.mode",
            f"{MEGATRON}.router_replay.mode",
            f"{ROLLOUT}.enable_rollout_routing_replay",
        ),
        "trainer.moe.router_replay",
        layout.convert_router_replay,
        "R2 or R3; not from files",
    ),
    mapped(
        "actor_rollout_ref.model.override_config.moe_config.freeze_moe_router",
        "trainer.moe.freeze_router",
        lambda s: {"trainer.moe.freeze_router": s.flag(f"{MODEL}.override_config.moe_config.freeze_moe_router")},
    ),
    no_effect(
        tuple(
            f"{TRANSFORMER}.{name}"
            for name in (
                "persist_layer_norm",
                "masked_softmax_fusion",
                "moe_grouped_gemm",
                "use_flash_attn",
                "account_for_*_in_pipeline_split",
                "use_fused_*",
                "variable_seq_lengths",
                "sequence_parallel",
                "normalization",
                "swiglu",
                "*_gdn",
                "use_naive_l2norm",
            )
        ),
        "megarl chooses kernels and reads the architecture from config.json",
    ),
    mapped(
        f"{TRANSFORMER}.moe_enable_deepep",
        ("trainer.megatron.model.moe_token_dispatcher_type", "trainer.megatron.model.moe_flex_dispatcher_backend"),
        lambda s: (
            {
                "trainer.megatron.model.moe_token_dispatcher_type": "flex",
                "trainer.megatron.model.moe_flex_dispatcher_backend": "deepep",
            }
            if s.flag(f"{TRANSFORMER}.moe_enable_deepep")
            else {}
        ),
    ),
    mapped(
        f"{TRANSFORMER}.*",
        "trainer.megatron.model",
        lambda s: layout.convert_fields(s, f"{TRANSFORMER}.*", "model", _handled_fields()),
        "fields of `TransformerConfig`",
    ),
    mapped(
        f"{MEGATRON}.override_ddp_config.*",
        "trainer.megatron.ddp",
        lambda s: layout.convert_fields(s, f"{MEGATRON}.override_ddp_config.*", "ddp"),
        "fields of `DistributedDataParallelConfig`",
    ),
    flag(f"{MEGATRON}.use_distributed_optimizer", "trainer.optimizer.distributed"),
    flag(f"{MEGATRON}.optimizer_offload", "trainer.offload.optimizer", "on by default on GPUs that engines share"),
    flag(f"{MEGATRON}.grad_offload", "trainer.offload.gradients", "on by default on GPUs that engines share"),
    flag(f"{MEGATRON}.param_offload", "trainer.offload.weights", "off by default: each weight sync needs them back"),
    flag(f"{ACTOR}.fsdp_config.optimizer_offload", "trainer.offload.optimizer", "FSDP"),
    flag(f"{ACTOR}.fsdp_config.param_offload", "trainer.offload.weights", "FSDP"),
    mapped(
        (f"{MEGATRON}.dtype", f"{ACTOR}.fsdp_config.dtype", f"{ROLLOUT}.dtype"),
        "model.dtype",
        lambda s: _dtype(s),
        "float32 or bfloat16, of trainer and engines",
    ),
    flag(f"{MODEL}.use_fused_kernels", "trainer.fused_lm_head", "on by default on CUDA"),
    no_effect(
        (f"{MODEL}.fused_kernel_options.*", "*.entropy_from_logits_*"),
        "`trainer.fused_lm_head`",
    ),
    refused(
        (f"{MODEL}.lora_rank", f"{MODEL}.lora.rank", f"{MODEL}.lora_adapter_path", f"{MODEL}.lora.adapter_path"),
        "megarl trains all weights and has no LoRA; remove the key to train all weights, with a learning rate for that",
    ),
    no_effect(
        (f"{MODEL}.lora_alpha", f"{MODEL}.lora.*", f"{MODEL}.target_modules", f"{MODEL}.exclude_modules"), "LoRA is off"
    ),
    missing(f"{MODEL}.mtp.*", "layers for multi-token prediction are kept as they are and neither trained nor used"),
    missing((f"{ACTOR}.*qat.*", f"{REF}.*qat.*"), "no training for quantized weights"),
    no_effect(
        (
            f"{ACTOR}.strategy",
            f"{REF}.strategy",
            "model_engine",
            f"{ACTOR}.model_engine",
            "actor_rollout_ref.hybrid_engine",
            f"{MEGATRON}.use_mbridge",
            f"{MEGATRON}.vanilla_mbridge",
            f"{MEGATRON}.use_dist_checkpointing",
            f"{MEGATRON}.dist_*",
            f"{MEGATRON}.distrib_*",
            f"{MEGATRON}.use_remove_padding",
            f"{MEGATRON}.pad_*",
            f"{MEGATRON}.forward_only",
            f"{MEGATRON}.seed",
            f"{MODEL}.use_remove_padding",
            f"{ACTOR}.pad_*",
        ),
        "Megatron-core, from the Hugging Face folder, with packed sequences",
    ),
    missing(
        f"{MEGATRON}.override_mcore_model_config.*",
        "the architecture is that of config.json: change it in the model's folder",
    ),
    missing(f"{MEGATRON}.use_megatron_fsdp", "weights are sharded by tp, pp and ep, not by FSDP"),
    missing(f"{MEGATRON}.dynamic_context_parallel", "the context-parallel size is the same for all sequences"),
    no_effect(
        (f"{REF}.megatron.*", f"{REF}.fsdp_config.*", f"{REF}.veomni.*", f"{REF}.*"),
        "`placement` places and offloads the reference model",
    ),
    no_effect(
        (
            f"{ACTOR}.fsdp_config.*",
            f"{ACTOR}.veomni.*",
            f"{ACTOR}.engine.*",
            f"{MEGATRON}.*",
            f"{ACTOR}.use_torch_compile",
        ),
        "of a backend that megarl does not have, or without effect on results",
    ),
    no_effect(
        (f"{ACTOR}.use_fused_kernels", f"{ACTOR}.entropy_checkpointing", f"{ACTOR}.use_prefix_grouper"),
        "without effect on results",
    ),
    no_effect((f"{ACTOR}.profiler.*", f"{ROLLOUT}.profiler.*", "global_profiler.*"), "see `trainer.profile`"),
    no_effect(
        (
            f"{MODEL}.external_lib",
            f"{MODEL}.use_shm",
            f"{MODEL}.use_liger",
            f"{MODEL}.tiled_mlp.*",
            f"{MODEL}.enable_activation_offload",
        ),
        "without effect on results",
    ),
    missing(
        (f"{MODEL}.override_config.*", f"{MODEL}.hf_config_path"),
        "the architecture is that of config.json: change it in the model's folder",
    ),
    missing(
        (f"{MODEL}.custom_chat_template", f"{MODEL}.tokenizer_path", "data.tokenizer"),
        "the tokenizer and its template are those of the model's folder: change them there",
    ),
)


def _handled_fields() -> tuple[str, ...]:
    """Return the fields of TransformerConfig that other rows convert."""
    prefix = f"{TRANSFORMER}."
    rows = [row for row in PARALLEL if f"{TRANSFORMER}.*" not in row.keys]
    return tuple(key.removeprefix(prefix) for row in rows for key in row.keys if key.startswith(prefix))


def _dtype(s: Settings) -> Mapping[str, object]:
    keys = (f"{MEGATRON}.dtype", f"{ACTOR}.fsdp_config.dtype", f"{ROLLOUT}.dtype")
    names = {"bfloat16": "bfloat16", "bf16": "bfloat16", "float32": "float32", "fp32": "float32"}
    given = [s.text(key) for key in keys if s.is_given(key)]
    dtype = next((name for name in given if name), "auto")
    if dtype not in names:
        raise NotConvertible(f"megarl computes in bfloat16 or float32, not in {dtype}")
    return {"model.dtype": names[dtype]}
