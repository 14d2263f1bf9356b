"""Contradictory settings are rejected with the reason and the YAML path."""

from __future__ import annotations

from typing import Any

import pytest

from megarl.config import RunConfig
from megarl.config.load import make_config
from megarl.errors import ConfigError


def make_run(**sections: Any) -> RunConfig:
    return make_config(RunConfig, {"run_dir": "r", "model": {"path": "m"}, "data": {"path": "d"}} | sections)


def error_message(**sections: Any) -> str:
    with pytest.raises(ConfigError) as error:
        make_run(**sections)
    return str(error.value)


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        (
            {"type": "grpo", "critic": {}},
            "algorithm: critic: grpo has no critic, the completions of a prompt are each other's baseline; remove the "
            "section, or choose ppo",
        ),
        (
            {"type": "remax", "critic": {"path": "c"}},
            "algorithm: critic: remax has no critic, it needs none; remove the section, or choose ppo",
        ),
        (
            {"type": "ppo", "cost_critic": {}},
            "algorithm: cost_critic: ppo has no costs, so it has no cost critic; remove the section, or choose "
            "safe_rlhf",
        ),
        (
            {"type": "grpo", "kl_reward": {}},
            "algorithm: kl_loss and kl_reward are both set and would penalize the same divergence twice; set one to "
            "null, or set allow_double_kl: true",
        ),
        (
            {"type": "rloo", "group_size": 1},
            "algorithm: group_size needs to be at least 2, got 1: rloo compares the completions of a prompt with each "
            "other",
        ),
        (
            {"type": "ppo", "clip_ratio_low": 1.0},
            "algorithm: clip_ratio_low needs to be below 1, got 1: ratios are positive",
        ),
        (
            {"type": "gspo", "clip_ratio_low": 1.5},
            "algorithm: clip_ratio_low needs to be below 1, got 1.5: ratios are positive",
        ),
        (
            {"type": "prime", "min_accuracy": 0.9},
            "algorithm: min_accuracy needs to be at most max_accuracy, got 0.9 > 0.8: no prompt would be kept",
        ),
        (
            {"type": "ppo", "decoupled": {}, "rollout_is": {}},
            "algorithm: decoupled and rollout_is are both set and would multiply the loss by the same ratio twice; set "
            "one to null",
        ),
        (
            {"type": "gspo", "decoupled": {}},
            "algorithm: decoupled: the loss of gspo is not that of PPO; remove the section, or set rollout_is",
        ),
        (
            {"rollout_is": {"low": 3.0}},
            "algorithm.rollout_is: low needs to be below high, got 3 >= 2 for token_tis",
        ),
        (
            {"rollout_is": {"kind": "icepop", "low": 0.5, "high": 0.5}},
            "algorithm.rollout_is: low needs to be below high, got 0.5 >= 0.5 for icepop",
        ),
        (
            {"length_norm": 512},
            "algorithm: length_norm is the divisor of aggregation seq-mean-token-sum-norm, got length_norm = 512 with "
            "aggregation = token-mean",
        ),
        (
            {"kl_loss": {"coefficient": 0}},
            "algorithm.kl_loss: coefficient needs to be above 0, got 0: a penalty of 0 would still load a reference "
            "model; set the section to null",
        ),
        (
            {"kl_loss": None, "reference": {"path": "ref"}},
            "algorithm: reference.path is set, but no reference model is used: kl_loss and kl_reward are null; remove "
            "it, or set one of them",
        ),
        (
            {"type": "distillation", "teacher": {"path": "t"}, "kl_reward": {}},
            "algorithm: kl_reward is subtracted from rewards, but the advantages of distillation come from its "
            "teacher; set kl_reward to null, or use kl_loss",
        ),
        (
            {"type": "prime", "kl_reward": {}},
            "algorithm: kl_reward is subtracted from rewards, but the advantages of prime come from its reward model "
            "and outcomes; set kl_reward to null, or use kl_loss",
        ),
        ({"type": "distillation"}, "algorithm: teacher.path is required: the folder of the model to distill from"),
        (
            {"preset": "papr"},
            "algorithm: preset: grpo has the presets default, paper, compat:verl, compat:slime, got 'papr'",
        ),
        (
            {"type": "ppo", "critic": {"warmup_steps": 10}},
            "RunConfig: algorithm.critic.warmup_steps needs to be below trainer.steps, got 10 >= 10: the policy would "
            "not be trained",
        ),
        (
            {"type": "dapo", "filter_metric": "acc"},
            "RunConfig: algorithm.filter_metric needs to be one of ['accuracy'], got 'acc'",
        ),
        ({"type": "safe_rlhf"}, "RunConfig: algorithm.cost_term needs to be one of ['accuracy'], got 'cost'"),
        (
            {"type": "safe_rlhf", "cost_term": "accuracy"},
            "RunConfig: algorithm.cost_term: 'accuracy' is the only term of reward.terms; another term needs to be the "
            "reward",
        ),
    ],
)
def test_contradictory_algorithm_settings_are_rejected(algorithm: dict[str, Any], message: str) -> None:
    assert error_message(algorithm=algorithm, trainer={"steps": 10}) == message


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            {"algorithm": {"type": kind, "dual_clip": 3.0}},
            f"algorithm: dual_clip: the loss of {kind} has no dual clip; remove it",
        )
        for kind in ("gspo", "cispo", "gmpo")
    ]
    + [
        (
            {"algorithm": {"type": kind, "clip_ratio_low": 0.2}},
            f"algorithm: clip_ratio_low: the loss of {kind} has no lower bound of the importance ratio; remove it",
        )
        for kind in ("cispo", "gmpo")
    ]
    + [
        (
            {"algorithm": {"type": "grpo", "kl_loss": {"kind": "k1"}}},
            "algorithm.kl_loss: kind needs to be k2 or k3, got k1: on samples of the policy the expected gradient of "
            "log pi - log pi_ref is 0, so that as a loss it adds noise and no penalty",
        ),
        (
            {"trainer": {"batch_size": 64}},
            "RunConfig: trainer.batch_size is a key of sft, rm and dpo; train samples algorithm.prompts_per_step * "
            "algorithm.group_size completions in a step",
        ),
        *(
            (
                {"rollout": {"sampling": {name: got}}},
                f"rollout.sampling: {name} needs to be {full} in training, got {got}: completions would come from a "
                "truncated distribution, while ratios and mismatch metrics compare the full ones and cannot see the "
                "difference",
            )
            for name, got, full in (("top_p", 0.95, 1), ("top_k", 50, -1))
        ),
    ],
)
def test_fields_without_effect_are_refused(sections: dict[str, Any], message: str) -> None:
    assert error_message(**sections) == message


