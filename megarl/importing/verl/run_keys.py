"""verl's keys of engines, schedule, rewards, agents, data, checkpoints and logs."""

from __future__ import annotations

from collections.abc import Sequence

from megarl.importing.tables import (
    Row,
    below,
    flag,
    mapped,
    missing,
    no_effect,
    number,
    whole,
)
from megarl.importing.verl import data_and_rewards as data
from megarl.importing.verl import run_layout as layout
from megarl.importing.verl.loss_settings import ACTOR
from megarl.importing.verl.run_layout import ENTRY_KEY, ROLLOUT

ENGINES: Sequence[Row] = (
    mapped(
        (
            "trainer.nnodes",
            "trainer.n_gpus_per_node",
            f"{ROLLOUT}.tensor_model_parallel_size",
            f"{ROLLOUT}.expert_parallel_size",
            "rollout.nnodes",
            "rollout.n_gpus_per_node",
            f"{ROLLOUT}.nnodes",
            f"{ROLLOUT}.n_gpus_per_node",
        ),
        (
            "placement.nodes",
            "placement.slots_per_node",
            "placement.pools.NAME",
            "placement.rollout.pool",
            "rollout.tp",
            "rollout.replicas",
            "rollout.engine.extra_args.ep_size",
        ),
        layout.convert_slots,
        "engines fill the GPUs: `replicas` is GPUs / tp; engines with GPUs of their own have a pool",
        always=True,
    ),
    missing(
        (
            f"{ROLLOUT}.data_parallel_size",
            f"{ROLLOUT}.pipeline_model_parallel_size",
            f"{ROLLOUT}.disaggregation.enabled",
        ),
        "an engine has tensor- and expert-parallel ranks; raise rollout.replicas instead",
        off=(None, 1, False),
    ),
    mapped(
        (
            "trainer.v1.trainer_mode",
            "trainer.v1.sampler.max_off_policy_threshold",
            "trainer.v1.sampler.max_off_policy_strategy",
            "async_training.staleness_threshold",
            "async_training.partial_rollout",
            "trainer.use_v1",
            ENTRY_KEY,
        ),
        ("schedule.type", "schedule.lookahead", "schedule.max_staleness", "schedule.late", "schedule.update"),
        layout.convert_schedule,
        "sync, or `async`; the scripts of one_step_off_policy are `one_step_off`, those of fully_async_policy `async`",
    ),
    no_effect(
        ("trainer.v1.*", "transfer_queue.*", "async_training.*", "skip.*"),
        "the controller decides with `schedule`",
    ),
    no_effect(f"{ROLLOUT}.name", "SGLang, or an engine of yours (`rollout.engine.type`)"),
    number(
        f"{ROLLOUT}.gpu_memory_utilization",
        "rollout.engine.mem_fraction",
        "a share of the free memory; by default what the phases of a step leave",
    ),
    whole(f"{ROLLOUT}.max_num_seqs", "rollout.engine.max_running_requests"),
    mapped(f"{ROLLOUT}.temperature", "rollout.sampling.temperature", data.convert_sampling, always=True),
    mapped(
        (f"{ROLLOUT}.top_p", f"{ROLLOUT}.top_k"),
        ("rollout.sampling.top_p", "rollout.sampling.top_k"),
        data.convert_truncated_sampling,
        "only 1 and -1",
    ),
    missing(f"{ROLLOUT}.do_sample", "training samples", off=(True,)),
    missing(f"{ROLLOUT}.ignore_eos", "a completion ends with a stop token"),
    mapped(
        f"{ROLLOUT}.engine_kwargs.sglang.*",
        "rollout.engine.extra_args",
        layout.convert_engine_options,
        "arguments of SGLang by its own names",
    ),
    missing(
        (f"{ROLLOUT}.engine_kwargs.vllm.*", f"{ROLLOUT}.engine_kwargs.trtllm.*"),
        "an argument of another engine; `rollout.engine.extra_args` takes SGLang's",
    ),
    flag(f"{ROLLOUT}.free_cache_engine", "rollout.engine.release_memory", "weights and KV cache"),
    mapped(
        f"{ROLLOUT}.enforce_eager",
        "rollout.engine.extra_args.disable_cuda_graph",
        lambda s: {"rollout.engine.extra_args.disable_cuda_graph": True} if s.flag(f"{ROLLOUT}.enforce_eager") else {},
    ),
    mapped(
        f"{ROLLOUT}.enable_prefix_caching",
        "rollout.engine.extra_args.disable_radix_cache",
        lambda s: (
            {}
            if s.flag(f"{ROLLOUT}.enable_prefix_caching")
            else {"rollout.engine.extra_args.disable_radix_cache": True}
        ),
    ),
    mapped(
        f"{ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes",
        "weight_sync.bucket_bytes",
        lambda s: {
            "weight_sync.bucket_bytes": (s.whole(f"{ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes") or 256)
            << 20
        },
        "bytes",
    ),
    no_effect(f"{ROLLOUT}.checkpoint_engine.*", "see `weight_sync`"),
    missing(
        (f"{ROLLOUT}.quantization", f"{ROLLOUT}.quantization_config_file"),
        "engines run in FP8 if the model's folder is in FP8 with blocks of 128 x 128; megarl does not quantize a "
        "folder in bfloat16",
    ),
    no_effect(
        tuple(
            f"{ROLLOUT}.{name}"
            for name in (
                "mode",
                "load_format",
                "max_num_batched_tokens",
                "enable_chunked_prefill",
                "max_model_len",
                "cudagraph_capture_sizes",
                "disable_log_stats",
                "skip_tokenizer_init",
                "layered_summon",
                "multi_stage_wake_up",
                "scheduling_policy",
                "logprobs_mode",
                "prometheus.*",
                "trace.*",
                "limit_images",
                "moe_*",
                "layer_name_map.*",
                "seed",
                "full_determinism",
                "standalone_gpu_memory_utilization",
                "disaggregation.*",
                "over_sample_rate",
                "mtp*",
            )
        ),
        "of the engine, without effect on results",
    ),
    mapped(
        tuple(f"{key}.{name}" for key in data.REWARD_FUNCTIONS for name in ("path", "name"))
        + tuple(f"{key}.{name}" for key in data.REWARD_MODELS for name in ("enable", "model.path", "model_path")),
        "reward.terms.NAME",
        data.convert_rewards,
        "a function becomes a term of type `python`, an import path: `score(trajectory, text, row)` instead of "
        "`compute_score(data_source, solution_str, ground_truth, extra_info)`; a reward model, one of type `model`; "
        "neither, one of type `math`",
        always=True,
    ),
    missing(
        ("reward_model.reward_manager", "reward.reward_manager.*", "reward_manager.*"),
        "a reward manager of one's own is a term of type `python`",
        off=("naive", "dapo", "batch", "prime", "register", None),
    ),
    missing(
        ("*.sandbox_fusion.url", "sandbox_fusion.url"),
        "programs run in the sandboxes of terms of type `code`; `sandbox.tier: service` calls a service",
    ),
    missing(
        ("reward_model.reward_kwargs.*", "reward.reward_kwargs.*", "custom_reward_function.reward_kwargs.*"),
        "arguments of a reward function are `kwargs` of its term of type `python`",
        off=(),
    ),
    no_effect("*sandbox_fusion.*", "see `sandbox` of a term of type `code`"),
    no_effect(
        ("reward.num_workers", "reward_model.num_workers", "reward_model.*reward_*", "reward_model.*max_length"),
        "rewards run in the rollout workers",
    ),
    no_effect(
        tuple(
            f"{head}.{name}"
            for head in data.REWARD_MODELS
            for name in (
                "enable_resource_pool",
                "n_gpus_per_node",
                "nnodes",
                "strategy",
                "rollout.*",
                "model.*",
                "megatron.*",
                "fsdp_config.*",
                "profiler.*",
                "nccl_timeout",
                "load_weight",
                "ulysses_*",
            )
        ),
        "a reward model is on the trainer's slots, or in a pool: `placement.reward_models`",
    ),
    mapped(
        (
            f"{ROLLOUT}.multi_turn.enable",
            f"{ROLLOUT}.multi_turn.tool_config_path",
            f"{ROLLOUT}.multi_turn.function_tool_path",
            f"{ROLLOUT}.multi_turn.max_assistant_turns",
            f"{ROLLOUT}.multi_turn.max_user_turns",
            f"{ROLLOUT}.multi_turn.max_turns",
            f"{ROLLOUT}.agent.default_agent_loop",
        ),
        ("rollout.env.path", "rollout.env.max_turns", "rollout.agent.path"),
        data.convert_turns,
        "an environment of yours, or an agent",
    ),
    missing(
        (f"{ROLLOUT}.multi_turn.interaction_config_path",),
        "the user's turns come from an environment of yours, rollout.env",
    ),
    no_effect(
        (f"{ROLLOUT}.multi_turn.*", "data.tool_config_path", "data.function_tool_path"),
        "`rollout.env` has limits of turns, calls, seconds and bytes",
    ),
    whole(f"{ROLLOUT}.agent.num_workers", "rollout.workers"),
    missing(f"{ROLLOUT}.agent.*", "an agent is chosen by rollout.agent.path"),
)

