"""slime's arguments, with those of Megatron and SGLang that its scripts give, and what they are in megarl."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from megarl.config.megatron import Part
from megarl.importing.slime import argument_values as run
from megarl.importing.tables import (
    Difference,
    PeerTable,
    Row,
    Setting,
    Settings,
    flag,
    mapped,
    missing,
    no_effect,
    number,
    refused,
    text,
    whole,
)

DEFAULTS: Mapping[str, object] = {
    "--actor-num-gpus-per-node": 8,
    "--actor-num-nodes": 1,
    "--adam-beta1": 0.9,
    "--adam-beta2": 0.999,
    "--adam-eps": 1e-8,
    "--advantage-estimator": "grpo",
    "--attention-dropout": 0.1,
    "--clip-grad": 1.0,
    "--entropy-coef": 0.0,
    "--eps-clip": 0.2,
    "--gamma": 1.0,
    "--hidden-dropout": 0.1,
    "--input-key": "input",
    "--kl-coef": 0.0,
    "--kl-loss-coef": 0.0,
    "--kl-loss-type": "k1",
    "--lambd": 1.0,
    "--loss-type": "policy_loss",
    "--lr": 1e-6,
    "--lr-decay-style": "linear",
    "--micro-batch-size": 1,
    "--min-lr": 0.0,
    "--n-samples-per-eval-prompt": 1,
    "--n-samples-per-prompt": 1,
    "--num-gpus-per-node": 8,
    "--rollout-function-path": "slime.rollout.sglang_rollout.generate_rollout",
    "--rollout-num-gpus-per-engine": 1,
    "--rollout-seed": 42,
    "--rollout-temperature": 1.0,
    "--rollout-top-k": -1,
    "--rollout-top-p": 1.0,
    "--seed": 1234,
    "--tis-clip": 2.0,
    "--tis-clip-low": 0,
    "--update-weights-interval": 1,
    "--value-clip": 0.2,
    "--weight-decay": 0.01,
}
"""Defaults of slime/utils/arguments.py, and of Megatron where results depend on them."""

MODEL_FIELDS = (
    "--moe-token-dispatcher-type",
    "--moe-permute-fusion",
    "--moe-router-dtype",
    "--moe-router-bias-update-rate",
    "--moe-z-loss-coeff",
    "--moe-shared-expert-overlap",
    "--moe-router-fusion",
    "--moe-flex-dispatcher-backend",
    "--deterministic-mode",
    "--fp8-recipe",
    "--fp8-param-gather",
    "--cp-comm-type",
)
DDP_FIELDS = ("--overlap-grad-reduce", "--overlap-param-gather")
OPTIMIZER_FIELDS = (
    "--optimizer-cpu-offload",
    "--optimizer-offload-fraction",
    "--overlap-cpu-optimizer-d2h-h2d",
    "--use-precision-aware-optimizer",
)


def _fields(part: Part, keys: Sequence[str]) -> list[Row]:
    """Return a row for each argument that is a field of one of megatron-core's configurations."""
    return [
        mapped(
            key,
            f"trainer.megatron.{part}.{key.removeprefix('--').replace('-', '_')}",
            lambda s, key=key: run.convert_field(s, part, key),  # type: ignore[misc]
        )
        for key in keys
    ]


OPTIMIZER_NUMBERS = (
    ("--lr", "lr", ""),
    ("--weight-decay", "weight_decay", "Megatron: 0.01 by default; megarl: 0"),
    ("--adam-beta1", "beta1", ""),
    ("--adam-beta2", "beta2", "Megatron: 0.999 by default; megarl: 0.95"),
    ("--clip-grad", "clip_grad", ""),
)

MICRO_BATCH = mapped(
    ("--use-dynamic-batch-size", "--max-tokens-per-gpu", "--micro-batch-size"),
    "trainer.max_tokens_per_micro_batch",
    run.convert_micro_batch,
    "always packed, up to a number of tokens over all context-parallel ranks",
    always=True,
)
PROMPT_DATA = mapped("--prompt-data", "data.path", run.convert_prompt_data, run.SLICES, always=True)
TOOLS = text("--tool-key", "data.fields.tools", "tools in both")
SHUFFLE = mapped(
    "--rollout-shuffle", "data.shuffle", lambda s: {"data.shuffle": s.flag("--rollout-shuffle")}, always=True
)
SEED = mapped("--seed", "seed", lambda s: {"seed": s.whole("--seed")}, "one seed for everything")

