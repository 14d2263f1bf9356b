"""Run scripts of slime, and what they are in megarl: the values were worked out by hand from slime's arguments."""

from collections.abc import Mapping
from functools import reduce
from operator import getitem
from pathlib import Path

import pytest

from megarl.config.commands import STAGES
from megarl.config.load import make_config
from megarl.controller.preflight.run_checks import check_offline
from megarl.errors import ConfigError
from megarl.importing.conversion import Conversion, import_run
from tests.errors import expect_error

FOLDER = Path(__file__).parent

EXPECTED: Mapping[str, Mapping[str, object]] = {
    "dense_grpo.sh": {
        "run_dir": "/runs/dense",
        "model.path": "/models/dense-4B",
        "data.fields.answer": "label",
        "data.chat_template": "always",
        "data.chat_template_kwargs": {"enable_thinking": False},
        "data.shuffle": True,
        "algorithm.type": "grpo",
        "algorithm.prompts_per_step": 64,
        "algorithm.num_mini_batches": 4,  # 64 * 8 / 128
        "algorithm.clip_ratio_high": 0.28,
        "algorithm.aggregation": "seq-mean-token-mean",
        "algorithm.kl_loss": {"kind": "k3", "coefficient": 0.01},
        "trainer.parallel": {"tp": 2, "cp": 2},
        "trainer.max_tokens_per_micro_batch": 18432,  # 9216 on each of two context-parallel ranks
        "trainer.optimizer.beta2": 0.98,
        "rollout.tp": 2,
        "rollout.replicas": 4,
        "rollout.sampling.temperature": 0.8,
        "reward.terms.accuracy.type": "math",
    },
    "moe_multi_node.sh": {
        "algorithm.type": "gspo",
        "algorithm.clip_ratio_low": 3e-4,
        "algorithm.num_mini_batches": 4,
        "trainer.parallel": {"tp": 4, "pp": 2, "ep": 8, "etp": 1, "last_stage_layers": 22},
        "trainer.recompute.granularity": "full",
        "trainer.moe": {"aux_loss_coeff": 0.001, "aux_loss_scope": "sequence", "router_replay": "R3"},
        "trainer.megatron.optimizer.optimizer_cpu_offload": True,
        "placement.nodes": 4,
        "rollout.replicas": 4,
        "rollout.engine.extra_args": {"ep_size": 8},
    },
    "one_step_off.sh": {
        "schedule.type": "one_step_off",
        "placement.pools.engines": {"nodes": 1, "slots_per_node": 8},
        "placement.rollout.pool": "engines",
        "placement.slots_per_node": 8,
        "rollout.replicas": 2,
        "algorithm.aggregation": "token-mean",
        "algorithm.rollout_is": {"kind": "token_tis", "high": 1.5},
        "algorithm.num_mini_batches": 1,
        "data.chat_template": "never",
        "trainer.optimizer.warmup_steps": 10,
        "trainer.optimizer.decay": "cosine",
        "trainer.optimizer.min_lr": 2e-7,
    },
    "fully_async.sh": {
        "schedule.type": "async",
        "reward.terms.reward": {"type": "python", "path": "my_rewards.exact:score", "per": "group"},
        "trainer.optimizer.decay": "linear",  # Megatron's default
        "trainer.optimizer.weight_decay": 0.01,
        "rollout.replicas": 4,
    },
    "ppo_critic.sh": {
        "algorithm.type": "ppo",
        "algorithm.whiten": True,
        "algorithm.whiten_unbiased": True,
        "algorithm.gamma": 0.99,
        "algorithm.lam": 0.95,
        "algorithm.dual_clip": 3.0,
        "algorithm.kl_reward": {"kind": "k1", "coefficient": 0.02},
        "algorithm.critic.clip": 0.3,
        "algorithm.critic.warmup_steps": 5,
        "algorithm.critic.optimizer.lr": 2e-6,
        "algorithm.num_mini_batches": 2,
    },
    "dynamic_sampling.sh": {
        "algorithm.type": "dapo",
        "algorithm.overlong": None,
        "algorithm.aggregation": "token-mean",
        "data.fields.prompt": "input",
    },
    "multi_turn_tools.sh": {
        "rollout.agent.path": "tools.rollout:generate",
        "reward.terms.reward.path": "tools.rollout:reward_func",
        "rollout.replicas": 4,
        "trainer.max_tokens_per_micro_batch": 16384,
    },
    "fp8_training.sh": {
        "model.dtype": "bfloat16",
        "trainer.megatron.model": {"fp8": "e4m3", "fp8_recipe": "blockwise"},
        "rollout.tp": 8,
    },
    "reinforce_pp.sh": {
        "algorithm.type": "reinforce_pp",
        "algorithm.gamma": 0.99,
        "algorithm.whiten_unbiased": True,
        "algorithm.kl_reward": {"kind": "k1", "coefficient": 0.001},
        "trainer.optimizer.warmup_steps": 1,  # 0.1 of 10 updates
        "trainer.offload": {"optimizer": False, "gradients": False, "weights": False},
    },
    "icepop_router.sh": {
        "algorithm.type": "dr_grpo",
        "algorithm.rollout_is": {"kind": "icepop", "low": 0.5, "high": 5.0},
        "algorithm.num_mini_batches": 5,  # 30 * 8 / 48
        "algorithm.entropy_coefficient": 0.001,
        "trainer.moe.router_replay": "R2",
    },
    "cispo_eval.sh": {
        "algorithm.type": "cispo",
        "algorithm.clip_ratio_high": 4.0,
        "algorithm.kl_loss": {"kind": "k2", "coefficient": 0.001},
        "data.eval_path": "/data/aime.jsonl",
        "trainer.eval_every": 10,
        "eval.samples": 16,
        "tracking.wandb": {"project": "rl", "name": "cispo"},
        "weight_sync.delta": True,
    },
    "sft.sh": {
        "run_dir": "/runs/sft",
        "seed": 5,
        "data": {"path": "/data/chats.parquet", "fields": {"messages": "chat", "tools": "functions"}, "shuffle": True},
        "trainer.batch_size": 64,
        "trainer.steps": 200,  # 50 rollouts of 256 / 64 steps
        "trainer.optimizer.warmup_steps": 20,
        "trainer.optimizer.decay": "cosine",
        "trainer.optimizer.beta2": 0.98,
        "trainer.parallel": {"tp": 2},
        "trainer.max_tokens_per_micro_batch": 8192,
        "checkpoint.every": 40,
        "placement": {"nodes": 2, "slots_per_node": 8},
    },
    "sft_epochs.sh": {
        "data.path": "/data/p.jsonl",
        "data.shuffle": False,
        "data.fields.messages": "messages",
        "trainer.batch_size": 64,  # 128 / 2
    },
    "remote_reward.sh": {
        "seed": 7,
        "reward.terms.reward": {"type": "http", "url": "http://rewards:8000/score"},
    },
}

