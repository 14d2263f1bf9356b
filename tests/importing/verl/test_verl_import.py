"""Run scripts of verl, and what they are in megarl: the values were worked out by hand from verl's documentation."""

from collections.abc import Mapping
from functools import reduce
from operator import getitem
from pathlib import Path

import pytest

from megarl.config.load import make_config
from megarl.config.run import RunConfig
from megarl.controller.preflight.run_checks import check_offline
from megarl.errors import ConfigError
from megarl.importing.conversion import PEERS, Conversion, import_run

FOLDER = Path(__file__).parent

EXPECTED: Mapping[str, Mapping[str, object]] = {
    "grpo_fsdp.sh": {
        "run_dir": "runs/gsm8k/qwen3_$(date +%m%d)",
        "model.path": "Qwen/Qwen3-8B",
        "data.path": "~/data/gsm8k/train.parquet",
        "data.fields.answer": "reward_model.ground_truth",
        "data.overlong_prompts": "drop",
        "algorithm.type": "grpo",
        "algorithm.prompts_per_step": 1024,
        "algorithm.num_mini_batches": 4,  # 1024 / 256
        "algorithm.group_size": 5,
        "algorithm.kl_loss": {"kind": "k3", "coefficient": 0.001},
        "algorithm.dual_clip": 3.0,
        "trainer.max_tokens_per_micro_batch": 24576,  # 16 samples of 512 + 1024 tokens
        "trainer.optimizer.weight_decay": 0.01,
        "trainer.optimizer.beta2": 0.999,
        "trainer.recompute.granularity": "full",
        "trainer.eval_every": 5,
        "rollout.tp": 2,
        "rollout.replicas": 4,  # 8 GPUs / 2
        "rollout.engine.mem_fraction": 0.6,
        "reward.terms.accuracy.type": "math",
        "checkpoint.every": 20,
        "tracking.wandb.project": "gsm8k",
    },
    "ppo_reward_model_megatron.sh": {
        "run_dir": "/checkpoints/hh",
        "algorithm.type": "ppo",
        "algorithm.lam": 0.95,
        "algorithm.whiten_unbiased": True,
        "algorithm.kl_reward": {"kind": "k1", "coefficient": 0.02, "target": 0.05, "horizon": 10000},
        "algorithm.num_mini_batches": 4,
        "algorithm.ppo_epochs": 2,
        "algorithm.critic.warmup_steps": 5,
        "algorithm.critic.optimizer.lr": 5e-6,
        "algorithm.critic.optimizer.warmup_steps": 80,  # 10 * 4 mini-batches * 2 epochs
        "algorithm.critic.clip": 0.2,
        "algorithm.critic.path": "/models/critic",
        "algorithm.reference.parallel": {"tp": 2, "pp": 2},
        "trainer.steps": 200,
        "trainer.optimizer.warmup_steps": 160,  # 0.1 * 200 * 4 * 2
        "trainer.optimizer.clip_grad": 0.5,
        "trainer.parallel": {"tp": 4, "pp": 2},
        "trainer.max_tokens_per_micro_batch": 12000,
        "rollout.replicas": 4,
        "reward.terms.reward_model": {"type": "model", "path": "/models/reward"},
        "reward.terms.accuracy": {"type": "math", "weight": 0},
        "placement.nodes": 2,
        "tracking.tensorboard": True,
    },
    "dapo_fsdp2.sh": {
        "algorithm.type": "dapo",
        "algorithm.clip_ratio_high": 0.28,
        "algorithm.dual_clip": 10.0,
        "algorithm.max_batches": 10,
        "algorithm.overlong": {"buffer": 4096, "factor": 1.0},
        "algorithm.num_mini_batches": 16,
        "algorithm.kl_loss": None,
        "data.path": "~/verl/data/dapo-math-17k.parquet",
        "data.max_prompt_tokens": 2048,
        "rollout.max_new_tokens": 20480,
        "trainer.parallel.cp": 4,
        "trainer.max_tokens_per_micro_batch": 90112,  # (2048 + 20480) * 4
        "trainer.optimizer.warmup_steps": 160,
        "trainer.optimizer.weight_decay": 0.1,
        "eval.samples": 32,
        "placement.nodes": 16,
        "rollout.replicas": 32,
    },
    "gspo_moe_megatron.sh": {
        "model.path": "Qwen/Qwen3-235B-A22B",
        "algorithm.type": "gspo",
        "algorithm.clip_ratio_low": 3e-4,
        "algorithm.clip_ratio_high": 4e-4,
        "algorithm.aggregation": "seq-mean-token-mean",
        "trainer.parallel": {
            "tp": 4,
            "pp": 4,
            "cp": 2,
            "ep": 8,
            "etp": 1,
            "first_stage_layers": 24,
            "last_stage_layers": 22,
        },
        "trainer.max_tokens_per_micro_batch": 20480,  # 10240 * cp
        "trainer.recompute": {"granularity": "full", "method": "uniform", "layers": 1},
        "trainer.megatron.model": {
            "moe_token_dispatcher_type": "flex",
            "moe_flex_dispatcher_backend": "deepep",
            "moe_router_dtype": "fp32",
        },
        "trainer.megatron.optimizer": {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 1.0},
        "trainer.moe": {"aux_loss_coeff": 0.001, "aux_loss_scope": "micro_batch", "router_replay": "R3"},
        "trainer.offload": {"optimizer": True, "weights": True},
        "rollout.tp": 8,
        "rollout.replicas": 8,
        "rollout.engine.extra_args.ep_size": 8,
        "checkpoint.every": 50,
    },
    "rloo.sh": {
        "algorithm.type": "rloo",
        "algorithm.kl_reward": {"kind": "k3", "coefficient": 0.01},
        "algorithm.num_mini_batches": 1,
        "data.path": "$DATA_DIR/train.parquet",
        "rollout.sampling": {"temperature": 0.9},
        "rollout.replicas": 4,
    },
    "remax.sh": {
        "algorithm.type": "remax",
        "algorithm.kl_reward": None,
        "data.sources": {
            "gsm8k_train": {
                "path": "/data/gsm8k/train.parquet",
                "ratio": 0.5,
                "eval_path": "/data/gsm8k/test.parquet",
            },
            "math_train": {"path": "/data/math/train.parquet", "ratio": 0.5, "eval_path": "/data/math/test.parquet"},
        },
        "algorithm.num_mini_batches": 4,
    },
    "reinforce_pp_cosine.sh": {
        "seed": 7,
        "algorithm.type": "reinforce_pp",
        "algorithm.gamma": 0.99,
        "algorithm.whiten_unbiased": True,
        "algorithm.entropy_coefficient": 0.001,
        "algorithm.kl_reward": None,
        "trainer.optimizer": {
            "lr": 4e-6,
            "warmup_steps": 10,
            "decay": "cosine",
            "min_lr": pytest.approx(4e-7),
            "weight_decay": 0.01,
            "beta1": 0.9,
            "beta2": 0.95,
        },
        "reward.terms": {"reward": {"type": "python", "path": "my_score:score"}},
    },
    "fully_async.sh": {
        "schedule": {"type": "async", "max_staleness": 1, "lookahead": 1, "update": "abort"},
        "algorithm.prompts_per_step": 128,  # 32 * 4 updates between two syncs
        "algorithm.num_mini_batches": 4,
        "algorithm.rollout_is": {"kind": "token_tis", "high": 2.0},
        "trainer.steps": 100,  # 12800 / 128
        "placement.pools.engines": {"nodes": 1, "slots_per_node": 8},
        "placement.rollout.pool": "engines",
        "rollout.replicas": 4,
        "trainer.parallel.tp": 2,
    },
    "one_step_off.sh": {
        "schedule": {"type": "one_step_off"},
        "placement.slots_per_node": 6,
        "placement.pools.engines": {"nodes": 1, "slots_per_node": 2},
        "rollout.replicas": 1,
        "algorithm.rollout_is": None,
        "algorithm.num_mini_batches": 6,
    },
    "v1_separate_async.sh": {
        "schedule": {"type": "async", "max_staleness": 4, "late": "wait", "update": "abort"},
        "placement.pools.engines": {"nodes": 2, "slots_per_node": 8},
        "rollout.tp": 4,
        "rollout.replicas": 4,
        "rollout.engine.extra_args": {"attention_backend": "fa3", "enable_dp_attention": True},
        "trainer.parallel": {"tp": 8, "sequence_parallel": False},
        "algorithm.num_mini_batches": 4,
    },
    "multi_turn_tools.sh": {
        "algorithm.prompts_per_step": 128,  # the script, not the file
        "data.max_prompt_tokens": 1024,
        "rollout.env": {"path": "your_package.tools:Tools", "max_turns": 5},
        "algorithm.group_size": 16,
    },
    "rollout_correction_fp8.sh": {
        "algorithm.aggregation": "seq-mean-token-sum-norm",
        "algorithm.length_norm": 4096,
        "algorithm.rollout_is": {"kind": "icepop", "low": 0.5, "high": 5.0},
        "data.chat_template_kwargs": {"enable_thinking": False},
    },
    "dr_grpo_old_names.sh": {
        "algorithm.type": "dr_grpo",
        "algorithm.num_mini_batches": 3,
        "algorithm.rollout_is": {"kind": "token_tis", "high": 3.0},
        "trainer.optimizer.clip_grad": 0.3,
        "trainer.optimizer.decay": "cosine",
    },
    "cispo_docker.sh": {
        "algorithm.type": "cispo",
        "algorithm.clip_ratio_high": 0.2,
        "algorithm.kl_loss": {"kind": "k2", "coefficient": 0.001},  # the gradient of straight-through estimators
        "algorithm.num_mini_batches": 4,
    },
    "resolved_run.yaml": {
        "run_dir": "runs/p/e-p",
        "model.path": "/models/default",
        "data.eval_path": "${oc.env:VALIDATION}",
        "algorithm.type": "gmpo",
        "algorithm.clip_log_ratio_low": 0.4,
        "algorithm.group_size": 6,
        "rollout.sampling.temperature": 0.8,
        "trainer.max_tokens_per_micro_batch": 800,
        "trainer.optimizer.lr": 5e-7,
    },
}