BATCHES: Sequence[Row] = (
    mapped(
        ("--rollout-batch-size", "--n-samples-per-prompt", "--global-batch-size", "--num-steps-per-rollout"),
        ("algorithm.prompts_per_step", "algorithm.group_size", "algorithm.num_mini_batches"),
        run.convert_batch,
        "`--rollout-batch-size` counts prompts, `--global-batch-size` completions: `num_mini_batches` is "
        "rollout_batch_size * n_samples_per_prompt / global_batch_size",
        always=True,
    ),
    mapped(
        ("--num-rollout", "--num-epoch"),
        "trainer.steps",
        run.convert_steps,
        "epochs are not counted; the data is repeated",
        always=True,
    ),
    MICRO_BATCH,
    no_effect("--log-probs-max-tokens-per-gpu", "one limit of tokens for all passes"),
    no_effect(("--balance-data", "--balance-by-flops"), "always, by FLOPs"),
    whole("--rollout-max-response-len", "rollout.max_new_tokens"),
    whole("--rollout-max-prompt-len", "data.max_prompt_tokens", "longer prompts are an error, or dropped"),
    missing("--rollout-max-context-len", "prompts and completions have limits of their own"),
    missing(
        "--over-sampling-batch-size",
        "`dapo` samples batches of prompts_per_step until a step is full; no more is sampled than is needed",
    ),
    no_effect(("--data-pad-size-multiplier", "--seq-length"), "sequences are packed"),
)

LOSS: Sequence[Row] = (
    refused(
        "--loss-type",
        "write a loss of yours as an algorithm of yours, algorithm.type; a run with sft_loss becomes one of megarl sft",
        off=("policy_loss", "sft_loss"),
    ),
    mapped(
        (
            "--advantage-estimator",
            "--disable-grpo-std-normalization",
            "--normalize-advantages",
            "--disable-rewards-normalization",
        ),
        ("algorithm.type", "algorithm.whiten", "algorithm.whiten_unbiased"),
        run.convert_type,
        "reinforce_plus_plus is `reinforce_pp`; grpo without division by the standard deviation is `dr_grpo`; grpo "
        "with the filter check_reward_nonzero_std is `dapo`",
        always=True,
    ),
    mapped(
        "--dynamic-sampling-filter-path",
        ("algorithm.type", "data.difficulty"),
        run.convert_filter,
        "check_reward_nonzero_std is `dapo`, or a range of pass rates",
    ),
    mapped(
        ("--eps-clip", "--eps-clip-high"),
        ("algorithm.clip_ratio_low", "algorithm.clip_ratio_high"),
        run.convert_clip,
        "`--eps-clip` alone is both; `cispo` has no lower bound",
        always=True,
    ),
    mapped("--eps-clip-c", "algorithm.dual_clip", run.convert_dual_clip, "none by default in both", always=True),
    mapped(
        "--calculate-per-token-loss",
        "algorithm.aggregation",
        lambda s: {
            "algorithm.aggregation": "token-mean" if s.flag("--calculate-per-token-loss") else "seq-mean-token-mean"
        },
        "`token-mean` with it, else `seq-mean-token-mean`",
        always=True,
    ),
    mapped(
        ("--use-kl-loss", "--kl-loss-coef", "--kl-loss-type", "--use-unbiased-kl"),
        "algorithm.kl_loss",
        run.convert_kl_loss,
        "a section, or null; low_var_kl is `k3`, whose largest value slime limits to 10; there is no k1",
        always=True,
    ),
    mapped(
        "--kl-coef",
        "algorithm.kl_reward",
        run.convert_kl_reward,
        "its kind is `--kl-loss-type`; slime ignores it with grpo, gspo and cispo",
        always=True,
    ),
    number("--entropy-coef", "algorithm.entropy_coefficient", always=True),
    mapped(
        ("--gamma", "--lambd"),
        ("algorithm.gamma", "algorithm.lam"),
        run.convert_returns,
        "only where the estimator has them",
        always=True,
    ),
    mapped(
        ("--use-tis", "--tis-clip", "--tis-clip-low", "--custom-tis-function-path"),
        "algorithm.rollout_is",
        run.convert_correction,
        "`token_tis`; icepop_function is `icepop`; weights have no lower bound",
        always=True,
    ),
    missing("--use-rollout-logprobs", "megarl always computes the old log-probabilities itself; see `rollout_is`"),
    missing(
        ("--use-opsm", "--opsm-delta"), "no masking of off-policy sequences with a negative advantage", off=(1e-4,)
    ),
    no_effect("--get-mismatch-metrics", "always measured"),
    refused(
        ("--use-opd", "--opd-type"),
        "megarl has on-policy distillation as algorithm.type: distillation, whose advantage is log pi_teacher - log pi "
        "alone; write that configuration by hand",
    ),
    no_effect(("--opd-*",), "distillation is off"),
    mapped(
        ("--value-clip", "--num-critic-only-steps"),
        ("algorithm.critic.clip", "algorithm.critic.warmup_steps", "algorithm.critic.optimizer"),
        run.convert_critic,
        "slime's critic has the policy's optimizer, and a loss of twice megarl's",
        always=True,
    ),
    missing(
        (
            "--custom-loss-function-path",
            "--custom-advantage-function-path",
            "--custom-pg-loss-reducer-function-path",
            "--custom-reward-post-process-path",
            "--custom-convert-samples-to-train-data-path",
        ),
        "`algorithm.type` takes the import path of an algorithm of yours",
    ),
    missing(
        ("--ref-update-interval", "--reset-optimizer-states", "--keep-old-actor", "--use-stateless-adam"),
        "the reference model is constant, and so is the optimizer",
    ),
    no_effect(
        ("--disable-compute-advantages-and-returns", "--use-rollout-entropy", "--recompute-loss-function"),
        "without effect on the result of a policy loss",
    ),
)

