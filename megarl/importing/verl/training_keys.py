"""verl's keys of the optimizer, parallel sizes, memory, model, batches, lengths, advantages, losses and critics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megarl.importing.tables import (
    NotConvertible,
    Row,
    Settings,
    flag,
    mapped,
    missing,
    no_effect,
    number,
    read_elsewhere,
    refused,
    text,
    whole,
)
from megarl.importing.verl import data_and_rewards as data
from megarl.importing.verl import loss_settings as loss
from megarl.importing.verl import run_layout as layout
from megarl.importing.verl.loss_settings import ACTOR, CORRECTION
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


BATCHES: Sequence[Row] = (
    mapped(
        ("data.train_batch_size", f"{ACTOR}.ppo_mini_batch_size"),
        ("algorithm.prompts_per_step", "algorithm.num_mini_batches"),
        layout.convert_batch,
        "both count prompts; `num_mini_batches` is their quotient",
        always=True,
    ),
    read_elsewhere(
        ("async_training.require_batches", "async_training.trigger_parameter_sync_step"),
        ("algorithm.prompts_per_step", "algorithm.num_mini_batches"),
        "a step is what happens between two weight syncs: ppo_mini_batch_size * require_batches * "
        "trigger_parameter_sync_step prompts",
    ),
    whole(f"{ROLLOUT}.n", "algorithm.group_size", always=True),
    read_elsewhere(
        "rollout.n", "algorithm.group_size", "of the asynchronous trainer; `actor_rollout_ref.rollout.n` wins"
    ),
    whole(f"{ACTOR}.ppo_epochs", "algorithm.ppo_epochs", always=True),
    mapped(
        (
            f"{ACTOR}.use_dynamic_bsz",
            f"{ACTOR}.ppo_max_token_len_per_gpu",
            f"{ACTOR}.ppo_micro_batch_size_per_gpu",
        ),
        "trainer.max_tokens_per_micro_batch",
        layout.convert_micro_batch,
        "always packed, up to a number of tokens over all context-parallel ranks; a number of samples becomes samples "
        "* (prompt + response length)",
        always=True,
    ),
    no_effect(f"{ACTOR}.ppo_micro_batch_size", "the deprecated size over all GPUs"),
    no_effect(
        (
            f"{ROLLOUT}.log_prob_*",
            f"{REF}.log_prob_*",
            "critic.use_dynamic_bsz",
            "critic.ppo_m*_per_gpu",
            "critic.forward_m*",
            "critic.ppo_micro_batch_size",
            "reward_model.micro_batch_size*",
            "reward_model.use_dynamic_bsz",
            "reward_model.forward_max_token_len_per_gpu",
        ),
        "one limit of tokens, `trainer.max_tokens_per_micro_batch`, for all models and passes",
    ),
    no_effect(
        ("critic.ppo_mini_batch_size", "critic.ppo_epochs", "critic.shuffle"),
        "the critic has the policy's mini-batches",
    ),
    no_effect("trainer.balance_batch", "always, by FLOPs"),
    no_effect(("data.gen_batch_size", "data.val_batch_size"), "prompts are sampled as engines have room"),
    whole("data.max_prompt_length", "data.max_prompt_tokens", "prompts are not padded", always=True),
    whole("data.max_response_length", "rollout.max_new_tokens", always=True),
    read_elsewhere((f"{ROLLOUT}.prompt_length",), "data.max_prompt_tokens", "the limit of `data` is read"),
    read_elsewhere((f"{ROLLOUT}.response_length",), "rollout.max_new_tokens", "the limit of `data` is read"),
    mapped(
        ("data.filter_overlong_prompts",),
        "data.overlong_prompts",
        data.convert_overlong_prompts,
        "true is `drop`, false is `error`",
    ),
    missing("data.truncation", "megarl never truncates a prompt: it is dropped or an error", off=("error",)),
    mapped(
        ("trainer.total_training_steps", "trainer.total_epochs", "rollout.total_rollout_steps"),
        "trainer.steps",
        layout.convert_steps,
        "epochs are not counted; the data is repeated",
        always=True,
    ),
    no_effect(
        (f"{ACTOR}.shuffle", f"{ACTOR}.data_loader_seed", "critic.data_loader_seed"),
        "mini-batches are of whole groups in the order of the batch",
    ),
)

LOSS: Sequence[Row] = (
    mapped(
        (
            "algorithm.adv_estimator",
            f"{ACTOR}.policy_loss.loss_mode",
            "algorithm.norm_adv_by_std_in_grpo",
            "algorithm.use_pf_ppo",
        ),
        ("algorithm.type", "algorithm.whiten_unbiased"),
        loss.convert_type,
        "gae is `ppo`, with use_pf_ppo `pf_ppo`; grpo is `grpo`, without norm_adv_by_std_in_grpo `dr_grpo`, with "
        "filter_groups `dapo`; reinforce_plus_plus is `reinforce_pp`; the loss modes gspo, cispo and geo_mean are "
        "`gspo`, `cispo` and `gmpo`; other estimators and losses are refused",
        always=True,
    ),
    mapped(
        "algorithm.pf_ppo.reweight_method",
        "algorithm.filter",
        lambda s: {"algorithm.filter": s.text("algorithm.pf_ppo.reweight_method")} if _is(s, "pf_ppo") else {},
    ),
    missing("algorithm.pf_ppo.weight_pow", "megarl weights by the squared reward", off=(2, 2.0)),
    mapped(
        (f"{ACTOR}.clip_ratio_low", f"{ACTOR}.clip_ratio_high", f"{ACTOR}.clip_ratio"),
        (
            "algorithm.clip_ratio_low",
            "algorithm.clip_ratio_high",
            "algorithm.clip_log_ratio_low",
            "algorithm.clip_log_ratio_high",
        ),
        loss.convert_clip_ratios,
        "clip_ratio counts in verl only where low and high are null; bounds of `gmpo` are log-ratios; `cispo` has no "
        "lower bound",
        always=True,
    ),
    mapped(
        f"{ACTOR}.clip_ratio_c",
        "algorithm.dual_clip",
        loss.convert_dual_clip,
        "verl: 3 by default; megarl: none",
        always=True,
    ),
    mapped(
        (f"{ACTOR}.loss_agg_mode", f"{ACTOR}.loss_scale_factor"),
        ("algorithm.aggregation", "algorithm.length_norm"),
        loss.convert_aggregation,
        "the same names; without loss_scale_factor both divide by the longest response",
        always=True,
    ),
    mapped(
        (f"{ACTOR}.use_kl_loss", f"{ACTOR}.kl_loss_coef", f"{ACTOR}.kl_loss_type"),
        "algorithm.kl_loss",
        loss.convert_kl_loss,
        "a section, or null; low_var_kl is `k3`, mse and the straight-through variants (`+`) are `k2`; there is no k1",
        always=True,
    ),
    mapped(
        (
            "algorithm.use_kl_in_reward",
            "algorithm.kl_penalty",
            "algorithm.kl_ctrl.kl_coef",
            "algorithm.kl_ctrl.type",
            "algorithm.kl_ctrl.target_kl",
            "algorithm.kl_ctrl.horizon",
        ),
        ("algorithm.kl_reward", "algorithm.allow_double_kl"),
        loss.convert_kl_reward,
        "a section, or null; kl is `k1`, mse is `k2`, low_var_kl is `k3`; adaptive if it has a `target`",
        always=True,
    ),
    number(f"{ACTOR}.entropy_coeff", "algorithm.entropy_coefficient", always=True),
    mapped(
        ("algorithm.gamma", "algorithm.lam"),
        ("algorithm.gamma", "algorithm.lam"),
        loss.convert_returns,
        "only where the estimator has them",
        always=True,
    ),
    mapped(
        ("algorithm.filter_groups.enable", "algorithm.filter_groups.max_num_gen_batches"),
        ("algorithm.max_batches", "data.difficulty"),
        loss.convert_filter_groups,
        "`dapo`, or by pass rate with another algorithm; a step with too few groups is trained on those it has",
    ),
    no_effect("algorithm.filter_groups.metric", "the term of `reward.eval_term`, or `algorithm.filter_metric`"),
    no_effect("algorithm.filter_groups.max_inflight_gen_batches", "prompts are sampled as engines have room"),
    mapped(
        loss.overlong_keys(),
        ("algorithm.overlong.buffer", "algorithm.overlong.factor", "algorithm.overlong.max_length"),
        loss.convert_overlong,
        "with `dapo`",
        always=True,
    ),
    read_elsewhere(
        ("reward_model.reward_kwargs.max_resp_len", "reward.reward_kwargs.max_resp_len"),
        "algorithm.overlong.max_length",
    ),
    no_effect(("*.overlong_buffer.log", "*.overlong_buffer_cfg.log"), "the penalty is always logged"),
    mapped(
        (
            f"{CORRECTION}.rollout_is",
            f"{CORRECTION}.rollout_is_threshold",
            f"{CORRECTION}.rollout_rs",
            f"{CORRECTION}.rollout_rs_threshold",
            "algorithm.rollout_is",
            "algorithm.rollout_is_level",
            "algorithm.rollout_is_threshold",
            f"{ACTOR}.tis_imp_ratio_cap",
        ),
        "algorithm.rollout_is",
        loss.convert_rollout_correction,
        "token is `token_tis`, sequence is `sequence_tis`, with two bounds icepop; the rejection seq_mean_k1 is "
        "`geometric_mask`; the last four are of earlier versions",
        always=True,
    ),
    missing(
        (f"{CORRECTION}.rollout_is_batch_normalize", "algorithm.rollout_is_*", "algorithm.rollout_rs*"),
        "megarl does not normalize importance weights, and has none of these masks",
    ),
    missing(
        (f"{CORRECTION}.bypass_mode", f"{ACTOR}.use_rollout_log_probs"),
        "megarl always computes the old log-probabilities itself; `rollout_is` corrects for the engine's",
    ),
    missing(f"{CORRECTION}.loss_type", "the loss of the algorithm is used", off=("ppo_clip",)),
    no_effect(
        (f"{ROLLOUT}.calculate_log_probs", f"{ACTOR}.calculate_entropy", f"{ACTOR}.calculate_sum_pi_squared"),
        "always measured, or only logged",
    ),
    refused(
        "distillation.enabled",
        "megarl has on-policy distillation as an algorithm of its own, algorithm.type: distillation, whose advantage "
        "is log pi_teacher - log pi of the sampled token; write that configuration by hand",
    ),
    no_effect("distillation.*", "distillation is off"),
    no_effect(
        (f"{ACTOR}.policy_loss.*", f"{ACTOR}.tau_*", "algorithm.gdpo_*", f"{ACTOR}.dro_beta"),
        "of policy losses and estimators that are refused",
    ),
)

CRITIC: Sequence[Row] = (
    *(
        mapped(
            key,
            to,
            lambda s, key=key, to=to: {to: s.value(key)} if layout.has_critic(s) and s.value(key) is not None else {},  # type: ignore[misc]
            note,
            always=always,
        )
        for key, to, note, always in (
            ("critic.cliprange_value", "algorithm.critic.clip", "", True),
            ("critic.optim.lr", "algorithm.critic.optimizer.lr", "", True),
            ("critic.optim.weight_decay", "algorithm.critic.optimizer.weight_decay", "", True),
            ("critic.optim.clip_grad", "algorithm.critic.optimizer.clip_grad", "", True),
            ("trainer.critic_warmup", "algorithm.critic.warmup_steps", "in steps", False),
            ("critic.model.path", "algorithm.critic.path", "", False),
        )
    ),
    mapped(
        "critic.optim.betas",
        ("algorithm.critic.optimizer.beta1", "algorithm.critic.optimizer.beta2"),
        lambda s: layout.convert_betas(s, "critic.optim", "algorithm.critic.optimizer") if layout.has_critic(s) else {},
        always=True,
    ),
    mapped(
        ("critic.optim.lr_warmup_steps", "critic.optim.lr_warmup_steps_ratio"),
        "algorithm.critic.optimizer.warmup_steps",
        layout.convert_critic_warmup,
        "counts optimizer steps, as above",
    ),
    mapped(
        ("critic.megatron.*_model_parallel_size", "critic.megatron.*_parallel_size"),
        "algorithm.critic.parallel",
        layout.convert_critic_parallel,
        "default: those of the policy",
    ),
    refused(
        ("critic.model.lora_rank", "critic.model.lora.rank", "critic.model.lora_adapter_path"),
        "megarl trains all weights of a critic and has no LoRA",
    ),
    missing("critic.loss_agg_mode", "values are averaged over tokens", off=("token-mean",)),
    no_effect(("critic.enable", "critic.strategy", "critic.rollout_n"), "follows from the algorithm"),
    no_effect(
        ("critic.megatron.*", "critic.fsdp*", "critic.model.*", "critic.checkpoint.*", "critic.ulysses_*"),
        "the critic is placed, offloaded and saved as the policy is",
    ),
    missing(
        ("critic.grad_clip", "critic.optim.*"), "set algorithm.critic.optimizer by hand", off=(None, 0, 0.0, 1.0, -1)
    ),
)


def _is(s: Settings, kind: str) -> bool:
    return loss.algorithm_type(s) == kind
