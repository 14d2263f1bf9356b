"""What cannot be meant is refused, with the reason and the YAML path."""

from __future__ import annotations

from typing import Any

import pytest

from megarl.config import RunConfig
from megarl.config.load import make_config
from megarl.errors import ConfigError


def run(**sections: Any) -> RunConfig:
    return make_config(RunConfig, {"run_dir": "r", "model": {"path": "m"}, "data": {"path": "d"}} | sections)


def problem(**sections: Any) -> str:
    with pytest.raises(ConfigError) as error:
        run(**sections)
    return str(error.value)


@pytest.mark.parametrize(
    ("algorithm", "says"),
    [
        (
            {"type": "grpo", "critic": {}},
            "algorithm: critic: grpo has no critic, the completions of a prompt are each other's baseline; leave it "
            "out or choose ppo",
        ),
        (
            {"type": "remax", "critic": {"path": "c"}},
            "algorithm: critic: remax has no critic, it needs none; leave it out or choose ppo",
        ),
        (
            {"type": "ppo", "cost_critic": {}},
            "algorithm: cost_critic: ppo has no costs and so no critic of them; leave it out or choose safe_rlhf",
        ),
        (
            {"type": "grpo", "kl_reward": {}},
            "algorithm: kl_loss and kl_reward are both given, which punishes the same divergence twice; set one to "
            "null, or say kl_in_both: true",
        ),
        (
            {"type": "rloo", "group_size": 1},
            "algorithm: group_size needs to be at least 2, got 1: the other completions of a prompt are the baseline "
            "of rloo",
        ),
        ({"type": "ppo", "clip_low": 1.0}, "algorithm: clip_low needs to be below 1, got 1: ratios are positive"),
        ({"type": "gspo", "clip_low": 1.5}, "algorithm: clip_low needs to be below 1, got 1.5: ratios are positive"),
        (
            {"type": "prime", "min_accuracy": 0.9},
            "algorithm: min_accuracy needs to be at most max_accuracy, got 0.9 > 0.8: no prompt would be kept",
        ),
        (
            {"correction": {"low": 3.0}},
            "algorithm.correction: low needs to be below high, got 3 >= 2 for token_tis",
        ),
        (
            {"correction": {"kind": "icepop", "low": 0.5, "high": 0.5}},
            "algorithm.correction: low needs to be below high, got 0.5 >= 0.5 for icepop",
        ),
        (
            {"length_norm": 512},
            "algorithm: length_norm is what seq-mean-token-sum-norm divides by, got length_norm = 512 with aggregation "
            "= token-mean",
        ),
        (
            {"kl_loss": {"coefficient": 0}},
            "algorithm.kl_loss: coefficient needs to be above 0, got 0: a penalty of nothing costs a reference model "
            "all the same; set the section to null",
        ),
        (
            {"kl_loss": None, "reference": {"path": "ref"}},
            "algorithm: reference.path is given and nothing measures from a reference model: kl_loss and kl_reward are "
            "null; leave it out or give one of them",
        ),
        (
            {"type": "distillation", "teacher": {"path": "t"}, "kl_reward": {}},
            "algorithm: kl_reward takes from rewards and the advantages of distillation come from its teacher; leave "
            "it out or give kl_loss",
        ),
        (
            {"type": "prime", "kl_reward": {}},
            "algorithm: kl_reward takes from rewards and the advantages of prime come from its reward model and "
            "outcomes; leave it out or give kl_loss",
        ),
        ({"type": "distillation"}, "algorithm: teacher.path is required: the model that distillation learns from"),
        ({"preset": "papr"}, "algorithm: preset: grpo has default, paper, compat:verl, compat:slime, got 'papr'"),
        (
            {"type": "ppo", "critic": {"warmup_steps": 10}},
            "RunConfig: algorithm.critic.warmup_steps needs to be below trainer.steps, got 10 >= 10: the policy would "
            "not be trained",
        ),
        (
            {"type": "dapo", "filter_metric": "acc"},
            "RunConfig: algorithm.filter_metric needs one of ['accuracy'], got 'acc'",
        ),
        ({"type": "safe_rlhf"}, "RunConfig: algorithm.cost_term needs one of ['accuracy'], got 'cost'"),
        (
            {"type": "safe_rlhf", "cost_term": "accuracy"},
            "RunConfig: algorithm.cost_term: 'accuracy' is the only one of reward.terms, which leaves no reward to "
            "raise",
        ),
    ],
)
def test_algorithms(algorithm: dict[str, Any], says: str) -> None:
    assert problem(algorithm=algorithm, trainer={"steps": 10}) == says


def test_what_is_meant_is_taken() -> None:
    assert run(algorithm={"type": "grpo", "kl_reward": {}, "kl_in_both": True}).algorithm.uses_reference
    assert run(algorithm={"type": "cispo", "clip_low": 10}).algorithm.clip_low == 10
    assert run(algorithm={"type": "remax", "group_size": 1}).algorithm.group_size == 1
    assert run(algorithm={"type": "vapo"}, trainer={"steps": 10}).trainer.steps == 10
    prime = run(algorithm={"type": "prime", "reference": {"path": "ref"}})
    assert prime.algorithm.uses_reference


MODEL = {"type": "model", "path": "rm"}


def test_reward_models_take_no_part_in_evaluation() -> None:
    config = run(reward={"terms": {"rm": MODEL, "accuracy": {"type": "numeric"}}}, data={"path": "d", "eval_path": "e"})
    assert config.reward.eval_name == "accuracy"
    assert (config.reward.rules, list(config.reward.models)) == (["accuracy"], ["rm"])
    assert problem(reward={"terms": {"rm": MODEL, "a": {}}, "eval_term": "rm"}) == (
        "reward: eval_term needs a rule, got 'rm', which is a model: evaluation only generates and runs rules"
    )


def test_reward_models_alone_leave_nothing_to_evaluate() -> None:
    assert run(reward={"terms": {"rm": MODEL}}).reward.rules == []
    assert problem(reward={"terms": {"rm": MODEL}}, data={"path": "d", "eval_path": "e"}) == (
        "RunConfig: data.eval_path: evaluation scores completions by rules, and reward.terms has only models, ['rm']; "
        "leave it out, or add a rule (with weight: 0 it is no part of the reward)"
    )
    assert problem(reward={"terms": {"rm": MODEL}}, algorithm={"type": "dapo"}) == (
        "RunConfig: algorithm.filter_metric needs one of ['rm'] where no term is a rule, got null"
    )


def test_a_reward_model_has_no_timeout() -> None:
    assert problem(reward={"terms": {"rm": MODEL | {"timeout_seconds": 1}}}) == (
        "reward.terms.rm.timeout_seconds: unknown key"
    )
