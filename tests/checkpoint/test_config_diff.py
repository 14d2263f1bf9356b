"""Which configuration keys may change on resume, and the error that lists the differences."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from megarl.checkpoint.config_diff import ABSENT, diff_configs, require_no_contradictions
from megarl.config import RunConfig
from megarl.config.load import make_config
from megarl.errors import ConfigError


def make_tree(*overrides: str) -> dict[str, Any]:
    given = {"run_dir": "runs/a", "model": {"path": "m"}, "data": {"path": "d.jsonl"}}
    return make_config(RunConfig, given, overrides).model_dump(mode="json")


def find_differences(*overrides: str, saved: tuple[str, ...] = ()) -> dict[str, bool]:
    """Return the path of each difference and whether it is allowed."""
    return {each.path: each.allowed for each in diff_configs(make_tree(*saved), make_tree(*saved, *overrides))}


def test_equal_configurations_have_no_differences() -> None:
    assert diff_configs(make_tree(), copy.deepcopy(make_tree())) == []


WHERE = (
    "run_dir=runs/b", "export_dir=out", "model.path=elsewhere/m", "data.path=elsewhere/d.jsonl", "trainer.steps=200",
    "trainer.offload.weights=true", "trainer.recompute.granularity=full", "trainer.max_tokens_per_micro_batch=99",
    "trainer.eval_every=3", "rollout.workers=3", "rollout.request_timeout_seconds=3", "rollout.engine.mem_fraction=0.5",
    "rollout.engine.extra_args={cuda_graph_config: {b: 1}}", "placement.device=cpu", "weight_sync.bucket_bytes=77",
    "tracking.wandb={project: p}", "limits.logprob_abs_max=0.1", "checkpoint.every=3", "recovery.max_restarts=3",
    "reward.max_failed_share=0.5", "reward.terms.accuracy.timeout_seconds=1",
)  # fmt: skip
"""Changes of where and how a run computes."""

WHAT = (
    "seed=1", "model.dtype=float32", "data.shuffle=false", "data.eval_path=e.jsonl", "trainer.optimizer.lr=3e-6",
    "data.prompt_template='Q: {prompt}'", "trainer.optimizer.clip_grad=3", "rollout.sampling.temperature=0.5",
    "rollout.max_new_tokens=77", "algorithm.group_size=4", "algorithm.kl_loss=null",
    "algorithm.kl_loss.coefficient=0.5", "algorithm.reference.path=r", "reward.terms.accuracy.weight=2",
    "reward.eval_term=accuracy",
)  # fmt: skip
"""Changes of what a run computes."""


@pytest.mark.parametrize("override", WHERE)
def test_keys_that_set_where_a_run_computes_may_change(override: str) -> None:
    assert set(find_differences(override).values()) == {True}


@pytest.mark.parametrize("override", WHAT)
def test_keys_that_set_what_a_run_computes_may_not_change(override: str) -> None:
    assert find_differences(override) == {override.partition("=")[0]: False}


def test_parallel_sizes_and_pools_may_change() -> None:
    split = ("placement.slots_per_node=4", "trainer.parallel.tp=2", "rollout.tp=2", "rollout.replicas=2")
    assert find_differences(*split) == dict.fromkeys((override.partition("=")[0] for override in split), True)
    assert find_differences("placement.pools={b: {}}", "placement.rollout.pool=b") == {
        "placement.pools.b": True,
        "placement.rollout.pool": True,
    }


def test_parallel_sizes_of_auxiliary_models_may_change() -> None:
    ppo = ("algorithm.type=ppo", "reward.terms.m={type: model, path: rm}", "placement.slots_per_node=2")
    split = [f"{model}.parallel={{tp: 2}}" for model in ("algorithm.critic", "algorithm.reference", "reward.terms.m")]
    assert set(find_differences(*split, saved=ppo).values()) == {True}
    assert len(find_differences(*split, saved=ppo)) == 3
    assert find_differences("algorithm.critic.parallel.pp=2", saved=(*ppo, *split, "placement.slots_per_node=4")) == {
        "algorithm.critic.parallel.pp": True
    }


@pytest.mark.parametrize("trained", ["trainer", "algorithm.critic"])
def test_steps_may_not_change_with_learning_rate_decay(trained: str) -> None:
    ppo = ("algorithm.type=ppo",)
    assert find_differences("trainer.steps=200", saved=ppo) == {"trainer.steps": True}
    assert find_differences("trainer.steps=200", saved=(*ppo, f"{trained}.optimizer.decay=cosine")) == {
        "trainer.steps": False
    }


def test_keys_of_another_algorithm_are_absent() -> None:
    every = {each.path: each for each in diff_configs(make_tree(), make_tree("algorithm.type=dapo"))}
    assert (every["algorithm.type"].saved, every["algorithm.type"].current) == ("grpo", "dapo")
    assert every["algorithm.max_batches"].saved is ABSENT
    assert not every["algorithm.max_batches"].allowed
    assert list(every) == sorted(every)


def test_disallowed_differences_are_listed_first() -> None:
    changes = ("run_dir=runs/b", "seed=1", "checkpoint.every=3", "algorithm.kl_loss=null")
    with pytest.raises(ConfigError) as error:
        require_no_contradictions(diff_configs(make_tree(), make_tree(*changes)), "step-000020")
    first, *differences, last = str(error.value).splitlines()
    assert first == "the configuration contradicts that of checkpoint step-000020:"
    assert differences == [
        '  algorithm.kl_loss: {"coefficient": 0.001, "kind": "k3"} was saved, got null (contradicts)',
        "  seed: 0 was saved, got 1 (contradicts)",
        "  checkpoint.every: 20 was saved, got 3 (allowed)",
        '  run_dir: "runs/a" was saved, got "runs/b" (allowed)',
    ]
    assert "restore the saved values" in last


def test_allowed_differences_raise_no_error() -> None:
    changed = make_tree("run_dir=runs/b", "checkpoint.every=3")
    require_no_contradictions(diff_configs(make_tree(), changed), "step-000020")
