"""Which models and configurations a checkpoint may resume with, and the errors that list the differences."""

import copy
import json
from typing import Any

import pytest

from megarl.checkpoint.manifest import CheckpointMetadata, ModelIdentity, require_same_model
from megarl.config import RunConfig
from megarl.config.load import make_config
from megarl.controller.resume import ABSENT, diff_configs, require_no_contradictions
from megarl.errors import ConfigError, DataError

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "rope_parameters": {"rope_theta": 10000.0},
    "dtype": "float32",
    "transformers_version": "5.0",
    "_name_or_path": "somewhere",
}


def test_dtype_path_and_version_do_not_change_the_identity():
    others = {"dtype": "bfloat16", "transformers_version": "4.0", "_name_or_path": "moved"}
    same = ModelIdentity.from_config(CONFIG | others)
    assert same == ModelIdentity.from_config(CONFIG)
    assert same == ModelIdentity.from_config(dict(reversed(CONFIG.items())))
    require_same_model(same, ModelIdentity.from_config(CONFIG), "step-000020")


def test_another_model_is_refused_with_every_differing_key():
    other = {**CONFIG, "hidden_size": 256, "architectures": ["Qwen2ForCausalLM"], "sliding_window": 8}
    assert ModelIdentity.from_config(other) != ModelIdentity.from_config(CONFIG)
    with pytest.raises(DataError) as error:
        require_same_model(ModelIdentity.from_config(CONFIG), ModelIdentity.from_config(other), "step-000020")
    assert str(error.value) == (
        "checkpoint step-000020 belongs to another model: needs architecture Qwen3ForCausalLM, got Qwen2ForCausalLM; "
        "hidden_size 128, got 256; sliding_window None, got 8"
    )


def test_metadata_lists_the_trained_models(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    tree = {"run_dir": "runs/a", "model": {"path": str(tmp_path)}, "data": {"path": "d.jsonl"}}
    overrides = ["algorithm.type=ppo", "placement.slots_per_node=4", "trainer.parallel.tp=2"]
    overrides += ["placement.pools={c: {slots_per_node: 2}}", "placement.critic.pool=c", "algorithm.critic.parallel={}"]
    metadata = CheckpointMetadata.from_config(make_config(RunConfig, tree, overrides))
    assert metadata.model == ModelIdentity.from_config(CONFIG)
    keys = ("tp", "pp", "cp", "ep", "world")
    sizes = {name: tuple(layout[key] for key in keys) for name, layout in metadata.layout.items()}
    assert sizes == {"policy": (2, 1, 1, 1, 4), "critic": (1, 1, 1, 1, 2)}


def make_tree(*overrides: str) -> dict[str, Any]:
    given = {"run_dir": "runs/a", "model": {"path": "m"}, "data": {"path": "d.jsonl"}}
    return make_config(RunConfig, given, overrides).model_dump(mode="json")


def find_differences(*overrides: str, saved: tuple[str, ...] = ()) -> dict[str, bool]:
    """Return the path of each difference and whether it is allowed."""
    return {each.path: each.allowed for each in diff_configs(make_tree(*saved), make_tree(*saved, *overrides))}


def test_equal_configurations_have_no_differences():
    assert diff_configs(make_tree(), copy.deepcopy(make_tree())) == []


WHERE = (
    "run_dir=runs/b", "export_dir=out", "model.path=elsewhere/m", "data.path=elsewhere/d.jsonl", "trainer.steps=200",
    "trainer.offload.weights=true", "trainer.recompute.granularity=full", "trainer.max_tokens_per_micro_batch=99",
    "trainer.eval_every=3", "rollout.workers=3", "rollout.request_timeout_seconds=3", "rollout.engine.mem_fraction=0.5",
    "rollout.engine.extra_args={cuda_graph_config: {b: 1}}", "placement.device=cpu", "weight_sync.bucket_bytes=77",
    "tracking.wandb={project: p}", "limits.logprob_abs_max=0.1", "checkpoint.every=3", "recovery.max_restarts=3",
    "reward.max_failed_share=0.5", "rollout.no_progress_seconds=3",
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
def test_keys_that_set_where_a_run_computes_may_change(override):
    assert set(find_differences(override).values()) == {True}


@pytest.mark.parametrize(("key", "allowed"), [("timeout_seconds", True), ("cpu_seconds", False)])
def test_time_limits_of_the_machine_may_change_and_those_of_answers_not(key, allowed):
    saved = ("reward.terms.accuracy.type=math",)
    path = f"reward.terms.accuracy.{key}"
    assert find_differences(f"{path}=20", saved=saved) == {path: allowed}


@pytest.mark.parametrize("override", WHAT)
def test_keys_that_set_what_a_run_computes_may_not_change(override):
    assert find_differences(override) == {override.partition("=")[0]: False}


def test_parallel_sizes_and_pools_may_change():
    split = ("placement.slots_per_node=4", "trainer.parallel.tp=2", "rollout.tp=2", "rollout.replicas=2")
    assert find_differences(*split) == dict.fromkeys((override.partition("=")[0] for override in split), True)
    assert find_differences("placement.pools={b: {}}", "placement.rollout.pool=b") == {
        "placement.pools.b": True,
        "placement.rollout.pool": True,
    }


def test_parallel_sizes_of_auxiliary_models_may_change():
    ppo = ("algorithm.type=ppo", "reward.terms.m={type: model, path: rm}", "placement.slots_per_node=2")
    split = [f"{model}.parallel={{tp: 2}}" for model in ("algorithm.critic", "algorithm.reference", "reward.terms.m")]
    assert set(find_differences(*split, saved=ppo).values()) == {True}
    assert len(find_differences(*split, saved=ppo)) == 3
    assert find_differences("algorithm.critic.parallel.pp=2", saved=(*ppo, *split, "placement.slots_per_node=4")) == {
        "algorithm.critic.parallel.pp": True
    }


@pytest.mark.parametrize("trained", ["trainer", "algorithm.critic"])
def test_steps_may_not_change_with_learning_rate_decay(trained):
    ppo = ("algorithm.type=ppo",)
    assert find_differences("trainer.steps=200", saved=ppo) == {"trainer.steps": True}
    assert find_differences("trainer.steps=200", saved=(*ppo, f"{trained}.optimizer.decay=cosine")) == {
        "trainer.steps": False
    }


def test_keys_of_another_algorithm_are_absent():
    every = {each.path: each for each in diff_configs(make_tree(), make_tree("algorithm.type=dapo"))}
    assert (every["algorithm.type"].saved, every["algorithm.type"].current) == ("grpo", "dapo")
    assert every["algorithm.max_batches"].saved is ABSENT
    assert not every["algorithm.max_batches"].allowed
    assert list(every) == sorted(every)


def test_disallowed_differences_are_listed_first():
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


def test_allowed_differences_raise_no_error():
    changed = make_tree("run_dir=runs/b", "checkpoint.every=3")
    require_no_contradictions(diff_configs(make_tree(), changed), "step-000020")