def test_resolved_configurations_of_all_algorithms_load_again() -> None:
    """A resolved configuration has every key, so that none of them may be one that is refused."""
    for kind in ("gspo", "cispo", "gmpo", "grpo", "ppo", "prime"):
        config = make_run(algorithm={"type": kind})
        assert RunConfig.model_validate(config.model_dump(mode="json")) == config


def test_the_full_distribution_may_be_written_out() -> None:
    assert make_run(rollout={"sampling": {"top_p": 1, "top_k": -1}}).rollout.sampling.top_p == 1


def test_unusual_but_valid_settings_are_accepted() -> None:
    assert make_run(algorithm={"type": "grpo", "kl_reward": {}, "allow_double_kl": True}).algorithm.uses_reference
    assert make_run(algorithm={"type": "remax", "group_size": 1}).algorithm.group_size == 1
    assert make_run(algorithm={"type": "vapo"}, trainer={"steps": 10}).trainer.steps == 10
    prime = make_run(algorithm={"type": "prime", "reference": {"path": "ref"}})
    assert prime.algorithm.uses_reference


MODEL = {"type": "model", "path": "rm"}


def test_evaluation_uses_rules_only() -> None:
    config = make_run(
        reward={"terms": {"rm": MODEL, "accuracy": {"type": "numeric"}}}, data={"path": "d", "eval_path": "e"}
    )
    assert config.reward.eval_name == "accuracy"
    assert (config.reward.rules, list(config.reward.models)) == (["accuracy"], ["rm"])
    assert error_message(reward={"terms": {"rm": MODEL, "a": {}}, "eval_term": "rm"}) == (
        "reward: eval_term needs to be a rule, got 'rm', which is a model: evaluation does not load reward models"
    )


def test_evaluation_needs_a_rule() -> None:
    assert make_run(reward={"terms": {"rm": MODEL}}).reward.rules == []
    assert error_message(reward={"terms": {"rm": MODEL}}, data={"path": "d", "eval_path": "e"}) == (
        "RunConfig: data.eval_path: evaluation scores completions by rules, but reward.terms has only models, ['rm']; "
        "remove it, or add a rule (with weight: 0 it does not change the reward)"
    )
    assert error_message(reward={"terms": {"rm": MODEL}}, algorithm={"type": "dapo"}) == (
        "RunConfig: algorithm.filter_metric needs to be one of ['rm'], as no term is a rule, got null"
    )


def test_reward_models_have_no_timeout() -> None:
    assert error_message(reward={"terms": {"rm": MODEL | {"timeout_seconds": 1}}}) == (
        "reward.terms.rm.timeout_seconds: unknown key"
    )


def test_reward_models_do_not_score_the_greedy_completions_of_a_schedule() -> None:
    sections = {"algorithm": {"type": "remax"}, "reward": {"terms": {"rm": {"type": "model", "path": "p"}}}}
    make_run(**sections)
    message = error_message(**sections, schedule={"type": "async"})
    assert "schedule.type: remax with reward models needs sync, got async: they do not score the greedy" in message


@pytest.mark.parametrize(
    ("algorithm", "term"),
    [({"type": "dapo", "filter_metric": "a"}, "a"), ({"type": "safe_rlhf", "cost_term": "b"}, "b")],
)
def test_sources_have_the_terms_that_the_algorithm_looks_at(algorithm: dict[str, Any], term: str) -> None:
    other = {"a": "b", "b": "a"}[term]
    reward = {"terms": {"a": {"type": "numeric"}, "b": {"type": "format"}}}

    def sources(*terms: str) -> dict[str, Any]:
        return {"sources": {"x": {"path": "x.jsonl", "ratio": 1.0, "reward_terms": list(terms)}}}

    make_run(algorithm=algorithm, reward=reward, data=sources(term))
    message = error_message(algorithm=algorithm, reward=reward, data=sources(other))
    assert f"data.sources.x.reward_terms needs '{term}', which {algorithm['type']} looks at in every" in message