WITHOUT_EQUIVALENT: Mapping[str, Mapping[str, str]] = {
    "grpo_fsdp.sh": {"trainer.total_epochs": "counts steps, not epochs"},
    "ppo_reward_model_megatron.sh": {"data.truncation": "never truncates"},
    "dapo_fsdp2.sh": {
        "data.truncation": "never truncates",
        "actor_rollout_ref.rollout.val_kwargs.top_p": "full distribution",
    },
    "gspo_moe_megatron.sh": {
        "actor_rollout_ref.actor.megatron.override_transformer_config.hidden_dropout": "would differ from pass to pass"
    },
    "rloo.sh": {"actor_rollout_ref.rollout.top_p": "full distribution", "trainer.logger": "no logger swanlab"},
    "remax.sh": {"actor_rollout_ref.actor.kl_loss_type": "expected gradient of k1 is 0", "data.train_files": "shares"},
    "multi_turn_tools.sh": {"actor_rollout_ref.rollout.multi_turn.tool_config_path": "write the tools"},
    "rollout_correction_fp8.sh": {
        "actor_rollout_ref.rollout.quantization": "does not quantize",
        "algorithm.rollout_correction.rollout_rs": "weights or masks",
    },
    "dr_grpo_old_names.sh": {"trainer.no_such_key": "not known", "data.train_batch_size": "become 3 mini-batches"},
    "resolved_run.yaml": {"group": "not known"},
}
"""Script -> key without an equivalent -> part of the reason."""


