"""Presets load, and have the values stated in papers and in the sources of other trainers."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from pydantic import TypeAdapter, ValidationError

from megarl.config.algorithm import AlgorithmConfig
from megarl.config.algorithm_presets import PRESETS
from megarl.config.policy import PolicyConfig

ANY = TypeAdapter[PolicyConfig](AlgorithmConfig)

EXPECTED = yaml.safe_load("""
no_kl: &no_kl {kl_loss: null, kl_reward: null}
clip: &clip {clip_ratio_low: 0.2, clip_ratio_high: 0.2}
clip_higher: &clip_higher {clip_ratio_low: 0.2, clip_ratio_high: 0.28}
k1_reward: &k1_reward {kl_reward.kind: k1, kl_reward.coefficient: 0.001}
k3_loss: &k3_loss {kl_loss.kind: k3, kl_loss.coefficient: 0.001}
verl: &verl {<<: *clip, dual_clip: 3.0, aggregation: token-mean}
slime_loss: &slime_loss {<<: *no_kl, aggregation: seq-mean-token-mean}
slime: &slime {<<: [*clip, *slime_loss], dual_clip: null}
gspo: &gspo {<<: *no_kl, clip_ratio_low: 3.0e-4, clip_ratio_high: 4.0e-4}
overlong: &overlong {max_length: 20480, buffer: 4096, factor: 1.0}
presets:
  grpo default: {<<: [*clip, *k3_loss], dual_clip: null, aggregation: token-mean, kl_reward: null}
  grpo paper: {aggregation: seq-mean-token-mean, kl_loss.kind: k3, kl_loss.coefficient: 0.04}
  grpo compat:verl: {<<: [*verl, *k3_loss], kl_reward: null}
  grpo compat:slime: *slime
  dr_grpo paper: {<<: *no_kl, aggregation: seq-mean-token-sum-norm, length_norm: null}
  dr_grpo compat:verl: {<<: [*verl, *no_kl], aggregation: seq-mean-token-sum-norm}
  dr_grpo compat:slime: *slime
  rloo default: {<<: *k1_reward, kl_reward.target: null}
  rloo compat:verl: {<<: [*verl, *no_kl]}
  gspo paper: {<<: *gspo, aggregation: seq-mean-token-mean}
  gspo compat:verl: *gspo
  gspo compat:slime: {<<: *slime_loss, clip_ratio_low: 4.0e-4, clip_ratio_high: 4.0e-4}
  cispo paper: {<<: *no_kl, clip_ratio_high: 4.0, aggregation: token-mean}
  cispo compat:verl: {<<: *k3_loss, clip_ratio_high: 0.2}
  cispo compat:slime: {<<: *slime_loss, clip_ratio_high: 4.0}
  gmpo paper: {<<: *no_kl, clip_log_ratio_low: 0.4, clip_log_ratio_high: 0.4, aggregation: seq-mean-token-mean}
  dapo paper: {<<: [*clip_higher, *no_kl], aggregation: token-mean, overlong: *overlong}
  dapo compat:verl:
    {<<: [*verl, *no_kl], clip_ratio_high: 0.28, dual_clip: 10.0, overlong: *overlong, max_batches: 10}
  dapo compat:nemo-rl:
    {<<: [*clip_higher, *no_kl], dual_clip: 10.0, overlong: {max_length: 14336, buffer: 2048, factor: 1.0}}
  reinforce_pp default: {<<: *k1_reward, gamma: 1.0}
  reinforce_pp compat:verl: {<<: [*verl, *no_kl], gamma: 1.0}
  reinforce_pp compat:slime: {<<: *slime, gamma: 1.0}
  reinforce_pp_baseline default: {kl_loss.kind: k2, kl_loss.coefficient: 0.001}
  remax default: *k1_reward
  remax compat:verl: {<<: [*verl, *no_kl]}
  ppo compat:verl:
    {<<: [*verl, *no_kl], gamma: 1.0, lam: 1.0, whiten: true, critic.clip: 0.5, critic.optimizer.lr: 1.0e-5}
  ppo compat:slime: {<<: *slime, lam: 1.0, whiten: false, critic.clip: 0.2}
  ppo compat:nemo-rl:
    {clip_ratio_high: 0.28, dual_clip: 10.0, lam: 0.95, ppo_epochs: 4, whiten: true, critic.clip: 0.2}
  vapo paper:
    {<<: [*clip_higher, *no_kl], aggregation: token-mean, gamma: 1.0, lam: 1.0, length_alpha: 0.05,
     nll_coefficient: 0.1, critic.optimizer.lr: 2.0e-6}
  prime paper:
    {<<: *no_kl, beta: 0.05, process_coefficient: 5.0, outcome_coefficient: 5.0, min_accuracy: 0.2, max_accuracy: 0.8,
     reward_model.optimizer.lr: 1.0e-6, reward_model.optimizer.clip_grad: 10.0}
  safe_rlhf paper:
    {<<: *clip, aggregation: seq-mean-token-mean, kl_loss: null, kl_reward.kind: k1, kl_reward.coefficient: 0.01,
     lam: 0.95, whiten: false, critic.clip: 5.0, critic.optimizer.lr: 5.0e-6, cost_critic.clip: 5.0,
     cost_critic.optimizer.lr: 5.0e-6, cost_limit: 0.0, multiplier_lr: 0.1, multiplier_start: 1.0, multiplier_max: 5.0}
""")
PRESET_VALUES: dict[str, dict[str, Any]] = EXPECTED["presets"]
OVERLONG: dict[str, Any] = EXPECTED["overlong"]


def algorithm(**given: Any) -> PolicyConfig:
    return ANY.validate_python(given)


@pytest.mark.parametrize(("kind", "preset"), list(PRESETS))
def test_every_preset_loads_and_round_trips(kind: str, preset: str) -> None:
    config = algorithm(type=kind, preset=preset)
    assert (config.type, config.preset) == (kind, preset)
    assert ANY.validate_python(config.model_dump()) == config


def at(tree: dict[str, Any], key: str) -> Any:
    for name in key.split("."):
        tree = tree[name]
    return tree


@pytest.mark.parametrize("name", PRESET_VALUES)
def test_values_of_presets(name: str) -> None:
    kind, preset = name.split()
    tree = algorithm(type=kind, preset=preset).model_dump()
    assert {key: at(tree, key) for key in PRESET_VALUES[name]} == PRESET_VALUES[name]


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
    assert at(algorithm(**given).model_dump(), key) == expected


@pytest.mark.parametrize(
    ("given", "has"),
    [
        ({"type": "grpo", "preset": "papr"}, "grpo has the presets default, paper, compat:verl, compat:slime, got 'pa"),
        ({"type": "grpo", "preset": "compat:nemo-rl"}, "grpo has the presets default, .* got 'compat:nemo-rl'"),
        ({"type": "distillation", "preset": "paper"}, "distillation has the presets default, got 'paper'"),
    ],
)
def test_an_unknown_preset_lists_the_presets_of_the_algorithm(given: dict[str, Any], has: str) -> None:
    with pytest.raises(ValidationError, match="preset: " + has):
        algorithm(**given)
