"""Presets load, and have the values stated in papers and in the sources of other trainers."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from megarl.config.algorithms.algorithm import AlgorithmConfig
from megarl.config.algorithms.policy import PolicyConfig
from megarl.config.algorithms.presets import PRESETS

ANY = TypeAdapter[PolicyConfig](AlgorithmConfig)

NO_KL = {"kl_loss": None, "kl_reward": None}
VERL = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "dual_clip": 3.0, "aggregation": "token-mean"}
SLIME_LOSS = {"aggregation": "seq-mean-token-mean", **NO_KL}
SLIME = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "dual_clip": None, **SLIME_LOSS}
OVERLONG = {"max_length": 20_480, "buffer": 4096, "factor": 1.0}


def algorithm(**given: Any) -> PolicyConfig:
    return ANY.validate_python(given)


@pytest.mark.parametrize(("kind", "preset"), list(PRESETS))
def test_every_preset_loads_and_round_trips(kind: str, preset: str) -> None:
    config = algorithm(type=kind, preset=preset)
    assert (config.type, config.preset) == (kind, preset)
    assert ANY.validate_python(config.model_dump()) == config


@pytest.mark.parametrize(
    ("kind", "preset", "expected"),
    [
        (
            "grpo",
            "default",
            {
                "clip_ratio_low": 0.2,
                "clip_ratio_high": 0.2,
                "dual_clip": None,
                "aggregation": "token-mean",
                "kl_loss.kind": "k3",
                "kl_loss.coefficient": 0.001,
                "kl_reward": None,
            },
        ),
        (
            "grpo",
            "paper",
            {"aggregation": "seq-mean-token-mean", "kl_loss.kind": "k3", "kl_loss.coefficient": 0.04},
        ),
        (
            "grpo",
            "compat:verl",
            {**VERL, "kl_loss.kind": "k3", "kl_loss.coefficient": 0.001, "kl_reward": None},
        ),
        ("grpo", "compat:slime", SLIME),
        ("dr_grpo", "paper", {"aggregation": "seq-mean-token-sum-norm", "length_norm": None, **NO_KL}),
        ("dr_grpo", "compat:verl", {**VERL, "aggregation": "seq-mean-token-sum-norm", **NO_KL}),
        ("dr_grpo", "compat:slime", SLIME),
        ("rloo", "default", {"kl_reward.kind": "k1", "kl_reward.coefficient": 0.001, "kl_reward.target": None}),
        ("rloo", "compat:verl", {**VERL, **NO_KL}),
        (
            "gspo",
            "paper",
            {"clip_ratio_low": 3e-4, "clip_ratio_high": 4e-4, "aggregation": "seq-mean-token-mean", **NO_KL},
        ),
        ("gspo", "compat:verl", {"clip_ratio_low": 3e-4, "clip_ratio_high": 4e-4, **NO_KL}),
        ("gspo", "compat:slime", {**SLIME_LOSS, "clip_ratio_low": 4e-4, "clip_ratio_high": 4e-4}),
        ("cispo", "paper", {"clip_ratio_high": 4.0, "aggregation": "token-mean", **NO_KL}),
        ("cispo", "compat:verl", {"clip_ratio_high": 0.2, "kl_loss.kind": "k3", "kl_loss.coefficient": 0.001}),
        ("cispo", "compat:slime", {**SLIME_LOSS, "clip_ratio_high": 4.0}),
        (
            "gmpo",
            "paper",
            {"clip_log_ratio_low": 0.4, "clip_log_ratio_high": 0.4, "aggregation": "seq-mean-token-mean", **NO_KL},
        ),
        (
            "dapo",
            "paper",
            {
                "clip_ratio_low": 0.2,
                "clip_ratio_high": 0.28,
                "aggregation": "token-mean",
                "overlong": OVERLONG,
                **NO_KL,
            },
        ),
        (
            "dapo",
            "compat:verl",
            {**VERL, "clip_ratio_high": 0.28, "dual_clip": 10.0, "overlong": OVERLONG, "max_batches": 10, **NO_KL},
        ),
        (
            "dapo",
            "compat:nemo-rl",
            {
                "clip_ratio_low": 0.2,
                "clip_ratio_high": 0.28,
                "dual_clip": 10.0,
                "overlong": {"max_length": 14_336, "buffer": 2048, "factor": 1.0},
                **NO_KL,
            },
        ),
        ("reinforce_pp", "default", {"gamma": 1.0, "kl_reward.kind": "k1", "kl_reward.coefficient": 0.001}),
        ("reinforce_pp", "compat:verl", {**VERL, "gamma": 1.0, **NO_KL}),
        ("reinforce_pp", "compat:slime", {**SLIME, "gamma": 1.0}),
        ("reinforce_pp_baseline", "default", {"kl_loss.kind": "k2", "kl_loss.coefficient": 0.001}),
        ("remax", "default", {"kl_reward.kind": "k1", "kl_reward.coefficient": 0.001}),
        ("remax", "compat:verl", {**VERL, **NO_KL}),
        (
            "ppo",
            "compat:verl",
            {
                **VERL,
                **NO_KL,
                "gamma": 1.0,
                "lam": 1.0,
                "whiten": True,
                "critic.clip": 0.5,
                "critic.optimizer.lr": 1e-5,
            },
        ),
        ("ppo", "compat:slime", {**SLIME, "lam": 1.0, "whiten": False, "critic.clip": 0.2}),
        (
            "ppo",
            "compat:nemo-rl",
            {
                "clip_ratio_high": 0.28,
                "dual_clip": 10.0,
                "lam": 0.95,
                "ppo_epochs": 4,
                "whiten": True,
                "critic.clip": 0.2,
            },
        ),
        (
            "vapo",
            "paper",
            {
                "clip_ratio_low": 0.2,
                "clip_ratio_high": 0.28,
                "gamma": 1.0,
                "lam": 1.0,
                "length_alpha": 0.05,
                "nll_coefficient": 0.1,
                "critic.optimizer.lr": 2e-6,
                "aggregation": "token-mean",
                **NO_KL,
            },
        ),
        (
            "prime",
            "paper",
            {
                "beta": 0.05,
                "process_coefficient": 5.0,
                "outcome_coefficient": 5.0,
                "min_accuracy": 0.2,
                "max_accuracy": 0.8,
                "reward_model.optimizer.lr": 1e-6,
                "reward_model.optimizer.clip_grad": 10.0,
                **NO_KL,
            },
        ),
        (
            "safe_rlhf",
            "paper",
            {
                "clip_ratio_low": 0.2,
                "clip_ratio_high": 0.2,
                "aggregation": "seq-mean-token-mean",
                "kl_loss": None,
                "kl_reward.kind": "k1",
                "kl_reward.coefficient": 0.01,
                "lam": 0.95,
                "whiten": False,
                "critic.clip": 5.0,
                "critic.optimizer.lr": 5e-6,
                "cost_critic.clip": 5.0,
                "cost_critic.optimizer.lr": 5e-6,
                "cost_limit": 0.0,
                "multiplier_lr": 0.1,
                "multiplier_start": 1.0,
                "multiplier_max": 5.0,
            },
        ),
    ],
)
def test_values_of_presets(kind: str, preset: str, expected: dict[str, Any]) -> None:
    tree = algorithm(type=kind, preset=preset).model_dump()
    got = {}
    for key in expected:
        value = tree
        for name in key.split("."):
            value = value[name]
        got[key] = value
    assert got == expected


def test_given_keys_override_the_preset() -> None:
    config = algorithm(type="dapo", preset="paper", clip_ratio_high=0.3, overlong={"buffer": 100})
    assert config.clip_ratio_high == 0.3
    assert config.model_dump()["overlong"] == OVERLONG | {"buffer": 100}
    assert config.clip_ratio_low == 0.2


def test_null_overrides_the_preset() -> None:
    config = algorithm(type="safe_rlhf", preset="paper", kl_reward=None, critic={"clip": None})
    assert config.kl_reward is None
    critic = config.model_dump()["critic"]
    assert (critic["clip"], critic["optimizer"]["lr"]) == (None, 5e-6)
    assert algorithm(type="dapo", preset="paper", overlong=None).model_dump()["overlong"] is None


@pytest.mark.parametrize(
    ("given", "key", "expected"),
    [
        ({"type": "reinforce_pp_baseline", "kl_loss": {"coefficient": 0.1}}, "kl_loss.kind", "k2"),
        ({"type": "ppo", "critic": {"optimizer": {"warmup_steps": 3}}}, "critic.optimizer.lr", 1e-5),
        ({"type": "prime", "reward_model": {"path": "rm"}}, "reward_model.optimizer.lr", 1e-6),
        ({"type": "ppo", "kl_reward": {"coefficient": 0.1}}, "kl_reward.kind", "k1"),
    ],
)
def test_a_partial_section_keeps_the_defaults_of_the_algorithm(given: dict[str, Any], key: str, expected: Any) -> None:
    value = algorithm(**given).model_dump()
    for name in key.split("."):
        value = value[name]
    assert value == expected


@pytest.mark.parametrize(
    ("kind", "preset", "has"),
    [
        ("grpo", "papr", "grpo has the presets default, paper, compat:verl, compat:slime, got 'papr'"),
        (
            "grpo",
            "compat:nemo-rl",
            "grpo has the presets default, paper, compat:verl, compat:slime, got 'compat:nemo-rl'",
        ),
        ("distillation", "paper", "distillation has the presets default, got 'paper'"),
    ],
)
def test_an_unknown_preset_lists_the_presets_of_the_algorithm(kind: str, preset: str, has: str) -> None:
    with pytest.raises(ValidationError, match="preset: " + has):
        algorithm(type=kind, preset=preset, teacher={"path": "t"}) if kind == "distillation" else algorithm(
            type=kind, preset=preset
        )