OPTIMIZER: Sequence[Row] = (
    mapped("--hf-checkpoint", "model.path", run.convert_model_path, "used by trainer and engines", always=True),
    no_effect(
        ("--ref-load", "--ref-ckpt-step", "--load", "--ckpt-step", "--no-load-*", "--finetune", "--model-name"),
        "models are read from Hugging Face format without conversion; the reference is the initial policy",
    ),
    *(number(key, f"trainer.optimizer.{name}", note, always=True) for key, name, note in OPTIMIZER_NUMBERS),
    number("--adam-eps", "trainer.optimizer.eps"),
    number("--min-lr", "trainer.optimizer.min_lr"),
    mapped(
        "--lr-decay-style", "trainer.optimizer.decay", run.convert_decay, "Megatron: linear by default", always=True
    ),
    mapped(
        ("--lr-warmup-iters", "--lr-warmup-fraction"),
        "trainer.optimizer.warmup_steps",
        run.convert_warmup,
        "both count optimizer steps",
    ),
    missing(("--lr-decay-iters", "--lr-wsd-*", "--lr-warmup-init"), "the decay ends with the run"),
    mapped(
        ("--optimizer", "--sgd-momentum"),
        ("trainer.optimizer.type", "trainer.optimizer.kwargs"),
        run.convert_optimizer_type,
        "adam, sgd, or a class of yours",
    ),
    *(
        mapped(key, f"trainer.parallel.{name}", lambda s, key=key: run.convert_size(s, key))  # type: ignore[misc]
        for key, name in run.SIZES.items()
    ),
    *(whole(key, f"trainer.parallel.{name}") for key, name in run.STAGES.items()),
    mapped(
        "--sequence-parallel",
        "trainer.parallel.sequence_parallel",
        run.convert_sequence_parallel,
        "on by default if tp > 1",
        always=True,
    ),
    missing(
        ("--virtual-pipeline-model-parallel-size", "--num-layers-per-virtual-pipeline-stage"),
        "set `trainer.parallel.vpp`, the stages per rank",
    ),
    mapped(
        (
            "--recompute-granularity",
            "--recompute-method",
            "--recompute-num-layers",
            "--recompute-modules",
            "--recompute-activations",
        ),
        (
            "trainer.recompute.granularity",
            "trainer.recompute.method",
            "trainer.recompute.layers",
            "trainer.recompute.modules",
        ),
        run.convert_recompute,
        "in this order",
    ),
    mapped(
        ("--moe-aux-loss-coeff", "--moe-router-load-balancing-type"),
        ("trainer.moe.aux_loss_coeff", "trainer.moe.aux_loss_scope"),
        run.convert_aux_loss,
        "a mean over tokens; aux_loss is `micro_batch`, seq_aux_loss `sequence`, global_aux_loss `global_batch`",
    ),
    mapped(
        ("--use-rollout-routing-replay", "--use-routing-replay"),
        "trainer.moe.router_replay",
        run.convert_router_replay,
        "`R3`, `R2`",
    ),
    mapped(
        "--moe-enable-deepep",
        ("trainer.megatron.model.moe_token_dispatcher_type", "trainer.megatron.model.moe_flex_dispatcher_backend"),
        lambda s: (
            {
                "trainer.megatron.model.moe_token_dispatcher_type": "flex",
                "trainer.megatron.model.moe_flex_dispatcher_backend": "deepep",
            }
            if s.flag("--moe-enable-deepep")
            else {}
        ),
    ),
    *_fields("model", MODEL_FIELDS),
    *_fields("ddp", DDP_FIELDS),
    *_fields("optimizer", OPTIMIZER_FIELDS),
    mapped(
        ("--fp8-format",),
        "trainer.megatron.model.fp8",
        lambda s: {"trainer.megatron.model.fp8": s.text("--fp8-format")},
    ),
    mapped("--bf16", "model.dtype", lambda s: {"model.dtype": "bfloat16"} if s.flag("--bf16") else {}),
    missing(("--fp16",), "megarl trains in bfloat16 or float32"),
    mapped(
        "--offload-train",
        ("trainer.offload.optimizer", "trainer.offload.gradients", "trainer.offload.weights"),
        lambda s: {
            f"trainer.offload.{name}": s.flag("--offload-train") for name in ("optimizer", "gradients", "weights")
        },
        "one key each for optimizer, gradients and weights",
    ),
    missing(
        ("--attention-dropout", "--hidden-dropout"),
        "megarl trains without dropout",
        off=(0, 0.0),
    ),
    missing(
        ("--enable-mtp-training", "--mtp-*"),
        "layers for multi-token prediction are kept as they are and not trained",
    ),
    missing(("--only-train-params-name-list", "--freeze-params-name-list"), "all weights are trained"),
    mapped(
        "--distributed-timeout-minutes",
        "trainer.timeout_seconds",
        lambda s: {"trainer.timeout_seconds": 60 * (s.number("--distributed-timeout-minutes") or 10)},
    ),
    no_effect(
        (
            "--accumulate-allreduce-grads-in-fp32",
            "--attention-softmax-in-fp32",
            "--use-distributed-optimizer",
            "--attention-backend",
            "--log-probs-chunk-size",
            "--qwen-gdn-backend",
            "--no-gradient-accumulation-fusion",
            "--no-masked-softmax-fusion",
            "--no-check-for-nan-in-loss-and-grad",
            "--no-rope-fusion",
            "--transformer-impl",
            "--train-backend",
            "--megatron-to-hf-mode",
            "--distributed-backend",
            "--allgather-cp",
            "--manual-gc*",
            "--train-memory-margin-bytes",
            "--disable-bf16-reduced-precision-matmul",
            "--megatron-deepgemm-*",
        ),
        "gradients are in float32, and megarl chooses kernels",
    ),
    no_effect(
        (
            "--spec",
            "--num-layers",
            "--hidden-size",
            "--ffn-hidden-size",
            "--num-attention-heads",
            "--num-query-groups",
            "--group-query-attention",
            "--kv-channels",
            "--swiglu",
            "--normalization",
            "--norm-epsilon",
            "--rotary-*",
            "--use-rotary-*",
            "--use-rope-scaling",
            "--no-rope-*",
            "--no-position-embedding",
            "--post-*-layernorm",
            "--position-embedding-type",
            "--max-position-embeddings",
            "--original-max-position-embeddings",
            "--vocab-size",
            "--padded-vocab-size",
            "--make-vocab-size-divisible-by",
            "--untie-embeddings-and-output-weights",
            "--disable-bias-linear",
            "--add-*-bias",
            "--qk-*",
            "--q-lora-rank",
            "--kv-lora-rank",
            "--v-head-dim",
            "--mscale*",
            "--multi-latent-attention",
            "--apply-layernorm-1p",
            "--attention-output-gate",
            "--use-gated-attention",
            "--linear-*",
            "--num-experts",
            "--moe-*",
            "--beta-fast",
            "--beta-slow",
            "--enable-experimental",
        ),
        "the architecture is that of config.json",
    ),
)