REPORTED: Mapping[str, tuple[str, ...]] = {
    "dense_grpo.sh": ("seq-mean-token-mean is slime's mean", "counts completions"),
    "fully_async.sh": ("unfinished requests are continued", "linear decay", "dropout of 0.1"),
    "dynamic_sampling.sh": ("dapo",),
    "multi_turn_tools.sh": ("run(episode)", "generation_config.json"),
    "sft.sh": ("multiplied by the optimizer steps", "renders each message by itself", "overlong_prompts: drop"),
    "sft_epochs.sh": (
        "the rows [100:2000]",
        "epochs * rows / trainer.batch_size",
        "with distill_qwen",
        "what the function makes",
        "averages over those of each sample",
        "data.fields.tools: metadata.tools",
    ),
    "fp8_training.sh": ("look quantized",),
    "ppo_critic.sh": ("half of slime's",),
    "icepop_router.sh": ("no reward gpqa",),
    "cispo_eval.sh": ("concatenate them", "pi / pi_old", "not with 0.6"),
    "remote_reward.sh": ("full distribution", "$STEPS"),
}
"""Script -> parts of the account of its settings."""

REFUSED: Mapping[str, str] = {
    "refused_loss.sh": r"refused_loss.sh:1: --loss-type=custom_loss is refused: .* algorithm.type",
    "refused_rejection_sampling.sh": r"--rollout-function-path=slime.rollout.sglang_rollout.* trains on completions",
    "refused_distillation.sh": r"--use-opd=true is refused: .* algorithm.type: distillation",
}


def imported(name: str) -> Conversion:
    """Return the conversion of a script."""
    return import_run("slime", FOLDER / name, {})