def imported(name: str, **variables: str) -> Conversion:
    return import_run("verl", FOLDER / name, variables)


def value_at(conversion: Conversion, key: str) -> object:
    return reduce(getitem, key.split("."), conversion.tree())  # type: ignore[arg-type]


@pytest.mark.parametrize("name", EXPECTED)
def test_a_script_becomes_the_configuration_worked_out_by_hand(name: str):
    conversion = imported(name)
    assert {key: value_at(conversion, key) for key in EXPECTED[name]} == EXPECTED[name]


@pytest.mark.parametrize("name", EXPECTED)
def test_check_offline_accepts_the_configuration(name: str):
    conversion = imported(name)
    assert not conversion.problems
    config = make_config(RunConfig, conversion.tree())
    assert "data" in check_offline(config)


@pytest.mark.parametrize("name", WITHOUT_EQUIVALENT)
def test_settings_without_an_equivalent_are_listed_with_the_reason(name: str):
    reasons = {setting.key: setting.reason for setting in imported(name).unmapped if setting.origin != "default"}
    expected = WITHOUT_EQUIVALENT[name]
    for key, part in expected.items():
        assert part in reasons[key], key


@pytest.mark.parametrize("name", [*EXPECTED])
def test_every_setting_is_a_source_of_a_value_or_listed(name: str):
    path = FOLDER / name
    given, _ = PEERS["verl"].read(path.read_text(), path, {})
    conversion = imported(name)
    listed = [*conversion.unmapped, *conversion.without_effect, *conversion.unknown]
    found = {setting.key for setting in listed} | {key for a in conversion.assignments for key in a.sources}
    assert {*given} <= found