USER_CODE = missing(
    (
        "--buffer-filter-path",
        "--rollout-sample-filter-path",
        "--rollout-all-samples-process-path",
        "--rollout-data-postprocess-path",
        "--rollout-sample-hook-path",
        "--data-source-path",
        "--eval-function-path",
        "--custom-model-provider-path",
        "--custom-megatron-*",
        "--custom-config-path",
        "--megatron-config-path",
    ),
    "no such function or file of the user's",
)

ENGINES: Sequence[Row] = (
    mapped(
        (
            "--actor-num-nodes",
            "--actor-num-gpus-per-node",
            "--rollout-num-gpus",
            "--rollout-num-gpus-per-engine",
            "--num-gpus-per-node",
            "--colocate",
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
        "engines without `--colocate` have a pool of their own",
        always=True,
    ),
    mapped(
        ("--update-weights-interval", run.ENTRY_KEY, "--rollout-function-path"),
        "schedule.type",
        run.convert_schedule,
        "train_async.py is `one_step_off`; the rollout function of its example fully_async is `async`",
        always=True,
    ),
    missing("--partial-rollout", "with schedule.type: async and update: abort, unfinished requests are continued"),
    no_effect("--mask-offpolicy-in-partial-rollout", "of partial rollouts; see `schedule.max_staleness`"),
    number("--sglang-mem-fraction-static", "rollout.engine.mem_fraction"),
    whole("--sglang-max-running-requests", "rollout.engine.max_running_requests"),
    flag("--sglang-enable-fp32-lm-head", "model.fp32_lm_head", "trainer and engines"),
    no_effect(
        (
            "--sglang-server-concurrency",
            "--sglang-router-*",
            "--sglang-log-level*",
            "--sglang-watchdog-timeout",
            "--sglang-cuda-graph-*",
            "--sglang-decode-log-interval",
            "--use-slime-router",
            "--slime-router-*",
        ),
        "without effect on results, or chosen by megarl",
    ),
    missing("--sglang-config", "engines of several kinds are not configured by a file"),
    mapped(
        "--sglang-*",
        "rollout.engine.extra_args",
        run.convert_engine_options,
        "arguments of SGLang by its own names",
    ),
    number("--rollout-temperature", "rollout.sampling.temperature", always=True),
    missing(
        ("--rollout-top-p", "--rollout-top-k"),
        "megarl samples from the full distribution, to which ratios refer",
        off=(1, 1.0, -1),
    ),
    missing(
        ("--rollout-stop", "--rollout-stop-token-ids"),
        "completions end at the end-of-sequence tokens of the model's folder: add them to generation_config.json",
    ),
    no_effect(("--rollout-skip-special-tokens",), "tokens are kept as they were sampled"),
    flag("--offload-rollout", "rollout.engine.release_memory", "on by default on GPUs that engines share"),
    whole("--update-weight-buffer-size", "weight_sync.bucket_bytes"),
    mapped(
        "--update-weight-mode",
        "weight_sync.delta",
        lambda s: {"weight_sync.delta": s.text("--update-weight-mode") == "delta"},
        "delta: only elements that changed are sent",
    ),
    no_effect(
        ("--update-weight-*", "--custom-update-weight-*", "--check-weight-update-equal", "--release-train"),
        "weights go from GPU to GPU; see `weight_sync.verify`",
    ),
    mapped(
        ("--rm-type", "--custom-rm-path", "--rm-url", "--group-rm"),
        "reward.terms.NAME",
        run.convert_rewards,
        "math, dapo and deepscaler are `type: math`; a function is `type: python`, with `per: group` for `--group-rm`; "
        "a service is `type: http`",
        always=True,
    ),
    no_effect(("--reward-key", "--eval-reward-key"), "the key is `reward`; other keys are logged"),
    mapped(
        "--custom-generate-function-path",
        "rollout.agent.path",
        run.convert_turns,
        "`run(episode)` instead of `generate(args, sample, sampling_params)`",
    ),
    USER_CODE,
    no_effect(
        ("--use-fault-tolerance", "--rollout-health-check-*"),
        "always; see `recovery.engine_stall_seconds`",
    ),
    missing(
        ("--rollout-external-engine-addrs", "--prefill-num-servers"),
        "megarl starts the engines itself, and does not disaggregate prefill",
    ),
)

DATA: Sequence[Row] = (
    PROMPT_DATA,
    text("--input-key", "data.fields.prompt", "slime: input", always=True),
    text("--label-key", "data.fields.answer"),
    no_effect("--metadata-key", "rewards and environments read all columns of a row"),
    TOOLS,
    missing("--multimodal-keys", "prompts are texts"),
    mapped(
        "--apply-chat-template",
        "data.chat_template",
        lambda s: {"data.chat_template": "always" if s.flag("--apply-chat-template") else "never"},
        "`always` with it, else `never`",
        always=True,
    ),
    mapped(
        "--apply-chat-template-kwargs",
        "data.chat_template_kwargs",
        run.convert_template_kwargs,
        "variables of the chat template, an object of JSON",
    ),
    SHUFFLE,
    SEED,
    no_effect("--rollout-seed", "`seed` is for everything"),
    mapped(
        "--eval-prompt-data",
        ("data.eval_path", "data.eval_size"),
        run.convert_eval_data,
        "one file; slime takes pairs of a name and a path. `@[:N]` at its end is `data.eval_size`",
    ),
    whole("--eval-interval", "trainer.eval_every"),
    mapped(
        ("--n-samples-per-eval-prompt", "--eval-temperature"),
        "eval.samples",
        run.convert_eval_sampling,
        "one completion is greedy; several are sampled as in training",
    ),
    missing(
        (
            "--eval-config",
            "--eval-max-response-len",
            "--eval-max-prompt-len",
            "--eval-max-context-len",
            "--eval-min-new-tokens",
            "--eval-top-k",
            "--eval-top-p",
            "--eval-input-key",
            "--eval-label-key",
            "--eval-tool-key",
        ),
        "evaluation has the limits, fields and sampling of training",
        off=(1, 1.0, -1),
    ),
    no_effect("--skip-eval-before-train", "a run evaluates once before it trains, if it has held-out rows"),
    whole("--save-interval", "checkpoint.every"),
    refused(
        ("--debug-rollout-only", "--debug-train-only", "--load-debug-rollout-data", "--load-forge-rollout-data"),
        "the run only generates, or only trains on recorded rollouts; see `megarl replay`",
    ),
)

RUN: Sequence[Row] = (
    mapped("--save", "run_dir", run.convert_run_dir, "checkpoints, logs, rollouts and model of a run", always=True),
    flag("--async-save", "checkpoint.asynchronous", "on by default"),
    mapped(
        "--save-hf",
        "checkpoint.hf",
        lambda s: {"checkpoint.hf": True},
        "a switch; the final model is always exported",
    ),
    missing("--no-save-optim", "checkpoints have all that a run needs to resume"),
    mapped(
        ("--use-wandb", "--wandb-project", "--wandb-group"),
        ("tracking.wandb.project", "tracking.wandb.name"),
        run.convert_wandb,
    ),
    flag("--use-tensorboard", "tracking.tensorboard"),
    no_effect(
        (
            "--wandb-*",
            "--disable-wandb-random-suffix",
            "--tb-*",
            "--tensorboard-*",
            "--log-*",
            "--dump-details",
            "--save-debug-*",
            "--use-pytorch-profiler",
            "--profile*",
            "--memory-*",
            "--record-memory-history",
            "--train-env-vars",
            "--http-proxy",
            "--use-distributed-post",
            "--ci-*",
            "--rollout-data-transport",
            "--start-rollout-id",
            "--disable-rollout-global-dataset",
            "--custom-*-log-function-path",
        ),
        "logs, profiles and transport",
    ),
)

SFT: Sequence[Row] = (
    mapped(
        ("--rollout-batch-size", "--n-samples-per-prompt", "--global-batch-size", "--num-steps-per-rollout"),
        "trainer.batch_size",
        run.convert_sft_batch,
        "samples of an optimizer step: global_batch_size, or rollout_batch_size / num_steps_per_rollout",
        always=True,
    ),
    mapped(
        ("--num-rollout", "--num-epoch"),
        "trainer.steps",
        run.convert_sft_steps,
        "optimizer steps: rollouts * rollout_batch_size / global_batch_size; epochs are not counted",
        always=True,
    ),
    mapped("--save-interval", "checkpoint.every", run.convert_sft_save_interval, "optimizer steps"),
    MICRO_BATCH,
    whole("--actor-num-nodes", "placement.nodes", always=True),
    whole("--actor-num-gpus-per-node", "placement.slots_per_node", always=True),
    PROMPT_DATA,
    text("--input-key", "data.fields.messages", "slime: input", always=True),
    TOOLS,
    SHUFFLE,
    SEED,
    mapped(
        "--rollout-function-path",
        (),
        run.convert_sft_function,
        "slime.rollout.sft_rollout.generate_rollout; rows of a file are trained on",
        always=True,
    ),
    mapped(
        "--calculate-per-token-loss",
        (),
        run.convert_sft_loss,
        "always: the mean over the tokens of a step",
        always=True,
    ),
    no_effect("--loss-type", "the loss of megarl sft"),
    no_effect(
        "--loss-mask-type", "tokens to train on are found by rendering each turn with the chat template of the model"
    ),
    no_effect(("--apply-chat-template", "--apply-chat-template-kwargs"), "slime's masks do not depend on them"),
    missing("--multimodal-keys", "conversations are texts"),
    missing(
        "--custom-convert-samples-to-train-data-path", "write what the function makes as rows of the file data.path"
    ),
    USER_CODE,
    refused(
        ("--debug-rollout-only", "--load-debug-rollout-data", "--load-forge-rollout-data"),
        "the run only generates, or only trains on recorded rollouts",
    ),
    no_effect(
        ("--debug-train-only", "--offload-train", "--use-rollout-routing-replay", "--use-routing-replay"),
        "there are no engines",
    ),
    no_effect(("--eval-*", "--n-samples-per-eval-prompt"), "slime's SFT does not evaluate; see `data.eval_path`"),
)


def _keys(rows: Sequence[Row]) -> list[str]:
    return [key for row in rows for key in row.keys]


SFT_OPTIMIZER = [row for row in OPTIMIZER if not set(row.keys) & set(_keys(SFT))]

ONLY_SAMPLED = no_effect(
    [key for key in _keys([*LOSS, *BATCHES, *ENGINES, *DATA]) if key not in _keys([*SFT, *SFT_OPTIMIZER, *RUN])],
    "only read where a policy samples what it is trained on",
)


def _without_dropout(s: Settings) -> bool:
    return any(s.number(key) for key in ("--attention-dropout", "--hidden-dropout"))


LINEAR_DECAY = Difference(
    text="The learning-rate schedule counts optimizer steps in both; Megatron's default is linear decay to --min-lr "
    "over the run.",
    applies=lambda s: not s.is_given("--lr-decay-style"),
)
DROPOUT = Difference(
    text="slime trains with Megatron's dropout of 0.1 where --attention-dropout and --hidden-dropout are not 0; megarl "
    "has none.",
    applies=_without_dropout,
)
DIFFERENCES: Sequence[Difference] = (
    Difference(
        text="--global-batch-size counts completions; algorithm.num_mini_batches is a number of mini-batches, and the "
        "completions of a prompt stay together.",
    ),
    Difference(
        text="Aggregation: seq-mean-token-mean is slime's mean of each sample's mean, over ranks and micro-batches.",
        applies=lambda s: not s.flag("--calculate-per-token-loss"),
    ),
    LINEAR_DECAY,
    Difference(
        text="slime loads a reference model with --use-kl-loss and a coefficient of 0, to log the divergence; megarl "
        "loads none.",
        applies=lambda s: s.flag("--use-kl-loss") and not s.number("--kl-loss-coef"),
    ),
    Difference(
        text="slime ignores --kl-coef with grpo, gspo and cispo: kl_reward is null.",
        applies=lambda s: (
            bool(s.number("--kl-coef")) and (s.text(run.ESTIMATOR) or "grpo") in ("grpo", "gspo", "cispo")
        ),
    ),
    Difference(
        text="The critic's loss is half of slime's, which Adam does not notice; the limit of the gradient norm does.",
        applies=lambda s: s.text(run.ESTIMATOR) == "ppo",
    ),
    Difference(
        text="slime computes GAE over tool outputs between turns, too; megarl skips tokens that were not sampled.",
        applies=lambda s: s.text(run.ESTIMATOR) == "ppo" and s.is_given("--custom-generate-function-path"),
    ),
    DROPOUT,
    Difference(
        text="--sglang-mem-fraction-static was copied to rollout.engine.mem_fraction, a share of the memory that is "
        "free when the engine starts: remove it to let megarl compute it.",
        applies=lambda s: s.is_given("--sglang-mem-fraction-static"),
    ),
    Difference(
        text="A reward function is called as score(trajectory, text, row) instead of custom_rm(args, sample): change "
        "its arguments. Its module needs to be importable where the run starts.",
        applies=lambda s: s.is_given("--custom-rm-path"),
    ),
    Difference(
        text="A run compares log-probabilities of engine and trainer at every step and stops if they disagree, see "
        "limits.",
    ),
    Difference(text="A run does not resume by itself: use `megarl train CONFIG --resume auto`."),
)

SFT_DIFFERENCES: Sequence[Difference] = (
    Difference(
        text="Thoughts of earlier turns: slime renders each message by itself, which keeps them. megarl renders a turn "
        "after those before it, as generation does: where the template rewrites earlier turns, a row becomes several "
        "samples, which trainer.batch_size counts.",
        applies=lambda s: s.text("--loss-mask-type") != "distill_qwen",
    ),
    Difference(
        text="slime with distill_qwen trains on the last message after the first one, and leaves out those between "
        "them; megarl trains on all turns of the assistant after all messages before them. Set weight: 0 in turns "
        "that are not to be trained on.",
        applies=lambda s: s.text("--loss-mask-type") == "distill_qwen",
    ),
    Difference(
        text="slime also trains on what the template writes after the end of a turn, such as a line break; in megarl a "
        "turn ends with the token that ends generation.",
        applies=lambda s: s.text("--loss-mask-type") != "distill_qwen",
    ),
    Difference(
        text="slime reads tools from the column --tool-key, else from `tools` in the column --metadata-key: set "
        "data.fields.tools: metadata.tools for these.",
        applies=lambda s: not s.is_given("--tool-key"),
    ),
    Difference(
        text="slime trains on conversations of any length. megarl refuses rows longer than the model's context, or "
        "leaves them out with data.overlong_prompts: drop.",
    ),
    Difference(
        text="A step has trainer.batch_size samples; --save-interval and --num-rollout count rollouts, which are "
        "rollout_batch_size samples: they were multiplied by the optimizer steps of a rollout.",
        applies=lambda s: run.batch(s)[2] > 1,
    ),
    LINEAR_DECAY,
    DROPOUT,
    Difference(text="A run does not resume by itself: use `megarl sft CONFIG --resume auto`."),
)

SLIME_RL = PeerTable(
    name="slime",
    repository="https://github.com/THUDM/slime",
    versions="0.3.1, August 2026, commit `624b824a898a`",
    topics={
        "Batches and lengths": BATCHES,
        "Loss and algorithm": LOSS,
        "Optimizer, parallelism, memory": OPTIMIZER,
        "Engines, schedule, rewards, agents": ENGINES,
        "Data, checkpoints, logs": (*DATA, *RUN),
    },
    defaults=DEFAULTS,
    differences=DIFFERENCES,
)
SLIME_SFT = replace(
    SLIME_RL,
    command="sft",
    topics={
        "Supervised fine-tuning": SFT,
        "Optimizer, parallelism, memory": SFT_OPTIMIZER,
        "Checkpoints, logs": RUN,
        "Policies": (ONLY_SAMPLED,),
    },
    differences=SFT_DIFFERENCES,
)

SLIME = replace(SLIME_RL, topics={**SLIME_RL.topics, "Supervised fine-tuning": [*SFT, ONLY_SAMPLED]})
"""The arguments of all runs, for the documentation."""


def table_of(given: Mapping[str, Setting]) -> PeerTable:
    """Return the table of a run: of supervised fine-tuning with the loss sft_loss, else of sampled completions."""
    loss = given.get("--loss-type")
    return SLIME_SFT if loss is not None and loss.value == "sft_loss" else SLIME_RL