def value_of(conversion: Conversion, key: str) -> object:
    """Return a value of the configuration by its dotted key."""
    return reduce(getitem, key.split("."), conversion.tree())  # type: ignore[arg-type]


@pytest.mark.parametrize("name", EXPECTED)
def test_scripts_become_configurations_that_are_accepted(name: str) -> None:
    conversion = imported(name)
    assert {key: value_of(conversion, key) for key in EXPECTED[name]} == dict(EXPECTED[name])
    assert not conversion.problems
    check_offline(make_config(STAGES[conversion.command], conversion.tree()))
    assert not [unmapped for unmapped in conversion.unmapped if "not known" in unmapped.reason]
    account = conversion.yaml().replace("\n#   ", " ")
    for part in REPORTED.get(name, ()):
        assert part in account


@pytest.mark.parametrize("name", REFUSED)
def test_refused_scripts_name_argument_and_line(name: str) -> None:
    with pytest.raises(ConfigError, match=REFUSED[name]):
        imported(name)


def test_a_model_file_that_is_missing_is_reported() -> None:
    assert any("models/dense-4B.sh" in note for note in imported("dense_grpo.sh").notes)


def test_the_command_is_that_of_the_loss() -> None:
    names = ("sft.sh", "sft_epochs.sh", "dense_grpo.sh")
    assert [imported(name).command for name in names] == ["sft", "sft", "train"]


def test_arguments_of_a_sourced_file_have_its_name_and_line(tmp_path: Path) -> None:
    (tmp_path / "model.sh").write_text("# first\nMODEL_ARGS=(\n  --num-layers 2\n  --never-heard-of 3\n)\n")
    script = tmp_path / "run.sh"
    script.write_text("source model.sh\npython3 train.py --hf-checkpoint /m --num-rollout 3 ${MODEL_ARGS[@]}\n")
    conversion = import_run("slime", script, {})
    assert {u.key: u.origin for u in conversion.unmapped if "not known" in u.reason} == {
        "--never-heard-of": "model.sh:4"
    }


@pytest.mark.parametrize(
    ("given", "expected", "reported"),
    [
        ("a.jsonl", {"eval_path": "a.jsonl"}, ""),
        ("a.jsonl@[:8]", {"eval_path": "a.jsonl", "eval_size": 8}, ""),
        ("a.jsonl@[0:8]", {"eval_path": "a.jsonl", "eval_size": 8}, ""),
        ("a.jsonl@[-8:]", {"eval_path": "a.jsonl"}, "write the rows [-8:]"),
        ("a.jsonl@[4:8]", {"eval_path": "a.jsonl"}, "write the rows [4:8]"),
    ],
)
def test_slices_of_held_out_rows(tmp_path: Path, given: str, expected: dict[str, object], reported: str) -> None:
    script = tmp_path / "run.sh"
    script.write_text(f"python3 train.py --hf-checkpoint /m --num-rollout 3 --eval-prompt-data a '{given}'\n")
    conversion = import_run("slime", script, {})
    data = conversion.tree()["data"]
    assert isinstance(data, dict)
    assert {key: value for key, value in data.items() if key.startswith("eval")} == expected
    assert reported in conversion.yaml()


def test_engines_that_are_cut_to_a_node_have_experts_on_its_gpus(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(
        "python3 train.py --hf-checkpoint /m --prompt-data d.jsonl --num-rollout 3 --n-samples-per-prompt 2 --colocate "
        "--actor-num-nodes 4 --rollout-num-gpus-per-engine 32 --sglang-ep-size 32\n"
    )
    conversion = import_run("slime", script, {})
    assert value_of(conversion, "rollout.tp") == 8
    assert value_of(conversion, "rollout.engine.extra_args.ep_size") == 8
    assert not conversion.problems
    assert "32 becomes 8" in conversion.yaml()


def test_a_wrong_type_names_file_line_and_argument(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text("# first\npython3 train.py --hf-checkpoint /m \\\n  --num-rollout many\n")
    with expect_error(ConfigError, "run.sh:3: --num-rollout ", "'many'"):
        import_run("slime", script, {})


def test_unknown_arguments_are_reported(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text("python3 train.py --hf-checkpoint /m --num-rollout 3 --prompt-data d.jsonl --never-heard-of 3\n")
    reasons = {unmapped.key: unmapped.reason for unmapped in import_run("slime", script, {}).unmapped}
    assert "not known" in reasons["--never-heard-of"]