DATA: Sequence[Row] = (
    mapped(
        "data.train_files",
        ("data.path", "data.sources"),
        data.convert_train_files,
        "JSONL or Parquet; several files have ratios",
        always=True,
    ),
    mapped("data.val_files", ("data.eval_path", "data.sources.NAME.eval_path"), data.convert_val_files, always=True),
    mapped(
        "data.val_max_samples",
        "data.eval_size",
        lambda s: {"data.eval_size": n} if (n := s.whole("data.val_max_samples") or -1) > 0 else {},
    ),
    missing("data.train_max_samples", "megarl trains on the whole file: shorten it", off=(-1, None)),
    mapped(
        "data.prompt_key",
        ("data.fields.prompt", "data.fields.answer"),
        data.convert_fields,
        "text or chat messages; the answer is `reward_model.ground_truth`",
        always=True,
    ),
    flag("data.shuffle", "data.shuffle", always=True),
    whole("data.seed", "seed", "one seed for everything"),
    below("data.apply_chat_template_kwargs", "data.chat_template_kwargs", "variables of the chat template"),
    missing(
        ("data.custom_cls.path", "data.sampler.class_path", "data.datagen.path"),
        "rows come from files: write what the class makes",
    ),
    no_effect(
        (
            "data.custom_cls.name",
            "data.sampler.*",
            "data.datagen.*",
            "data.image_*",
            "data.video_key",
            "data.audio_key",
        ),
        "of a class, or of images, videos and sounds, which megarl does not read",
    ),
    no_effect("data.trust_remote_code", "`model.trust_remote_code`"),
    no_effect(
        (
            "data.reward_fn_key",
            "data.return_*",
            "data.filter_overlong_prompts_workers",
            "data.dataloader_num_workers",
            "data.use_shm",
            "data.validation_shuffle",
            "data.mm_processor_kwargs.*",
        ),
        "without effect on results",
    ),
    mapped(
        "trainer.save_freq",
        "checkpoint.every",
        lambda s: data.convert_frequency(s, "trainer.save_freq", "checkpoint.every"),
        "-1 is 0; megarl: 20 by default",
        always=True,
    ),
    mapped(
        "trainer.test_freq",
        "trainer.eval_every",
        lambda s: data.convert_frequency(s, "trainer.test_freq", "trainer.eval_every"),
        "-1 is 0",
        always=True,
    ),
    mapped(
        tuple(f"{ROLLOUT}.val_kwargs.{name}" for name in ("n", "do_sample", "temperature")),
        "eval.samples",
        data.convert_val_samples,
        "one is greedy, several are sampled as in training",
    ),
    missing(
        (f"{ROLLOUT}.val_kwargs.top_p", f"{ROLLOUT}.val_kwargs.top_k"),
        "evaluation samples from the full distribution, or greedily",
        off=(1, 1.0, -1),
    ),
    missing(
        "trainer.val_before_train", "megarl evaluates before the first step if there are held-out rows", off=(True,)
    ),
    missing("trainer.val_only", "`megarl eval` evaluates a model"),
    whole("trainer.max_actor_ckpt_to_keep", "checkpoint.keep_last", "megarl: 2 by default"),
    flag(f"{ACTOR}.checkpoint.async_save", "checkpoint.asynchronous", "on by default"),
    mapped(
        f"{ACTOR}.checkpoint.save_contents",
        "checkpoint.hf",
        data.convert_save_contents,
        "hf_model: also in Hugging Face format; everything else is always saved",
    ),
    no_effect(f"{ACTOR}.checkpoint.*", "a checkpoint has all that a run needs"),
    no_effect(
        ("trainer.resume_mode", "trainer.resume_from_path"),
        "an option of the command: `--resume auto`, a step or a folder; default: no resumption",
    ),
    mapped(
        ("trainer.default_local_dir", "trainer.project_name", "trainer.experiment_name"),
        "run_dir",
        data.convert_run_dir,
        "checkpoints, logs, rollouts and model of a run",
        always=True,
    ),
    mapped(
        "trainer.logger",
        ("tracking.tensorboard", "tracking.wandb.project", "tracking.wandb.name"),
        data.convert_logger,
        "metrics.jsonl is always written; the project and the name are those of Weights & Biases",
        always=True,
    ),
    missing("trainer.device", "GPUs of NVIDIA, or the CPU", off=("cuda",)),
    number("actor_rollout_ref.nccl_timeout", "trainer.timeout_seconds"),
    no_effect(
        (
            "trainer.log_val_generations",
            "trainer.rollout_data_dir",
            "trainer.validation_data_dir",
            "trainer.max_critic_ckpt_to_keep",
            "trainer.default_hdfs_dir",
            "trainer.del_local_ckpt_after_load",
            "trainer.ray_wait_register_center_timeout",
            "trainer.use_legacy_worker_impl",
            "trainer.esi_redundant_time",
            "trainer.remove_previous_ckpt_in_save",
        ),
        "completions are in `<run_dir>/rollouts`, and a checkpoint is one of all models",
    ),
    no_effect(("ray_kwargs.*", "ray_init.*"), "of Ray; see `megarl launch`"),
)