def test_lora_and_unknown_losses_are_refused_with_file_line_and_key():
    with pytest.raises(ConfigError) as refusal:
        imported("lora.sh")
    lines = str(refusal.value).splitlines()
    assert lines == [
        "lora.sh:5: actor_rollout_ref.actor.policy_loss.loss_mode=sapo is refused: megarl has no policy loss sapo; it "
        "has vanilla, gspo, cispo, geo_mean",
        "lora.sh:4: actor_rollout_ref.model.lora_rank=32 is refused: megarl trains all weights and has no LoRA; remove "
        "the key to train all weights, with a learning rate for that",
    ]


def test_variables_of_the_environment_can_be_given():
    assert value_at(imported("rloo.sh", DATA_DIR="/d"), "data.path") == "/d/train.parquet"
    assert value_at(imported("grpo_fsdp.sh", MODEL="/m", NGPUS="4"), "placement.slots_per_node") == 4


def test_values_that_only_a_run_would_give_are_to_be_filled_in():
    unknown = {setting.key: setting.reason for setting in imported("rloo.sh").unknown}
    assert unknown == {"data.train_files": "set by $DATA_DIR", "data.val_files": "set by $DATA_DIR"}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.train_batch_size=many", "run.sh:2: data.train_batch_size needs a whole number, got 'many'"),
        ("actor_rollout_ref.rollout.n=2.5", "run.sh:2: actor_rollout_ref.rollout.n needs a whole number, got 2.5"),
        ("data.shuffle=maybe", "run.sh:2: data.shuffle needs true or false, got 'maybe'"),
        ("actor_rollout_ref.actor.optim.lr=[1]", "run.sh:2: actor_rollout_ref.actor.optim.lr needs a number, got [1]"),
        ("data.train_files=[a", "run.sh:2: data.train_files=[a is not valid: a list has no closing bracket"),
        (
            "algorithm.adv_estimator=opo",
            "run.sh:2: algorithm.adv_estimator=opo is refused: megarl has no estimator opo",
        ),
        ("actor_rollout_ref.actor.loss_agg_mode=sum", "run.sh:2: actor_rollout_ref.actor.loss_agg_mode=sum is refused"),
    ],
)
def test_a_value_of_the_wrong_type_is_one_sentence_with_file_line_and_key(override, message, tmp_path):
    path = tmp_path / "run.sh"
    path.write_text(f"python -m verl.trainer.main_ppo \\\n '{override}'\n")
    with pytest.raises(ConfigError) as refusal:
        import_run("verl", path, {})
    assert str(refusal.value).startswith(message)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        # thresholds of rejection alone are bounds of the geometric mean
        (
            "algorithm.rollout_correction.rollout_rs=seq_mean_k1 "
            "algorithm.rollout_correction.rollout_rs_threshold=0.999_1.001",
            {"kind": "geometric_mask", "low": 0.999, "high": 1.001},
        ),
        ("algorithm.rollout_correction.rollout_is=sequence", {"kind": "sequence_tis", "high": 2.0}),
        ("algorithm.rollout_is=True algorithm.rollout_is_threshold=3", {"kind": "token_tis", "high": 3.0}),
    ],
)
def test_rollout_correction(overrides, expected, tmp_path):
    path = tmp_path / "run.sh"
    path.write_text(f"python -m verl.trainer.main_ppo algorithm.adv_estimator=grpo {overrides}\n")
    assert value_at(import_run("verl", path, {}), "algorithm.rollout_is") == expected


def test_engines_on_shared_gpus_become_one_step_off_only_with_gpus_of_their_own(tmp_path):
    path = tmp_path / "run.sh"
    path.write_text("python -m recipe.one_step_off_policy.main_ppo algorithm.adv_estimator=grpo\n")
    conversion = import_run("verl", path, {})
    assert value_at(conversion, "schedule") == {"type": "async", "lookahead": 1, "max_staleness": 1}
    assert any("release their memory" in setting.reason for setting in conversion.unmapped)
