"""The sections of a run: defaults, and settings that are refused, with the reason and the YAML path."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any, Literal, get_args

import pytest
import torch

from megarl.config import RunConfig, SftConfig, dump_config, load_config
from megarl.config.commands import ScoreConfig
from megarl.config.limits import AUTO_LIMITS, LimitConfig, LimitsConfig
from megarl.config.load import make_config
from megarl.config.rollout import EngineConfig
from megarl.config.run import data_paths, model_paths
from megarl.config.section import Section
from megarl.data.sampler import PromptOrder
from megarl.errors import ConfigError
from megarl.run.schedule.settings import Late, SchedulePolicy, Update
from tests.config.runs import error_message, flow, has_parts, make_run


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        ("type: grpo, critic: {}", "algorithm: critic: grpo has no critic ... choose ppo"),
        ("type: remax, critic: {path: c}", "algorithm: critic: remax has no critic ... choose ppo"),
        ("type: ppo, cost_critic: {}", "algorithm: cost_critic: ppo has no costs ... choose safe_rlhf"),
        ("type: grpo, kl_reward: {}", "algorithm: kl_loss and kl_reward are both set ... allow_double_kl: true"),
        ("type: rloo, group_size: 1", "algorithm: group_size needs to be at least 2, got 1: rloo compares"),
        ("type: ppo, clip_ratio_low: 1.0", "algorithm: clip_ratio_low needs to be below 1, got 1: ratios"),
        ("type: gspo, clip_ratio_low: 1.5", "algorithm: clip_ratio_low needs to be below 1, got 1.5: ratios"),
        ("type: prime, min_accuracy: 0.9", "algorithm: min_accuracy ... at most max_accuracy, got 0.9 > 0.8"),
        ("type: ppo, decoupled: {}, rollout_is: {}", "algorithm: decoupled and rollout_is are both set"),
        ("type: gspo, decoupled: {}", "algorithm: decoupled: the loss of gspo ... or set rollout_is"),
        ("rollout_is: {low: 3.0}", "algorithm.rollout_is: low needs to be below high, got 3 >= 2 for token_tis"),
        ("rollout_is: {kind: icepop, low: 0.5, high: 0.5}", "algorithm.rollout_is: low ... got 0.5 >= 0.5 for icepop"),
        ("length_norm: 512", "algorithm: length_norm ... got length_norm = 512 with aggregation = token-mean"),
        ("kl_loss: {coefficient: 0}", "algorithm.kl_loss: coefficient needs to be above 0, got 0 ... to null"),
        (
            "kl_loss: null, reference: {path: r}",
            "algorithm: reference.path is set, but no reference model is used: kl_loss and kl_reward are null",
        ),
        (
            "type: distillation, teacher: {path: t}, kl_reward: {}",
            "algorithm: kl_reward ... the advantages of distillation come from its teacher ... or use kl_loss",
        ),
        (
            "type: prime, kl_reward: {}",
            "algorithm: kl_reward ... the advantages of prime come from its reward model and outcomes ... kl_loss",
        ),
        ("type: distillation", "algorithm: teacher.path is required"),
        ("preset: papr", "algorithm: preset: grpo has the presets default, paper, ... got 'papr'"),
        (
            "type: ppo, critic: {warmup_steps: 10}",
            "RunConfig: algorithm.critic.warmup_steps needs to be below trainer.steps, got 10 >= 10",
        ),
        ("type: dapo, filter_metric: acc", "RunConfig: algorithm.filter_metric ... one of ['accuracy'], got 'acc'"),
        ("type: safe_rlhf", "RunConfig: algorithm.cost_term needs to be one of ['accuracy'], got 'cost'"),
        (
            "type: safe_rlhf, cost_term: accuracy",
            "RunConfig: algorithm.cost_term: 'accuracy' is the only term of reward.terms",
        ),
        ("type: grpo, kl_loss: {kind: k1}", "algorithm.kl_loss: kind needs to be k2 or k3, got k1 ... gradient"),
        *(
            (f"type: {kind}, dual_clip: 3.0", f"algorithm: dual_clip: the loss of {kind} has no dual clip; remove it")
            for kind in ("gspo", "cispo", "gmpo")
        ),
        *(
            (f"type: {kind}, clip_ratio_low: 0.2", f"algorithm: clip_ratio_low: the loss of {kind} has no lower bound")
            for kind in ("cispo", "gmpo")
        ),
    ],
)
def test_contradictory_algorithm_settings_are_rejected(algorithm: str, message: str) -> None:
    assert has_parts(error_message(algorithm=flow(algorithm), trainer={"steps": 10}), message)


def test_resolved_configurations_of_all_algorithms_load_again() -> None:
    """A resolved configuration has every key, so that none of them may be one that is refused."""
    for kind in ("gspo", "cispo", "gmpo", "grpo", "ppo", "prime"):
        config = make_run(algorithm={"type": kind})
        assert RunConfig.model_validate(config.model_dump(mode="json")) == config


def test_unusual_but_valid_settings_are_accepted() -> None:
    assert make_run(rollout={"sampling": {"top_p": 1, "top_k": -1}}).rollout.sampling.top_p == 1
    assert make_run(algorithm={"type": "grpo", "kl_reward": {}, "allow_double_kl": True}).algorithm.uses_reference
    assert make_run(algorithm={"type": "remax", "group_size": 1}).algorithm.group_size == 1
    assert make_run(algorithm={"type": "vapo"}, trainer={"steps": 10}).trainer.steps == 10
    assert make_run(algorithm={"type": "prime", "reference": {"path": "ref"}}).algorithm.uses_reference
    make_run(algorithm={"type": "remax"}, reward={"terms": {"rm": MODEL}})  # no schedule needs to send its scores


MODEL = {"type": "model", "path": "rm"}


def test_evaluation_uses_rules_only() -> None:
    terms = {"rm": MODEL, "accuracy": {"type": "numeric"}}
    config = make_run(reward={"terms": terms}, data={"path": "d", "eval_path": "e"})
    assert config.reward.eval_name == "accuracy"
    assert (config.reward.rules, list(config.reward.models)) == (["accuracy"], ["rm"])
    assert make_run(reward={"terms": {"rm": MODEL}}).reward.rules == []


MODELS_ONLY = "reward: {terms: {rm: {type: model, path: rm}}}"


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ("trainer: {batch_size: 64}", "RunConfig: trainer.batch_size is a key of sft, rm and dpo"),
        ("rollout: {sampling: {top_p: 0.95}}", "rollout.sampling: top_p needs to be 1 in training, got 0.95"),
        ("rollout: {sampling: {top_k: 50}}", "rollout.sampling: top_k needs to be -1 in training, got 50"),
        (
            "reward: {eval_term: rm, terms: {rm: {type: model, path: rm}, a: {}}}",
            "reward: eval_term needs to be a rule, got 'rm', which is a model",
        ),
        (
            f"{MODELS_ONLY}, data: {{path: d, eval_path: e}}",
            "RunConfig: data.eval_path: ... reward.terms has only models, ['rm'] ... add a rule (with weight: 0",
        ),
        (
            f"{MODELS_ONLY}, algorithm: {{type: dapo}}",
            "RunConfig: algorithm.filter_metric needs to be one of ['rm'], as no term is a rule, got null",
        ),
        ("reward: {terms: {m: {type: model, path: m, timeout_seconds: 1}}}", "reward.terms.m.timeout_seconds: unknown"),
        (
            f"{MODELS_ONLY}, algorithm: {{type: remax}}, schedule: {{type: async}}",
            "... schedule.type: remax with reward models needs sync, got async",
        ),
        (
            "trainer: {optimizer: {min_lr: 1.0e-5}}",
            "trainer.optimizer: min_lr needs to be at most lr = 1e-06, got 1e-05",
        ),
        (
            "algorithm: {type: ppo, critic: {optimizer: {min_lr: 0.1, decay: linear}}}",
            "algorithm.critic.optimizer: min_lr needs to be at most lr = 1e-05, got 0.1",
        ),
        (
            "trainer: {megatron: {optimizer: {decoupled_lr: 1.0e-5, decoupled_min_lr: 1.0e-4}}}",
            "trainer.megatron: optimizer.decoupled_min_lr needs to be from 0 to decoupled_lr = 1e-05, got 0.0001",
        ),
        (
            "trainer: {megatron: {optimizer: {decoupled_min_lr: 1.0e-4}}}",
            "trainer.megatron: optimizer.decoupled_min_lr needs decoupled_lr, got 0.0001 alone",
        ),
        (
            "trainer: {megatron: {optimizer: {decoupled_lr: 1.0e-8}}, optimizer: {min_lr: 1.0e-7}}",
            "trainer: megatron.optimizer.decoupled_lr needs to be at least optimizer.min_lr = 1e-07, got 1e-08",
        ),
        ("seed: 9223372036854775808", "seed: Input should be less than or equal to 9223372036854775807"),
        ("limits: {reward: 0.5}", "limits: reward needs max or min, as in {min: 0.5}, got 0.5"),
        ("limits: {kl: {action: warn}}", "limits.kl: a limit needs max or min"),
        ("limits: {reward: {min: 2, max: 2}}", "limits.reward: min needs to be below max, got 2 >= 2"),
        ("limits: {logprob_abs_max: 0}", "limits: logprob_abs_max.max needs to be above 0, got 0"),
        ("limits: {grad_norm: {max: -1}}", "limits: grad_norm.max needs to be above 0, got -1"),
        ("limits: {kl: true}", "limits.kl: needs a mapping, got True"),
        ("limits: {kl: .nan}", "limits.kl.max: Input should be a finite number, got nan"),
        ("limits: {kl: {max: 1, action: halt}}", "limits.kl.action: ... 'warn', 'skip' or 'stop', got 'halt'"),
        ("limits: {kl: {maximum: 1}}", "limits.kl.maximum: unknown key"),
        ("limits: {not_finite: warn}", "limits.not_finite: Input should be 'skip' or 'stop', got 'warn'"),
        ("limits: {max_skips_in_a_row: -1}", "limits.max_skips_in_a_row: ... greater than or equal to 0, got -1"),
        (
            "limits: {kl: 1}, algorithm: {kl_loss: null}",
            "RunConfig: limits.kl needs algorithm.kl_loss or algorithm.kl_reward ... got null",
        ),
        ("schedule: {type: async, lookahead: 4, max_staleness: 2}", "schedule: lookahead ... max_staleness, got 4 > 2"),
        ("schedule: {lookahead: 2}", "schedule: lookahead needs to be 0 with type: sync, got 2; type: async takes"),
        ("schedule: {type: one_step_off, update: retract}", "schedule: update ... drain ... one_step_off, got retract"),
        ("schedule: {adapt_lookahead: true}", "schedule: adapt_lookahead ... false with type: sync, got true"),
        ("schedule: {type: async, lookahead: -1}", "schedule.lookahead: ... greater than or equal to 0"),
    ],
)
def test_settings_without_meaning_or_effect_are_refused(sections: str, message: str) -> None:
    assert has_parts(error_message(**flow(sections)), message)


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


def limits(given: dict[str, Any] | None = None, *overrides: str) -> LimitsConfig:
    return make_run(*overrides, limits=given or {}).limits


def test_defaults_limit_the_mismatch_and_values_that_are_not_finite() -> None:
    got = limits()
    assert got.mismatch == {}
    for dtype, known in AUTO_LIMITS.items():
        resolved = {key: limit.max for key, limit in got.resolved(dtype).mismatch.items()}
        assert resolved == {key: each.limit for key, each in known.items()}
        assert all(each.healthy[1] < each.limit for each in known.values())
    assert limits({"logprob_kl": None}).resolved("float32").logprob_kl is None
    assert limits({"logprob_kl": 3}).resolved("float32").logprob_kl == LimitConfig(max=3)
    assert (got.logprob_abs_max, got.kl, got.reward, got.grad_norm) == (None, None, None, None)
    assert (got.not_finite, got.max_skips_in_a_row) == ("stop", 3)


def test_a_plain_number_is_a_maximum_with_action_stop() -> None:
    assert limits({"kl": 1}).kl == LimitConfig(max=1.0, min=None, action="stop")
    got = limits({}, "limits.logprob_abs_max=1e-3", "limits.kl.max=0.2", "limits.kl.action=skip")
    assert (got.logprob_abs_max, got.kl) == (LimitConfig(max=1e-3), LimitConfig(max=0.2, action="skip"))
    assert limits({"kl": 1}, "algorithm={kl_loss: null, kl_reward: {}}").kl == LimitConfig(max=1)


def test_limits_survive_the_round_trip(tmp_path: Any) -> None:
    config = make_run(limits={"kl": 0.5, "reward": {"min": -2, "action": "warn"}, "not_finite": "skip"})
    text = dump_config(config)
    assert "  kl:\n    max: 0.5\n    min: null\n    action: stop\n" in text
    (tmp_path / "run.yaml").write_text(text)
    assert load_config(RunConfig, tmp_path / "run.yaml") == config


@pytest.mark.parametrize(
    ("limit", "value", "message"),
    [
        ({"max": 0.5}, 0.5, None),
        ({"max": 0.5}, 0.7, "a/b = 0.7 passed limits.k = 0.5"),
        ({"max": 1e-12}, 3.21e-5, "a/b = 3.21e-05 passed limits.k = 1e-12"),
        ({"max": 0.5}, math.nan, "a/b = nan passed limits.k = 0.5"),
        ({"max": 0.5}, -math.inf, None),
        ({"min": -1}, -1.0, None),
        ({"min": -1}, -1.5, "a/b = -1.5 passed limits.k.min = -1"),
        ({"min": -1}, math.nan, "a/b = nan passed limits.k.min = -1"),
        ({"min": -1, "max": 1}, 0.0, None),
        ({"min": -1, "max": 1}, math.inf, "a/b = inf passed limits.k = 1"),
    ],
)
def test_violations_include_nan(limit: dict[str, Any], value: float, message: str | None) -> None:
    assert LimitConfig.model_validate(limit).violation("k", "a/b", value) == message


def policy(**settings: object) -> SchedulePolicy:
    return SchedulePolicy.of(make_run(schedule=settings).schedule)


def test_defaults_by_type() -> None:
    assert policy() == policy(type="sync") == SchedulePolicy(update=Update.DRAIN, in_order=True)
    one_step_off = SchedulePolicy(lookahead=1, max_staleness=1, update=Update.DRAIN, in_order=True)
    assert policy(type="one_step_off") == policy(type="one_step_off", lookahead=1) == one_step_off
    asynchronous = SchedulePolicy(lookahead=3, max_staleness=8, update=Update.RETRACT, adapt_lookahead=True)
    assert policy(type="async") == asynchronous
    assert not policy(type="async", adapt_lookahead=False).adapt_lookahead


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"lookahead": 0, "max_staleness": 0}, (0, 0)),
        ({"max_staleness": 2}, (2, 2)),
        ({"lookahead": 10}, (10, 10)),
        ({"lookahead": 2}, (2, 8)),
    ],
)
def test_async_settings(given: dict[str, int], expected: tuple[int, int]) -> None:
    got = policy(type="async", late="mask", update="abort", **given)
    assert (got.lookahead, got.max_staleness) == expected
    assert (got.late, got.update, got.in_order) == (Late.MASK, Update.ABORT, False)


def test_in_place_refuses_arguments_that_contradict_those_it_sets() -> None:
    schedule, other = (make_run(schedule={"type": "async", "update": u}).schedule for u in ("in_place", "retract"))
    assert not list(schedule.engine_problems(EngineConfig()))
    wrong = {"disable_overlap_schedule": False, "disable_radix_cache": True, "chunked_prefill_size": 2048}
    overlap, chunked = schedule.engine_problems(EngineConfig(extra_args=wrong))
    assert overlap.startswith("schedule.update: in_place sets rollout.engine.extra_args.disable_overlap_schedule, ")
    assert "which needs to be true, got false: " in overlap
    assert "chunked_prefill_size, which needs to be -1, got 2048: " in chunked
    assert not list(other.engine_problems(EngineConfig(extra_args=wrong)))


PPO = {"type": "ppo", "kl_reward": None}


def test_all_models_are_in_the_main_pool_by_default() -> None:
    terms = {"a": {}, "cost": {"type": "model", "path": "cm"}}
    config = make_run(algorithm={"type": "safe_rlhf"}, reward={"terms": terms})
    assert [(each.name, each.key, each.path, each.head, each.pool) for each in config.auxiliary_models] == [
        ("reference", "algorithm.reference", "m", "lm", "main"),
        ("critic", "algorithm.critic", "m", "value", "main"),
        ("cost_critic", "algorithm.cost_critic", "m", "value", "main"),
        ("reward cost", "reward.terms.cost", "cm", "value", "main"),
    ]
    assert [each.optimizer is None for each in config.auxiliary_models] == [True, False, False, True]
    assert config.placement.total_slots == config.placement.slots == 1


def test_auxiliary_models_of_other_algorithms() -> None:
    assert make_run(algorithm={"kl_loss": None}).auxiliary_models == ()
    prime = make_run(algorithm={"type": "prime", "reward_model": {"path": "prm"}})
    assert [(each.name, each.role, each.path, each.head) for each in prime.auxiliary_models] == [
        ("reference", "reference", "m", "lm"),
        ("reward_model", "reward_models", "prm", "lm"),
    ]
    (teacher,) = make_run(algorithm={"type": "distillation", "teacher": {"path": "t", "parallel": {}}}).auxiliary_models
    assert (teacher.name, teacher.parallel_key, teacher.optimizer) == ("teacher", "algorithm.teacher.parallel", None)


def test_critic_in_its_own_pool() -> None:
    config = make_run(
        algorithm=PPO | {"critic": {"parallel": {"tp": 2}}},
        placement={"slots_per_node": 3, "pools": {"b": {"nodes": 2, "slots_per_node": 2}}, "critic": {"pool": "b"}},
    )
    (critic,) = config.auxiliary_models
    assert critic.pool == "b"
    assert (config.placement.slots, config.placement.total_slots) == (3, 7)
    assert config.placement.all_pools["b"].slots == 4


@pytest.mark.parametrize(
    ("placement", "message"),
    [
        ("critic: {pool: b}", "placement: critic.pool needs one of ['main'], got 'b'"),
        ("pools: {b: {}, c: {}}, critic: {pool: d}", "placement: critic.pool ... one of ['main', 'b', 'c'], got 'd'"),
        ("pools: {b: {}}", "placement: pools.b: the pool is not used; assign one of rollout, critic, ... to it"),
        ("pools: {main: {}}", "placement: pools.main: this name is reserved ... placement.slots_per_node"),
        (
            "pools: {b: {}}, teacher: {pool: b}",
            "RunConfig: placement.teacher.pool is 'b', but the run has no such model",
        ),
        (
            "pools: {b: {slots_per_node: 3}}, critic: {pool: b}",
            "RunConfig: placement.pools.b ... algorithm.critic.parallel tp * pp * cp ... "
            "= 1 * 3 = 3, ... = 2 * 1 * 1 = 2, 3 % 2 = 1",
        ),
        (
            "nodes: 2, slots_per_node: 1",
            "RunConfig: algorithm.critic.parallel tp ... a node ... placement slots_per_node % tp = 1 % 2 = 1",
        ),
        (
            "nodes: 4, slots_per_node: 1, nvlink_domain_nodes: 3",
            "placement: nvlink_domain_nodes needs to divide nodes, got 4 % 3 = 1",
        ),
        (
            "slots_per_node: 5",
            "RunConfig: placement ... algorithm.critic.parallel tp * pp * cp ... = 1 * 5 = 5, ... 5 % 2 = 1",
        ),
    ],
)
def test_invalid_pools_are_rejected(placement: str, message: str) -> None:
    found = error_message(algorithm=PPO | {"critic": {"parallel": {"tp": 2}}}, placement=flow(placement))
    assert has_parts(found, message)


LARGE_POOL = {"pools": {"b": {"nodes": 5, "slots_per_node": 4}}, "rollout": {"pool": "b"}}
LARGE = "placement: {pools: {b: {nodes: 5, slots_per_node: 4}}, rollout: {pool: b}}"


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            "trainer: {parallel: {tp: 2}}, placement: {slots_per_node: 2, pools: {b: {}}, critic: {pool: b}}",
            "RunConfig: placement.pools.b ... trainer.parallel, for algorithm.critic, ... 1 % 2 = 1",
        ),
        (
            "algorithm: {type: ppo, critic: {parallel: {ep: 2}}}, placement: {pools: {b: {}}, critic: {pool: b}}",
            "... algorithm.critic.parallel etp * ep needs to divide ... slots / pp = 1 / 1 = 1, 1 % 2 = 1",
        ),
        (
            f"rollout: {{tp: 4, replicas: 6}}, {LARGE}",
            "RunConfig: rollout needs tp * replicas <= slots, got 4 * 6 = 24 > 20 (placement.pools.b.nodes *",
        ),
        (
            f"rollout: {{tp: 6}}, {LARGE}",
            "RunConfig: rollout.tp needs to fit on one node or to fill several, got ... = 6 % 4 = 2",
        ),
        (
            "rollout: {tp: 8}, placement: {nodes: 2, slots_per_node: 4}",
            "RunConfig: rollout.tp needs to fit on one node, got rollout.tp = 8 > placement.slots_per_node = 4; only",
        ),
        (
            "placement: {pools: {b: {}}, rollout: {pool: b}, critic: {pool: b}}",
            "RunConfig: placement.critic.pool is 'b', the pool of the engines; engines can share only the pool 'main'",
        ),
        (
            "trainer: {parallel: {tp: 8}}, placement: {nodes: 6, slots_per_node: 4, nvlink_domain_nodes: 3}",
            "RunConfig: trainer.parallel tp needs to divide the slots of an NVLink domain, ... = 4 * 3 % 8 = 4",
        ),
        *(
            (
                f"placement: {{pools: {{b: {{}}}}, rollout: {{pool: b}}}}, weight_sync: {{strategy: {strategy}}}",
                f"RunConfig: weight_sync.strategy needs to be auto or exact ... pool is 'b'), got {strategy}",
            )
            for strategy in ("gather_hf", "micro_dp")
        ),
    ],
)
def test_models_and_engines_need_to_fit_their_pools(sections: str, message: str) -> None:
    assert has_parts(error_message(**{"algorithm": PPO, **flow(sections)}), message)


def test_sft_has_neither_auxiliary_models_nor_engines() -> None:
    for name, lacks in (("critic", "the run has no such model"), ("rollout", "the stage has no engines")):
        assert error_message(SftConfig, placement={"pools": {"b": {}}, name: {"pool": "b"}}) == (
            f"SftConfig: placement.{name}.pool is 'b', but {lacks}"
        )


def test_engines_in_their_own_pool() -> None:
    config = make_run(rollout={"tp": 4, "replicas": 5}, placement=LARGE_POOL)
    assert (config.rollout_pool.slots, config.placement.slots, config.placement.total_slots) == (20, 1, 21)
    for tp, replicas, nodes in ((2, 1, 1), (4, 1, 1), (8, 1, 2), (20, 1, 5), (8, 2, 2)):
        rollout = {"tp": tp, "replicas": replicas}
        assert make_run(rollout=rollout, placement=LARGE_POOL).nodes_per_engine == nodes
    assert not make_run().disaggregated
    assert make_run(placement=LARGE_POOL, weight_sync={"strategy": "exact"}).disaggregated


def test_tensor_parallel_groups_stay_within_one_nvlink_domain() -> None:
    domains = {"nodes": 4, "slots_per_node": 4, "nvlink_domain_nodes": 2}
    assert make_run(trainer={"parallel": {"tp": 8}}, placement=domains).dp == 2
    assert make_run(trainer={"parallel": {"tp": 3}}, placement={"slots_per_node": 3}).dp == 1


def sections_of(kind: type[Section]) -> Iterator[type[Section]]:
    for below in kind.__subclasses__():
        yield below
        yield from sections_of(below)


def test_all_files_and_folders_may_begin_with_the_home_folder() -> None:
    found = {
        f"{kind.__name__}.{name}": "expand_home" in f"{field.metadata} {get_args(field.annotation)}"
        for kind in sections_of(Section)
        for name, field in kind.model_fields.items()
        if kind.__module__.startswith("megarl.") and re.search(r"(^|_)(path|dir|file|folder)$", name)
        if not str(field.description).startswith("Import path")
    }
    assert {"ModelConfig.path", "RunConfig.run_dir", "DpoConfig.export_dir", "SourceConfig.eval_path"} < found.keys()
    assert [name for name, expands in found.items() if not expands] == []


def test_home_folders_are_expanded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/h")
    config = make_run(
        run_dir="~/r",
        export_dir="~",
        model={"path": "~/m"},
        data={"sources": {"a": {"path": "~/d", "eval_path": "~/e", "ratio": 1.0}}},
        algorithm={"type": "ppo", "critic": {"path": "~/c"}, "kl_reward": {}, "reference": {"path": "~/f"}},
        reward={"terms": {"rm": {"type": "model", "path": "~/rm"}, "n": {}}},
        rollout={
            "harness": {"command": ["~/bin/agent", "--at=~/x", "~/y", "~no-such-user"]},
            "engine": {"extra_args": {"crash_dump_folder": "~/dumps", "page_size": 1}},
        },
    )
    assert (config.run_dir, config.export_dir, config.model.path) == ("/h/r", "/h", "/h/m")
    assert data_paths(config) == {"data.sources.a.path": "/h/d", "data.sources.a.eval_path": "/h/e"}
    assert set(model_paths(config).values()) == {"/h/m", "/h/c", "/h/f", "/h/rm"}
    assert config.rollout.harness is not None
    assert config.rollout.harness.command == ["/h/bin/agent", "--at=~/x", "/h/y", "~no-such-user"], "as shells do"
    assert config.rollout.engine.extra_args == {"crash_dump_folder": "/h/dumps", "page_size": 1}
    assert make_run(run_dir="./~", data={"path": "hf://datasets/o/n/~x"}).run_dir == "./~"
    message = error_message(run_dir="~no-such-user/x")
    assert (
        message
        == "run_dir: the home folder of ~no-such-user is not known; write ./~no-such-user for a file of this name"
    )


def test_seeds_of_63_bits_are_those_that_all_generators_take() -> None:
    largest = 2**63 - 1
    assert make_run(seed=largest).seed == ScoreConfig(model={"path": "m"}, seed=largest).seed == largest
    torch.Generator().manual_seed(largest + 2718 + 1024 * 1024)  # what Megatron adds for ranks, and more
    assert PromptOrder(5, largest, shuffle=True).row_at(3) < 5
    with pytest.raises(ValueError, match="Overflow"):
        torch.Generator().manual_seed(2**64)


class Weights(Section):
    by_name: dict[str, float]
    either: bool | float = 0.0
    text: str = ""
    list_of: list[int | None] = []  # noqa: RUF012 -- a field
    auto: float | Literal["auto"] = "auto"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"by_name": {"a": 1, "b": True}}, "by_name: needs a number, got True"),
        ({"by_name": {"a": "010"}}, "by_name: needs a number without leading zeros"),
        ({"by_name": {}, "list_of": [1, None, False]}, "list_of: needs a number, got False"),
        ({"by_name": {}, "auto": True}, "auto: needs a number, got True"),
        ({"by_name": {"a": "1.5"}, "either": True, "text": "010", "list_of": [1, None], "auto": "auto"}, None),
    ],
)
def test_numbers_in_containers_are_no_booleans(fields: dict[str, Any], message: str | None) -> None:
    if message is None:
        assert make_config(Weights, fields) == Weights(by_name={"a": 1.5}, either=True, text="010", list_of=[1, None])
        return
    with pytest.raises(ConfigError, match=f"^{message}"):
        make_config(Weights, fields)
