"""Configurations of NeMo-RL, and what they are in megarl: the values were worked out by hand from NeMo-RL's keys."""

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
    "dense_default.yaml": {
        "run_dir": "results/dense",
        "seed": 42,
        "model.path": "Qwen/Qwen2.5-1.5B",
        "data.path": "/data/train.jsonl",
        "data.fields.prompt": "question",
        "algorithm.group_size": 16,
        "algorithm.num_mini_batches": 1,
        "algorithm.kl_loss": {"kind": "k2", "coefficient": 0.01},  # the gradient of NeMo-RL's k3
        "trainer.steps": 1000,
        "trainer.max_tokens_per_micro_batch": 2048,  # 1024 * 2, interpolated after the override
        "trainer.optimizer.beta2": 0.999,
        "rollout.max_new_tokens": 1024,
        "rollout.replicas": 8,
        "checkpoint.keep_last": 5,
    },
    "rloo.yaml": {"algorithm.type": "rloo", "data.eval_path": "/data/val.jsonl", "trainer.eval_every": 20},
    "moe_megatron.yaml": {
        "algorithm.num_mini_batches": 4,  # 64 * 32 / 512
        "trainer.parallel": {"tp": 4, "pp": 2, "ep": 8, "etp": 1},
        "trainer.recompute.granularity": "selective",
        "trainer.recompute.modules": ["moe"],
        "trainer.optimizer.lr": 3e-7,
        "trainer.optimizer.warmup_steps": 200,  # 50 * 4 updates
        "trainer.optimizer.decay": "cosine",
        "trainer.moe.freeze_router": True,
        "trainer.megatron.model": {"moe_permute_fusion": True},
        "placement.nodes": 8,
        "placement.nvlink_domain_nodes": 4,
        "rollout.replicas": 16,
        "tracking.wandb": {"project": "p", "name": "n"},
    },
    "gspo.yaml": {
        "algorithm.type": "gspo",
        "algorithm.clip_ratio_low": 3e-4,
        "algorithm.aggregation": "seq-mean-token-mean",
        "algorithm.rollout_is": {"kind": "sequence_tis", "high": 2.0},
    },
    "dapo.yaml": {
        "algorithm.type": "dapo",
        "algorithm.max_batches": 6,
        "algorithm.dual_clip": 10.0,
        "algorithm.mask_truncated_completions": True,
        "algorithm.overlong": {"buffer": 2048, "factor": 1.0, "max_length": 14336},
    },
    "async_in_flight.yaml": {
        "data.chat_template_kwargs": {"enable_thinking": False},
        "schedule": {"type": "async", "max_staleness": 2, "lookahead": 2, "update": "in_place"},
        "placement.nodes": 1,
        "placement.pools.engines": {"nodes": 2, "slots_per_node": 8},
        "rollout.tp": 2,
        "rollout.replicas": 8,
        "rollout.engine.mem_fraction": 0.8,
        "rollout.engine.max_running_requests": 128,
        "algorithm.rollout_is": {"kind": "token_tis", "high": 1e9},  # not truncated
    },
    "multi_turn.yaml": {"rollout.env": {"path": "your_package.env:Env", "max_turns": 10}},
    "fp8.yaml": {
        "trainer.megatron.model": {"fp8": "e4m3", "fp8_recipe": "blockwise"},
        "rollout.replicas": 4,
        "trainer.optimizer.lr": 1e-6,
    },
    "ppo.yaml": {
        "algorithm.type": "ppo",
        "algorithm.ppo_epochs": 2,
        "algorithm.num_mini_batches": 2,
        "algorithm.kl_reward": {"kind": "k1", "coefficient": 0.02},
        "algorithm.lam": 0.95,
        "algorithm.whiten_unbiased": True,
        "algorithm.critic.clip": 0.3,
        "algorithm.critic.warmup_steps": 10,
        "algorithm.critic.optimizer.lr": 9e-6,
        "trainer.optimizer.warmup_steps": 20,  # 5 * 2 mini-batches * 2 epochs
    },
    "vapo.yaml": {
        "algorithm.type": "vapo",
        "algorithm.length_alpha": 0.05,
        "algorithm.lam": 1.0,
        "algorithm.nll_coefficient": 0.1,
        "algorithm.pretraining.max_steps": 0,
    },
    "sft.yaml": {
        "run_dir": "/runs/sft",
        "data.fields.response": "reply",
        "trainer.batch_size": 64,
        "trainer.steps": 200,
        "trainer.parallel.tp": 2,
        "trainer.optimizer.lr": 2e-5,
        "trainer.max_tokens_per_micro_batch": 4096,
        "placement.slots_per_node": 4,
    },
    "dpo.yaml": {
        "dpo": {"beta": 0.1, "nll": 0.2},
        "data.fields.chosen": "good",
        "data.fields.rejected": "bad",
        "trainer.batch_size": 32,
    },
    "rm.yaml": {
        "data.fields.chosen": "better",
        "data.fields.prompt": "question",
        "checkpoint.every": 20,
        "seed": 7,
        "trainer.batch_size": 64,
        "trainer.eval_every": 20,
        "trainer.max_tokens_per_micro_batch": 8192,
        "trainer.optimizer.lr": 2e-6,
        "trainer.steps": 300,
        "placement.slots_per_node": 8,
    },
    "reinforce_script.sh": {
        "algorithm.type": "reinforce_pp_baseline",
        "algorithm.num_mini_batches": 4,
        "trainer.steps": 40,
        "trainer.optimizer.lr": 2e-6,
        "placement.slots_per_node": 4,
    },
    "reward_model.yaml": {
        "algorithm.type": "dr_grpo",
        "algorithm.aggregation": "token-mean",
        "reward.terms.reward_model": {"type": "model", "path": "Skywork/Reward-8B"},
    },
}

