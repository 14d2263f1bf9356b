"""NeMo-RL's keys of GRPO, PPO, SFT, DPO and reward models, and what they are in megarl."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from megarl.importing.nemo_rl import datasets
from megarl.importing.nemo_rl import setting_values as run
from megarl.importing.nemo_rl.setting_values import DTENSOR, GENERATION, MEGATRON, TRUNCATED
from megarl.importing.tables import (
    Difference,
    PeerTable,
    Row,
    below,
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

LOSS_DEFAULTS: Mapping[str, object] = {
    "loss_fn.force_on_policy_ratio": False,
    "loss_fn.ratio_clip_max": 0.2,
    "loss_fn.ratio_clip_min": 0.2,
    "loss_fn.reference_policy_kl_penalty": 0.01,
    "loss_fn.reference_policy_kl_type": "k3",
    "loss_fn.kl_input_clamp_value": 20.0,
    "loss_fn.kl_output_clamp_value": 10.0,
    "loss_fn.token_level_loss": True,
    "loss_fn.positive_example_nll_weight": 0.0,
}

POLICY_DEFAULTS: Mapping[str, object] = {
    "cluster.gpus_per_node": 1,
    "cluster.num_nodes": 1,
    "checkpointing.enabled": True,
    "checkpointing.keep_top_k": 3,
    "data.shuffle": True,
    f"{DTENSOR}.tensor_parallel_size": 1,
    f"{DTENSOR}.context_parallel_size": 1,
    f"{MEGATRON}.enabled": False,
    f"{MEGATRON}.freeze_moe_router": True,
    f"{MEGATRON}.optimizer.adam_beta1": 0.9,
    f"{MEGATRON}.optimizer.adam_beta2": 0.999,
    f"{MEGATRON}.optimizer.adam_eps": 1e-8,
    f"{MEGATRON}.optimizer.lr": 5e-6,
    f"{MEGATRON}.optimizer.min_lr": 5e-7,
    f"{MEGATRON}.optimizer.weight_decay": 0.01,
    f"{MEGATRON}.scheduler.lr_decay_style": "constant",
    f"{MEGATRON}.scheduler.lr_warmup_iters": 13,
    "policy.max_grad_norm": 1.0,
    "policy.precision": "bfloat16",
}

GRPO_DEFAULTS: Mapping[str, object] = {
    **LOSS_DEFAULTS,
    **POLICY_DEFAULTS,
    "checkpointing.checkpoint_dir": "results/grpo",
    "checkpointing.save_period": 10,
    "data.default.env_name": "math",
    "data.default.prompt_file": "examples/prompts/cot.txt",
    "data.train.dataset_name": "OpenMathInstruct-2",
    "grpo.adv_estimator.minus_baseline": True,
    "grpo.adv_estimator.name": "grpo",
    "grpo.dynamic_sampling_max_gen_batches": 10,
    "grpo.max_num_steps": 1_000_000,
    "grpo.max_rollout_turns": 1,
    "grpo.max_val_samples": 256,
    "grpo.normalize_rewards": True,
    "grpo.num_generations_per_prompt": 16,
    "grpo.num_prompts_per_step": 32,
    "grpo.reward_shaping.overlong_buffer_length": 128,
    "grpo.reward_shaping.overlong_buffer_penalty": 1,
    "grpo.seed": 42,
    "grpo.use_leave_one_out_baseline": True,
    "grpo.val_period": 10,
    f"{GENERATION}.backend": "vllm",
    f"{GENERATION}.colocated.enabled": True,
    f"{GENERATION}.temperature": 1.0,
    f"{GENERATION}.top_p": 1.0,
    f"{GENERATION}.vllm_cfg.gpu_memory_utilization": 0.6,
    f"{GENERATION}.vllm_cfg.tensor_parallel_size": 1,
    "policy.max_total_sequence_length": 512,
    "policy.model_name": "Qwen/Qwen2.5-1.5B",
    "policy.optimizer.kwargs.betas": [0.9, 0.999],
    "policy.optimizer.kwargs.eps": 1e-8,
    "policy.optimizer.kwargs.lr": 5e-6,
    "policy.optimizer.kwargs.weight_decay": 0.01,
    "policy.sequence_packing.enabled": True,
    "policy.train_global_batch_size": 512,
    "policy.train_micro_batch_size": 4,
}
"""Of examples/configs/grpo_math_1B.yaml, which the recipes inherit from, and of the classes of the losses."""

PPO_DEFAULTS: Mapping[str, object] = {
    **{key: value for key, value in GRPO_DEFAULTS.items() if not key.startswith("grpo.")},
    "checkpointing.checkpoint_dir": "results/ppo_dapo",
    "checkpointing.keep_top_k": 5,
    "data.train.dataset_name": "DAPOMath17K",
    "data.default.prompt_file": None,
    "data.validation.dataset_name": "DAPOMathAIME2024",
    "loss_fn.ratio_clip_c": 10,
    "loss_fn.ratio_clip_max": 0.28,
    "loss_fn.reference_policy_kl_penalty": 0.0,
    "policy.max_total_sequence_length": 16384,
    "ppo.adv_estimator.gae_gamma": 1,
    "ppo.adv_estimator.gae_lambda": 0.95,
    "ppo.adv_estimator.length_adaptive_alpha": 0.0,
    "ppo.adv_estimator.name": "gae",
    "ppo.adv_estimator.normalize_advantages": True,
    "ppo.max_num_steps": 100_000,
    "ppo.max_rollout_turns": 1,
    "ppo.max_val_samples": 256,
    "ppo.num_generations_per_prompt": 16,
    "ppo.num_prompts_per_step": 32,
    "ppo.policy_training_start_step": 0,
    "ppo.ppo_epochs": 4,
    "ppo.reward_shaping.overlong_buffer_length": 2048,
    "ppo.reward_shaping.overlong_buffer_penalty": 1,
    "ppo.seed": 42,
    "ppo.val_period": 20,
    "value.optimizer.kwargs.lr": 1e-5,
    "value.optimizer.kwargs.weight_decay": 0.01,
    "value_loss_fn.cliprange": 0.2,
    "value_loss_fn.scale": 0.4,
}
"""Of examples/configs/ppo_math_1B.yaml."""

SUPERVISED_DEFAULTS: Mapping[str, object] = {
    **POLICY_DEFAULTS,
    "policy.max_total_sequence_length": 1024,
    "policy.optimizer.kwargs.betas": [0.9, 0.98],
    "policy.optimizer.kwargs.eps": 1e-5,
    "policy.optimizer.kwargs.lr": 5e-6,
    "policy.optimizer.kwargs.weight_decay": 0.1,
}

SFT_DEFAULTS: Mapping[str, object] = {
    **SUPERVISED_DEFAULTS,
    "checkpointing.checkpoint_dir": "results/sft",
    "checkpointing.save_period": 10,
    "data.train.dataset_name": "squad",
    "data.validation.dataset_name": "squad",
    "data.validation.split": "validation",
    "policy.model_name": "meta-llama/Llama-3.2-1B",
    "policy.train_global_batch_size": 32,
    "policy.train_micro_batch_size": 1,
    "sft.max_num_steps": 60,
    "sft.seed": 42,
    "sft.val_period": 10,
}
"""Of examples/configs/sft.yaml."""

DPO_DEFAULTS: Mapping[str, object] = {
    **SUPERVISED_DEFAULTS,
    "checkpointing.checkpoint_dir": "results/dpo",
    "checkpointing.save_period": 50,
    "data.train.dataset_name": "HelpSteer3",
    "data.validation.dataset_name": "HelpSteer3",
    "data.validation.split": "validation",
    "dpo.max_num_steps": 150,
    "dpo.preference_loss_weight": 1,
    "dpo.reference_policy_kl_penalty": 0.05,
    "dpo.seed": 42,
    "dpo.val_period": 25,
    "policy.model_name": "meta-llama/Llama-3.2-1B-Instruct",
    "policy.train_global_batch_size": 128,
    "policy.train_micro_batch_size": 2,
}
"""Of examples/configs/dpo.yaml."""

RM_DEFAULTS: Mapping[str, object] = {
    **SUPERVISED_DEFAULTS,
    "checkpointing.checkpoint_dir": "results/rm",
    "checkpointing.save_period": 16,
    "data.train.dataset_name": "HelpSteer3",
    "data.validation.dataset_name": "HelpSteer3",
    "data.validation.split": "validation",
    "policy.max_total_sequence_length": 8192,
    "policy.model_name": "meta-llama/Llama-3.2-1B-Instruct",
    "policy.optimizer.kwargs.lr": 2e-6,
    "policy.train_global_batch_size": 128,
    "policy.train_micro_batch_size": 1,
    "rm.max_num_steps": -1,
    "rm.seed": 42,
    "rm.val_period": 16,
}
"""Of examples/configs/rm.yaml."""


def _batches(section: str) -> Sequence[Row]:
    """Return the rows of batches and lengths; those of evaluation follow."""
    return (
        mapped(
            (
                f"{section}.num_prompts_per_step",
                f"{section}.num_generations_per_prompt",
                "policy.train_global_batch_size",
            ),
            ("algorithm.prompts_per_step", "algorithm.group_size", "algorithm.num_mini_batches"),
            run.convert_batch,
            "in this order; train_global_batch_size counts completions: `num_mini_batches` is num_prompts_per_step * "
            "num_generations_per_prompt / train_global_batch_size",
            always=True,
        ),
        mapped(
            (f"{section}.max_num_steps", f"{section}.max_num_epochs"),
            "trainer.steps",
            lambda s: run.convert_steps(s, section),
            "epochs are not counted",
            always=True,
        ),
        whole(f"{GENERATION}.max_new_tokens", "rollout.max_new_tokens"),
        mapped(
            "policy.max_total_sequence_length",
            "rollout.max_new_tokens",
            lambda s: (
                {}
                if s.is_given(f"{GENERATION}.max_new_tokens")
                else {"rollout.max_new_tokens": s.whole("policy.max_total_sequence_length")}
            ),
            "prompt and completion together; megarl's limits are separate",
            always=True,
        ),
        mapped(
            "data.max_input_seq_length",
            "data.max_prompt_tokens",
            lambda s: {"data.max_prompt_tokens": s.whole("data.max_input_seq_length")},
        ),
        mapped(
            f"{section}.overlong_filtering",
            "algorithm.mask_truncated_completions",
            lambda s: {"algorithm.mask_truncated_completions": s.flag(f"{section}.overlong_filtering")},
            "truncated completions stay in the baseline",
        ),
        missing(
            (
                f"{section}.reward_scaling.enabled",
                f"{section}.advantage_clip_*",
                f"{section}.seq_logprob_error_threshold",
                f"{section}.invalid_tool_call_advantage",
                f"{section}.malformed_thinking_advantage",
                f"{section}.invalid_tool_call_strategy",
                f"{section}.penalize_*",
                f"{section}.stop_at_validation_*",
                f"{section}.reward_shaping.stop_properly_penalty_coef",
                "reward_penalties.*",
            ),
            "write it as a reward of type: python, or as an algorithm of yours",
        ),
        no_effect(f"{section}.reward_scaling.*", "scales of rewards, which reward_scaling.enabled turns on"),
        mapped(
            (
                f"{section}.reward_shaping.enabled",
                f"{section}.reward_shaping.overlong_buffer_length",
                f"{section}.reward_shaping.overlong_buffer_penalty",
                f"{section}.reward_shaping.max_response_length",
            ),
            ("algorithm.overlong.buffer", "algorithm.overlong.factor", "algorithm.overlong.max_length"),
            run.convert_overlong,
            "with `dapo`",
        ),
        *_evaluation(section),
    )


def _eval_every(section: str) -> Row:
    return mapped(
        f"{section}.val_period",
        "trainer.eval_every",
        lambda s: {"trainer.eval_every": max(0, s.whole(f"{section}.val_period") or 0)},
        "-1 is 0: only before the first step and after the last",
        always=True,
    )


def _evaluation(section: str) -> Sequence[Row]:
    """Return the rows of evaluation, seed, turns and schedule."""
    return (
        _eval_every(section),
        mapped(
            f"{section}.max_val_samples",
            ("data.eval_size", "data.sources.NAME.eval_size"),
            lambda s: datasets.convert_eval_size(s, f"{section}.max_val_samples"),
            "prompts",
        ),
        mapped(
            f"{section}.val_num_generations_per_prompt",
            "eval.samples",
            lambda s: {"eval.samples": s.whole(f"{section}.val_num_generations_per_prompt") or 1},
        ),
        mapped(f"{section}.seed", "seed", lambda s: {"seed": s.whole(f"{section}.seed")}, "one seed for everything"),
        mapped(
            f"{section}.max_rollout_turns",
            ("rollout.env.path", "rollout.env.max_turns"),
            run.convert_turns,
            "an environment of yours",
        ),
        mapped(
            f"{section}.async_{section}.*",
            "schedule",
            run.convert_async,
            "max_trajectory_age_steps is `max_staleness`; in-flight updates are `update: in_place`, or `retract` where "
            "the KV cache is recomputed",
        ),
        no_effect(
            (
                f"{section}.val_*",
                f"{section}.batch_multiplier",
                f"{section}.skip_reference_policy_logprobs_calculation",
                f"{section}.calculate_advantages_on_gpu",
                f"{section}.debug_payload_metrics",
                f"{section}.deduplicate_multimodal_data",
                f"{section}.async_{section}",
            ),
            "follows from other keys, or a run evaluates first and last",
        ),
    )


LOSS: Sequence[Row] = (
    mapped(
        (
            "grpo.adv_estimator.name",
            "ppo.adv_estimator.name",
            "grpo.normalize_rewards",
            "grpo.use_leave_one_out_baseline",
            "grpo.adv_estimator.normalize_rewards",
            "grpo.adv_estimator.use_leave_one_out_baseline",
            "grpo.adv_estimator.minus_baseline",
            "ppo.adv_estimator.normalize_advantages",
            "loss_fn.sequence_level_importance_ratios",
            "loss_fn.use_cispo",
        ),
        ("algorithm.type", "algorithm.whiten", "algorithm.whiten_unbiased"),
        run.convert_type,
        "grpo without normalize_rewards is `rloo`, also without leave-one-out `dr_grpo`; with both, its default, there "
        "is no equivalent; reinforce_plus_plus is `reinforce_pp_baseline`, without minus_baseline `reinforce_pp`; "
        "gae is `ppo`, with length_adaptive_alpha `vapo`",
        always=True,
    ),
    mapped(
        ("grpo.use_dynamic_sampling", "grpo.dynamic_sampling_max_gen_batches"),
        ("algorithm.max_batches", "data.difficulty"),
        run.convert_dynamic_sampling,
        "`dapo`, or by pass rate with another algorithm",
    ),
    mapped(
        ("loss_fn.ratio_clip_min", "loss_fn.ratio_clip_max"),
        ("algorithm.clip_ratio_low", "algorithm.clip_ratio_high"),
        run.convert_clip,
        "in this order; `cispo` has no lower bound",
        always=True,
    ),
    mapped("loss_fn.ratio_clip_c", "algorithm.dual_clip", run.convert_dual_clip, always=True),
    mapped(
        "loss_fn.token_level_loss",
        "algorithm.aggregation",
        lambda s: {
            "algorithm.aggregation": "token-mean" if s.flag("loss_fn.token_level_loss") else "seq-mean-token-mean"
        },
        "true: `token-mean`; false: `seq-mean-token-mean`",
        always=True,
    ),
    mapped(
        (
            "loss_fn.reference_policy_kl_penalty",
            "loss_fn.reference_policy_kl_type",
            "loss_fn.use_on_policy_kl_approximation",
        ),
        "algorithm.kl_loss",
        run.convert_kl_loss,
        "null instead of 0; NeMo-RL's gradient of k3 is that of `k2` in megarl",
        always=True,
    ),
    mapped("loss_fn.use_kl_in_reward", "algorithm.kl_reward", run.convert_kl_reward, always=True),
    missing(
        ("loss_fn.kl_input_clamp_value", "loss_fn.kl_output_clamp_value"),
        "d is limited to 20, and the penalty has no limit",
    ),
    mapped(
        (
            "loss_fn.use_importance_sampling_correction",
            f"{TRUNCATED}_type",
            f"{TRUNCATED}_ratio",
            f"{TRUNCATED}_ratio_min",
        ),
        "algorithm.rollout_is",
        run.convert_correction,
        "tis is `token_tis`, with sequence-level ratios `sequence_tis`; icepop is `icepop`",
        always=True,
    ),
    mapped(
        ("loss_fn.force_on_policy_ratio", "loss_fn.disable_ppo_ratio"),
        (),
        run.convert_ratio,
        "with one update in a step the ratio is 1",
    ),
    mapped("loss_fn.positive_example_nll_weight", "algorithm.nll_coefficient", run.convert_nll, "`vapo`", always=True),
    mapped(
        (
            "ppo.adv_estimator.gae_gamma",
            "ppo.adv_estimator.gae_lambda",
            "ppo.adv_estimator.gae_lambda_value",
            "ppo.adv_estimator.gae_lambda_policy",
            "ppo.adv_estimator.length_adaptive_alpha",
        ),
        ("algorithm.gamma", "algorithm.lam", "algorithm.length_alpha"),
        run.convert_returns,
        "`length_alpha`: `vapo`",
        always=True,
    ),
    whole("ppo.ppo_epochs", "algorithm.ppo_epochs"),
    mapped(
        (
            "value_loss_fn.cliprange",
            "ppo.policy_training_start_step",
            "value.model_name",
            "value.optimizer.kwargs.lr",
            "value.optimizer.kwargs.weight_decay",
            "value.megatron_cfg.optimizer.lr",
            "value.megatron_cfg.optimizer.weight_decay",
        ),
        (
            "algorithm.critic.clip",
            "algorithm.critic.warmup_steps",
            "algorithm.critic.path",
            "algorithm.critic.optimizer",
        ),
        run.convert_critic,
        always=True,
    ),
    missing("value_loss_fn.scale", "the critic's loss has the factor 1, which Adam does not notice", off=(1, 1.0)),
    no_effect("value.*", "the critic has the policy's batches, layout and limits"),
    missing("ppo.use_dynamic_sampling", "megarl replaces groups without a signal for algorithms with a group only"),
    no_effect("ppo.dynamic_sampling_max_gen_batches", "dynamic sampling is off"),
    missing(("grpo.adv_estimator.*", "ppo.adv_estimator.*", "loss_fn.*"), "no such setting"),
)


OPTIMIZER_KEYS = tuple(f"trainer.optimizer.{name}" for name in ("lr", "weight_decay", "eps", "beta1", "beta2"))

POLICY: Sequence[Row] = (
    text("policy.model_name", "model.path", "a folder or a hub id", always=True),
    mapped(
        "policy.precision",
        "model.dtype",
        lambda s: {
            "model.dtype": {"bfloat16": "bfloat16", "float32": "float32"}.get(str(s.value("policy.precision")), "auto")
        },
        "float32 or bfloat16",
    ),
    mapped(
        (
            "policy.train_micro_batch_size",
            "policy.sequence_packing.enabled",
            "policy.sequence_packing.train_mb_tokens",
            "policy.dynamic_batching.enabled",
            "policy.dynamic_batching.train_mb_tokens",
        ),
        "trainer.max_tokens_per_micro_batch",
        run.convert_micro_batch,
        "sequences are always packed",
        always=True,
    ),
    mapped(
        (
            f"{MEGATRON}.optimizer.lr",
            f"{MEGATRON}.optimizer.weight_decay",
            f"{MEGATRON}.optimizer.adam_eps",
            f"{MEGATRON}.optimizer.adam_beta1",
            f"{MEGATRON}.optimizer.adam_beta2",
            "policy.optimizer.kwargs.lr",
            "policy.optimizer.kwargs.weight_decay",
            "policy.optimizer.kwargs.eps",
            "policy.optimizer.kwargs.betas",
        ),
        OPTIMIZER_KEYS,
        run.convert_optimizer,
        "in this order; of the backend that is enabled",
        always=True,
    ),
    mapped(
        (
            f"{MEGATRON}.scheduler.lr_warmup_iters",
            f"{MEGATRON}.scheduler.lr_decay_style",
            f"{MEGATRON}.optimizer.min_lr",
            "policy.scheduler",
            "policy.scheduler.*",
        ),
        ("trainer.optimizer.warmup_steps", "trainer.optimizer.decay", "trainer.optimizer.min_lr"),
        lambda s: run.convert_schedule_of_lr(s, run.updates_of_schedule(s)),
        "counts optimizer steps, times num_mini_batches * ppo_epochs of NeMo-RL's",
        always=True,
    ),
    mapped(
        ("policy.max_grad_norm", f"{MEGATRON}.optimizer.clip_grad"),
        "trainer.optimizer.clip_grad",
        lambda s: {"trainer.optimizer.clip_grad": s.number("policy.max_grad_norm") or 0.0},
        "0 instead of null: no limit",
        always=True,
    ),
    missing(
        ("policy.optimizer.name", f"{MEGATRON}.optimizer.optimizer"),
        "trainer.optimizer.type takes adam, sgd or a class of yours",
        off=("torch.optim.AdamW", "adam"),
    ),
    flag(f"{MEGATRON}.optimizer.use_distributed_optimizer", "trainer.optimizer.distributed"),
    mapped(
        (
            f"{MEGATRON}.enabled",
            f"{MEGATRON}.*_parallel_size",
            f"{MEGATRON}.sequence_parallel",
            f"{MEGATRON}.num_layers_in_*_pipeline_stage",
            f"{DTENSOR}.tensor_parallel_size",
            f"{DTENSOR}.context_parallel_size",
        ),
        "trainer.parallel",
        run.convert_parallel,
        "tp, pp, cp, ep, etp, first_stage_layers, last_stage_layers; DTensor's sizes are tp and cp",
        always=True,
    ),
    mapped(
        (
            f"{MEGATRON}.activation_checkpointing",
            f"{DTENSOR}.activation_checkpointing",
            f"{MEGATRON}.recompute_granularity",
            f"{MEGATRON}.recompute_modules",
        ),
        ("trainer.recompute.granularity", "trainer.recompute.modules"),
        run.convert_recompute,
    ),
    mapped(
        f"{MEGATRON}.fp8_cfg.*",
        ("trainer.megatron.model.fp8", "trainer.megatron.model.fp8_recipe"),
        run.convert_fp8,
    ),
    mapped(
        f"{MEGATRON}.freeze_moe_router",
        "trainer.moe.freeze_router",
        lambda s: (
            {"trainer.moe.freeze_router": s.flag(f"{MEGATRON}.freeze_moe_router")}
            if run.uses_megatron(s) and (s.whole(f"{MEGATRON}.expert_model_parallel_size") or 1) > 1
            else {}
        ),
        "on by default in NeMo-RL; converted where experts are divided over ranks",
        always=True,
    ),
    mapped(
        f"{MEGATRON}.model_overrides.*",
        "trainer.megatron.model",
        lambda s: run.convert_fields(s, f"{MEGATRON}.model_overrides.*", "model"),
        "fields of `TransformerConfig`",
    ),
    missing(
        ("policy.quant_*", "policy.disable_modelopt_layer_spec", "policy.dequantize_base_checkpoint"),
        "no training for quantized weights, and none from a quantized folder",
    ),
    flag(f"{MEGATRON}.fp32_lm_head", "model.fp32_lm_head", "trainer and engines"),
    refused(
        (f"{DTENSOR}.lora_cfg.enabled", f"{MEGATRON}.peft.enabled"),
        "megarl trains all weights and has no LoRA; remove the key, and choose a learning rate for that",
    ),
    no_effect((f"{DTENSOR}.lora_cfg.*", f"{MEGATRON}.peft.*"), "LoRA is off"),
    refused("policy.draft.enabled", "megarl trains no draft models"),
    no_effect("policy.draft.*", "no draft model is trained"),
    missing(f"{MEGATRON}.mtp_*", "layers for multi-token prediction are kept as they are and not trained"),
    below("policy.tokenizer.chat_template_kwargs", "data.chat_template_kwargs", "variables of the chat template"),
    missing(
        ("policy.tokenizer.chat_template", "policy.hf_config_overrides.*"),
        "the tokenizer, its template and the architecture are those of the model's folder: change them there",
        off=(None, "default"),
    ),
    missing(
        (f"{MEGATRON}.optimizer.optimizer_cpu_offload", f"{DTENSOR}.cpu_offload"),
        "set trainer.offload, or trainer.megatron.optimizer.optimizer_cpu_offload",
    ),
    no_effect(
        (
            "policy.tokenizer.*",
            "policy.dynamic_batching.*",
            "policy.sequence_packing.*",
            "policy.logprob_*",
            "policy.generation_batch_size",
            "policy.offload_optimizer_for_logprob",
            "policy.make_sequence_length_divisible_by",
            "policy.optimizer.kwargs.*",
            "policy.optimizer",
            f"{MEGATRON}.*",
            f"{DTENSOR}.*",
            "policy.hf_config_overrides",
            "policy.activation_checkpointing_enabled",
            "policy.refit_*",
        ),
        "of the other backend, or without effect on results",
    ),
    mapped(
        "checkpointing.checkpoint_dir",
        "run_dir",
        lambda s: {"run_dir": s.text("checkpointing.checkpoint_dir") or "runs/nemo-rl"},
        "checkpoints, logs, rollouts and model of a run",
        always=True,
    ),
    mapped(
        ("checkpointing.enabled", "checkpointing.save_period"),
        "checkpoint.every",
        run.convert_checkpoints,
        always=True,
    ),
    mapped(
        "checkpointing.keep_top_k",
        "checkpoint.keep_last",
        lambda s: {} if (k := s.whole("checkpointing.keep_top_k")) is None else {"checkpoint.keep_last": k},
        "the latest, not the best",
    ),
    flag(f"{MEGATRON}.checkpoint.async_save", "checkpoint.asynchronous", "on by default"),
    no_effect("checkpointing.*", "checkpoints have all that a run needs to resume, and Hugging Face format at the end"),
    mapped(
        ("logger.wandb_enabled", "logger.wandb.project", "logger.wandb.name"),
        ("tracking.wandb.project", "tracking.wandb.name"),
        run.convert_wandb,
    ),
    flag("logger.tensorboard_enabled", "tracking.tensorboard"),
    missing(
        ("logger.mlflow_enabled", "logger.swanlab_enabled"),
        "tracking.sinks takes a class of yours for other loggers",
    ),
    no_effect("logger.*", "logs"),
    mapped("data.shuffle", "data.shuffle", lambda s: {"data.shuffle": s.flag("data.shuffle")}),
    mapped(
        ("data.train.split_validation_size", "data.default.split_validation_size"),
        (),
        datasets.convert_split,
        "held-out rows are those of `data.eval_path`",
        always=True,
    ),
    whole("cluster.segment_size", "placement.nvlink_domain_nodes", "nodes per NVLink domain"),
    no_effect(("cluster.*", "data.*", "data"), "without effect on results"),
    no_effect(("data_plane.*", "data_plane", "on_policy_distillation"), "tokens stay in the workers"),
    refused("on_policy_distillation.*", "write the configuration of algorithm.type: distillation by hand"),
)


def _data(stage: str, *fields: str) -> Sequence[Row]:
    """Return the rows of training and held-out files of a command of megarl.

    Args:
        fields: names of `data.fields` that a row may be converted to.
    """

    def keys(section: str) -> list[str]:
        return [f"data.{section}", *(f"data.{section}.{key}" for key in datasets.READ_KEYS)]

    prompts = [f"data.{part}.{name}" for part in ("train", "default") for name in datasets.PROMPT_FILES]
    return (
        mapped(
            [*keys("train"), *(f"data.default.{key}" for key in datasets.READ_KEYS)],
            ("data.path", *(f"data.fields.{name}" for name in fields), *(["data.sources"] if stage == "train" else [])),
            lambda s: datasets.convert_data(s, stage),
            "files, also those of most data sets that NeMo-RL knows by name, on the hub",
            always=True,
        ),
        mapped(
            keys("validation"),
            ("data.eval_path", *(["data.sources.NAME.eval_path"] if stage == "train" else [])),
            lambda s: datasets.convert_eval_data(s, stage),
            "the fields are those of training rows",
            always=True,
        ),
        mapped(
            prompts,
            ("data.prompt_template", "data.system_prompt"),
            lambda s: datasets.convert_prompt_files(s, stage),
            "`{}` is `{prompt}`; the file is sought in the folders above the configuration",
            always=True,
        ),
        no_effect([datasets.text_key(key) for key in prompts], "content of a file, which its own key names"),
        missing(
            [f"data.{part}.{name}" for part in ("train", "default") for name in ("max_samples", "repeat")],
            "megarl trains on each row of a file once in an epoch: shorten the file, or repeat its rows",
            off=(None, 1),
        ),
        missing("data.custom_dataloader", "prompts are taken in a shuffled order, from each source in its ratio"),
    )


ENGINES: Sequence[Row] = (
    mapped(
        (
            "cluster.num_nodes",
            "cluster.gpus_per_node",
            f"{GENERATION}.colocated.enabled",
            f"{GENERATION}.colocated.resources.num_nodes",
            f"{GENERATION}.colocated.resources.gpus_per_node",
            f"{GENERATION}.vllm_cfg.tensor_parallel_size",
            f"{GENERATION}.sglang_cfg.tp_size",
            f"{GENERATION}.backend",
        ),
        (
            "placement.nodes",
            "placement.slots_per_node",
            "placement.pools.engines",
            "placement.rollout.pool",
            "rollout.tp",
            "rollout.replicas",
        ),
        run.convert_slots,
        "engines that are not colocated have a pool of their own, and the trainer the rest of the cluster",
        always=True,
    ),
    mapped(
        (f"{GENERATION}.vllm_cfg.gpu_memory_utilization", f"{GENERATION}.sglang_cfg.mem_fraction_static"),
        "rollout.engine.mem_fraction",
        run.convert_mem_fraction,
    ),
    whole(f"{GENERATION}.sglang_cfg.max_running_requests", "rollout.engine.max_running_requests"),
    mapped(
        f"{GENERATION}.sglang_cfg.*",
        "rollout.engine.extra_args",
        run.convert_engine_options,
        "arguments of SGLang by its own names",
    ),
    number(f"{GENERATION}.temperature", "rollout.sampling.temperature", always=True),
    missing(
        (f"{GENERATION}.top_p", f"{GENERATION}.top_k"),
        "megarl samples from the full distribution, to which ratios refer",
        off=(1, 1.0, -1, None),
    ),
    missing(
        (f"{GENERATION}.stop_token_ids", f"{GENERATION}.stop_strings"),
        "completions end at the end-of-sequence tokens of the model's folder: add them to generation_config.json",
    ),
    missing(
        f"{GENERATION}.vllm_cfg.precision",
        "engines that quantize: see rollout.engine.extra_args.quantization",
        off=("bfloat16", "float32", None),
    ),
    mapped(
        "policy.router_replay.enabled",
        "trainer.moe.router_replay",
        lambda s: {"trainer.moe.router_replay": "R3"} if s.flag("policy.router_replay.enabled") else {},
        "`R3`",
    ),
    missing(
        "async_rl.*",
        "of the single controller: set schedule.type: async and schedule.max_staleness, the versions that a sampler "
        "allows",
    ),
    no_effect(f"{GENERATION}.*", "of vLLM or another engine, or without effect on results"),
    *_data("train", "prompt", "answer", "messages", "tools"),
    mapped("data.validation.repeat", "eval.samples", datasets.convert_repeat, "several completions of each row"),
    mapped(
        ("data.default.env_name", "data.train.env_name", "env.reward_model.model_name"),
        "reward.terms.NAME",
        run.convert_rewards,
        "math is `type: math`, reward_model `type: model`",
        always=True,
    ),
    missing("env.nemo_gym.*", "write the environment as rollout.env, or an agent as rollout.harness"),
    no_effect("env.*", "workers and settings of environments"),
)

SFT: Sequence[Row] = (
    mapped("sft.max_num_steps", "trainer.steps", lambda s: run.convert_steps(s, "sft"), always=True),
    whole("policy.train_global_batch_size", "trainer.batch_size", "demonstrations", always=True),
    whole("sft.seed", "seed"),
    _eval_every("sft"),
    missing("sft.only_unmask_final", "all answers of a conversation are trained"),
    no_effect("sft.*", "a run evaluates before the first step and after the last"),
    *_data("sft", "prompt", "response", "messages", "tools"),
)

DPO: Sequence[Row] = (
    mapped("dpo.max_num_steps", "trainer.steps", lambda s: run.convert_steps(s, "dpo"), always=True),
    whole("policy.train_global_batch_size", "trainer.batch_size", "pairs", always=True),
    mapped(
        (
            "dpo.reference_policy_kl_penalty",
            "dpo.preference_loss_weight",
            "dpo.sft_loss_weight",
            "dpo.preference_average_log_probs",
            "dpo.sft_average_log_probs",
        ),
        ("dpo.beta", "dpo.nll"),
        run.convert_dpo_loss,
        "sft_loss_weight with sft_average_log_probs is `nll`",
        always=True,
    ),
    whole("dpo.seed", "seed"),
    _eval_every("dpo"),
    no_effect("dpo.*", "a run evaluates before the first step and after the last"),
    *_data("dpo", "prompt", "chosen", "rejected"),
)

RM: Sequence[Row] = (
    mapped("rm.max_num_steps", "trainer.steps", lambda s: run.convert_steps(s, "rm"), always=True),
    whole("policy.train_global_batch_size", "trainer.batch_size", "pairs", always=True),
    whole("rm.seed", "seed"),
    _eval_every("rm"),
    no_effect("rm.*", "a run evaluates before the first step and after the last"),
    refused(
        "policy.reward_model_cfg.reward_model_type",
        "megarl rm has the loss of Bradley and Terry",
        off=("bradley_terry", None),
    ),
    no_effect("policy.reward_model_cfg.*", "megarl rm always gives the model a head for scores"),
    *_data("rm", "prompt", "chosen", "rejected"),
)

SUPERVISED_ENGINES: Sequence[Row] = (
    whole("cluster.num_nodes", "placement.nodes", always=True),
    whole("cluster.gpus_per_node", "placement.slots_per_node", always=True),
    read_elsewhere("policy.max_total_sequence_length", "trainer.max_tokens_per_micro_batch"),
    no_effect((f"{GENERATION}.*", "env.*", "policy.router_replay.*"), "nothing is generated"),
)

WARMUP = Difference(
    text="Schedules of the learning rate advance once per optimizer step in megarl, once per training step in NeMo-RL: "
    "warm-up steps were multiplied by num_mini_batches * ppo_epochs.",
    applies=lambda s: run.updates_per_step(s) > 1,
)
COMMON: Sequence[Difference] = (
    Difference(
        text="Warm-up begins at lr / warmup_steps in megarl, at lr_warmup_init or start_factor * lr in NeMo-RL.",
    ),
    Difference(
        text="DTensor shards weights over all GPUs; megarl shards them by trainer.parallel: `megarl check --gpu NAME` "
        "prints what fits.",
        applies=lambda s: not run.uses_megatron(s),
    ),
    Difference(text="A run does not resume by itself: use --resume auto."),
    Difference(text="checkpoint.keep_last keeps the latest checkpoints, keep_top_k the best."),
)
DIFFERENCES: Sequence[Difference] = (
    WARMUP,
    *COMMON,
    Difference(
        text="train_global_batch_size counts completions; algorithm.num_mini_batches is a number of mini-batches, and "
        "the completions of a prompt stay together.",
    ),
    Difference(
        text="NeMo-RL multiplies the KL penalty by pi / sg(pi): its gradient of k3 is that of k2, which kl_loss.kind "
        "is. The logged divergence is that of k2, too.",
        applies=lambda s: (
            bool(s.number("loss_fn.reference_policy_kl_penalty")) and not s.flag("loss_fn.use_kl_in_reward")
        ),
    ),
    Difference(
        text="max_total_sequence_length limits prompt and completion together; rollout.max_new_tokens limits the "
        "completion, data.max_prompt_tokens the prompt.",
    ),
    Difference(
        text="The critic's loss is not multiplied by value_loss_fn.scale, which Adam does not notice but the limit of "
        "the gradient norm does.",
        applies=lambda s: s.text(run.estimator(s, "name")) == "gae" and s.number("value_loss_fn.scale") != 1.0,
    ),
    Difference(
        text="Validation: NeMo-RL samples with the temperature val_temperature, 1 by default; megarl takes one greedy "
        "completion, or eval.samples completions with the temperature of training.",
    ),
    Difference(
        text="Engines are SGLang's; sampled tokens and speed differ from those of other engines.",
        applies=lambda s: s.text(f"{GENERATION}.backend") != "sglang",
    ),
    Difference(
        text="A run compares log-probabilities of engine and trainer at every step and stops if they disagree, see "
        "limits.",
    ),
)

GRPO_TABLE = PeerTable(
    name="NeMo-RL",
    repository="https://github.com/NVIDIA-NeMo/RL",
    versions="0.6.0, August 2026, commit `7ea279abfbeb`",
    topics={
        "Batches and lengths": (*_batches("grpo"), *_batches("ppo")),
        "Loss and algorithm": LOSS,
        "Engines, data, rewards": ENGINES,
        "Model, optimizer, parallelism, checkpoints, logs": POLICY,
    },
    defaults=GRPO_DEFAULTS,
    differences=DIFFERENCES,
    abbreviations={MEGATRON: "MEG", GENERATION: "GEN"},
)
TABLES: Mapping[str, PeerTable] = {
    "grpo": replace(GRPO_TABLE, topics={**GRPO_TABLE.topics, "Batches and lengths": _batches("grpo")}),
    "ppo": replace(
        GRPO_TABLE,
        topics={
            **GRPO_TABLE.topics,
            "Batches and lengths": _batches("ppo"),
            "Model, optimizer, parallelism, checkpoints, logs": POLICY,
        },
        defaults=PPO_DEFAULTS,
    ),
    "sft": replace(
        GRPO_TABLE,
        command="sft",
        topics={"Supervised fine-tuning": SFT, "Placement": SUPERVISED_ENGINES, "Model": POLICY},
        defaults=SFT_DEFAULTS,
        differences=COMMON,
    ),
    "dpo": replace(
        GRPO_TABLE,
        command="dpo",
        topics={"Preferences": DPO, "Placement": SUPERVISED_ENGINES, "Model": POLICY},
        defaults=DPO_DEFAULTS,
        differences=COMMON,
    ),
    "rm": replace(
        GRPO_TABLE,
        command="rm",
        topics={"Reward models": RM, "Placement": SUPERVISED_ENGINES, "Model": POLICY},
        defaults=RM_DEFAULTS,
        differences=COMMON,
    ),
}
"""Section of the algorithm -> its table."""

NEMO_RL = replace(
    GRPO_TABLE,
    topics={**GRPO_TABLE.topics, "Supervised fine-tuning": SFT, "Preference pairs": DPO, "Reward models": RM},
)
"""The keys of all algorithms, for the documentation."""
