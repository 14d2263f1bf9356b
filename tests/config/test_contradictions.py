"""Contradictory settings are rejected with the reason and the YAML path."""

from __future__ import annotations

from typing import Any

import pytest

from megarl.config import RunConfig
from tests.config.runs import error_message, has_parts, make_run


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        ({"type": "grpo", "critic": {}}, "algorithm: critic: grpo has no critic ... choose ppo"),
        ({"type": "remax", "critic": {"path": "c"}}, "algorithm: critic: remax has no critic ... choose ppo"),
        ({"type": "ppo", "cost_critic": {}}, "algorithm: cost_critic: ppo has no costs ... choose safe_rlhf"),
        ({"type": "grpo", "kl_reward": {}}, "algorithm: kl_loss and kl_reward are both set ... allow_double_kl: true"),
        ({"type": "rloo", "group_size": 1}, "algorithm: group_size needs to be at least 2, got 1: rloo compares"),
        ({"type": "ppo", "clip_ratio_low": 1.0}, "algorithm: clip_ratio_low needs to be below 1, got 1: ratios"),
        ({"type": "gspo", "clip_ratio_low": 1.5}, "algorithm: clip_ratio_low needs to be below 1, got 1.5: ratios"),
        ({"type": "prime", "min_accuracy": 0.9}, "algorithm: min_accuracy ... at most max_accuracy, got 0.9 > 0.8"),
        ({"type": "ppo", "decoupled": {}, "rollout_is": {}}, "algorithm: decoupled and rollout_is are both set"),
        ({"type": "gspo", "decoupled": {}}, "algorithm: decoupled: the loss of gspo ... or set rollout_is"),
        ({"rollout_is": {"low": 3.0}}, "algorithm.rollout_is: low needs to be below high, got 3 >= 2 for token_tis"),
        (
            {"rollout_is": {"kind": "icepop", "low": 0.5, "high": 0.5}},
            "algorithm.rollout_is: low needs to be below high, got 0.5 >= 0.5 for icepop",
        ),
        ({"length_norm": 512}, "algorithm: length_norm ... got length_norm = 512 with aggregation = token-mean"),
        ({"kl_loss": {"coefficient": 0}}, "algorithm.kl_loss: coefficient needs to be above 0, got 0 ... to null"),
        (
            {"kl_loss": None, "reference": {"path": "ref"}},
            "algorithm: reference.path is set, but no reference model is used: kl_loss and kl_reward are null",
        ),
        (
            {"type": "distillation", "teacher": {"path": "t"}, "kl_reward": {}},
            "algorithm: kl_reward ... the advantages of distillation come from its teacher ... or use kl_loss",
        ),
        (
            {"type": "prime", "kl_reward": {}},
            "algorithm: kl_reward ... the advantages of prime come from its reward model and outcomes ... kl_loss",
        ),
        ({"type": "distillation"}, "algorithm: teacher.path is required"),
        ({"preset": "papr"}, "algorithm: preset: grpo has the presets default, paper, ... got 'papr'"),
        (
            {"type": "ppo", "critic": {"warmup_steps": 10}},
            "RunConfig: algorithm.critic.warmup_steps needs to be below trainer.steps, got 10 >= 10",
        ),
        (
            {"type": "dapo", "filter_metric": "acc"},
            "RunConfig: algorithm.filter_metric needs to be one of ['accuracy'], got 'acc'",
        ),
        ({"type": "safe_rlhf"}, "RunConfig: algorithm.cost_term needs to be one of ['accuracy'], got 'cost'"),
        (
            {"type": "safe_rlhf", "cost_term": "accuracy"},
            "RunConfig: algorithm.cost_term: 'accuracy' is the only term of reward.terms",
        ),
        (
            {"type": "grpo", "kl_loss": {"kind": "k1"}},
            "algorithm.kl_loss: kind needs to be k2 or k3, got k1 ... gradient",
        ),
    ]
    + [
        ({"type": kind, "dual_clip": 3.0}, f"algorithm: dual_clip: the loss of {kind} has no dual clip; remove it")
        for kind in ("gspo", "cispo", "gmpo")
    ]
    + [
        ({"type": kind, "clip_ratio_low": 0.2}, f"algorithm: clip_ratio_low: the loss of {kind} has no lower bound")
        for kind in ("cispo", "gmpo")
    ],
)
def test_contradictory_algorithm_settings_are_rejected(algorithm: dict[str, Any], message: str) -> None:
    assert has_parts(error_message(algorithm=algorithm, trainer={"steps": 10}), message)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"trainer": {"batch_size": 64}}, "RunConfig: trainer.batch_size is a key of sft, rm and dpo"),
        ({"rollout": {"sampling": {"top_p": 0.95}}}, "rollout.sampling: top_p needs to be 1 in training, got 0.95"),
        ({"rollout": {"sampling": {"top_k": 50}}}, "rollout.sampling: top_k needs to be -1 in training, got 50"),
    ],
)
def test_fields_without_effect_are_refused(sections: dict[str, Any], message: str) -> None:
    assert has_parts(error_message(**sections), message)


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
    terms = {"rm": MODEL, "accuracy": {"type": "numeric"}}
    config = make_run(reward={"terms": terms}, data={"path": "d", "eval_path": "e"})
    assert config.reward.eval_name == "accuracy"
    assert (config.reward.rules, list(config.reward.models)) == (["accuracy"], ["rm"])
    assert make_run(reward={"terms": {"rm": MODEL}}).reward.rules == []


@pytest.mark.parametrize(
    ("terms", "sections", "message"),
    [
        (
            {"a": {}},
            {"reward": {"eval_term": "rm"}},
            "reward: eval_term needs to be a rule, got 'rm', which is a model",
        ),
        (
            {},
            {"data": {"path": "d", "eval_path": "e"}},
            "RunConfig: data.eval_path: ... reward.terms has only models, ['rm'] ... add a rule (with weight: 0",
        ),
        (
            {},
            {"algorithm": {"type": "dapo"}},
            "RunConfig: algorithm.filter_metric needs to be one of ['rm'], as no term is a rule, got null",
        ),
        ({"rm": MODEL | {"timeout_seconds": 1}}, {}, "reward.terms.rm.timeout_seconds: unknown key"),
        (
            {},
            {"algorithm": {"type": "remax"}, "schedule": {"type": "async"}},
            "... schedule.type: remax with reward models needs sync, got async",
        ),
    ],
)
def test_what_reward_models_cannot_do(terms: dict[str, Any], sections: dict[str, Any], message: str) -> None:
    reward = {"terms": {"rm": MODEL} | terms} | sections.get("reward", {})
    assert has_parts(error_message(**sections | {"reward": reward}), message)


def test_reward_models_score_what_no_schedule_sends() -> None:
    make_run(algorithm={"type": "remax"}, reward={"terms": {"rm": MODEL}})


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