REPORTED: Mapping[str, tuple[str, ...]] = {
    "dense_default.yaml": ("not of the others", "that of k2", "prompt and completion together"),
    "moe_megatron.yaml": ("multiplied by num_mini_batches",),
    "dapo.yaml": ("reward of type: python",),
    "async_in_flight.yaml": ("gradient of k1",),
    "multi_turn.yaml": ("reset(task)", "environment sliding_puzzle"),
    "fp8.yaml": ("quantization",),
    "ppo.yaml": ("value_loss_fn.scale",),
    "reinforce_script.sh": ("$RUN_NAME",),
}
"""File -> parts of the account of its settings."""

REFUSED: Mapping[str, str] = {
    "refused_lora.yaml": r"refused_lora.yaml:2: policy.dtensor_cfg.lora_cfg.enabled=true is refused: .* no LoRA",
    "refused_gdpo.yaml": r"refused_gdpo.yaml:2: grpo.adv_estimator.name=gdpo is refused: megarl has no estimator gdpo",
    "refused_distillation.yaml": r"the section distillation, .* algorithm.type: distillation by hand",
}


def imported(name: str) -> Conversion:
    """Return the conversion of a file."""
    return import_run("nemo-rl", FOLDER / name, {})


def value_of(conversion: Conversion, key: str) -> object:
    """Return a value of the configuration by its dotted key."""
    return reduce(getitem, key.split("."), conversion.tree())  # type: ignore[arg-type]


@pytest.mark.parametrize("name", EXPECTED)
def test_files_become_configurations_that_are_accepted(name: str) -> None:
    conversion = imported(name)
    assert {key: value_of(conversion, key) for key in EXPECTED[name]} == dict(EXPECTED[name])
    assert not conversion.problems
    check_offline(make_config(STAGES[conversion.command], conversion.tree()))
    assert not [unmapped for unmapped in conversion.unmapped if "not known" in unmapped.reason]
    account = conversion.yaml().replace("\n#   ", " ")
    for part in REPORTED.get(name, ()):
        assert part in account


COMMANDS = {"sft.yaml": "sft", "dpo.yaml": "dpo", "rm.yaml": "rm", "ppo.yaml": "train"}


def test_the_command_is_that_of_the_algorithm() -> None:
    assert [imported(name).command for name in COMMANDS] == [*COMMANDS.values()]


@pytest.mark.parametrize("name", REFUSED)
def test_refused_files_name_key_and_line(name: str) -> None:
    with pytest.raises(ConfigError, match=REFUSED[name]):
        imported(name)


def test_a_missing_base_is_reported(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("defaults: ../../grpo_math_8B.yaml\ngrpo: {max_num_steps: 3}\n")
    assert "run.yaml:1: ../../grpo_math_8B.yaml, which the file inherits from, was not found" in " ".join(
        import_run("nemo-rl", file, {}).notes
    )


def test_files_that_inherit_in_a_circle_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("defaults: b.yaml\ngrpo: {seed: 1}\n")
    (tmp_path / "b.yaml").write_text("defaults: a.yaml\n")
    with expect_error(ConfigError, "defaults", "circle"):
        import_run("nemo-rl", tmp_path / "a.yaml", {})


def test_a_wrong_type_names_file_line_and_key(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("grpo:\n  num_prompts_per_step: many\n")
    with expect_error(ConfigError, "run.yaml:2: grpo.num_prompts_per_step ", "'many'"):
        import_run("nemo-rl", file, {})
