"""Problems of auxiliary models that `megarl check` finds."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from megarl.config import RunConfig
from megarl.data.tiny_checkpoint import write_tiny_model
from megarl.preflight import machine_checks
from megarl.preflight.run_checks import check_run


@pytest.fixture
def tree(tree: dict[str, Any], tmp_path: Path) -> dict[str, Any]:
    """A run for each test, with a copy of its model in `other` for an auxiliary model."""
    shutil.copytree(tmp_path / "model", tmp_path / "other")
    return tree


def run_problems(tree: dict[str, Any], **sections: Any) -> list[str]:
    return check_run(RunConfig.model_validate(tree | sections))


def other(tree: dict[str, Any]) -> str:
    return str(Path(tree["model"]["path"]).parent / "other")


def edit_config(folder: str, **values: Any) -> None:
    file = Path(folder, "config.json")
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def turn_into_reward_model(folder: str) -> None:
    """Replace the language-model head in the folder by a scalar head."""
    file = Path(folder, "model.safetensors")
    tensors = load_file(file)
    tensors["score.weight"] = np.zeros((1, tensors.pop("lm_head.weight").shape[1]), dtype=np.float32)
    save_file(tensors, file)
    edit_config(folder, architectures=["Qwen3ForSequenceClassification"], id2label={"0": "score"})


def ppo(folder: str, **critic: Any) -> dict[str, Any]:
    return {"type": "ppo", "kl_reward": None, "critic": {"path": folder} | critic}


def test_a_valid_configuration_has_no_problems(tree: dict[str, Any]) -> None:
    turn_into_reward_model(other(tree))
    terms = {"rm": {"type": "model", "path": other(tree)}, "cost": {"type": "model", "path": other(tree)}, "a": {}}
    algorithm = {"type": "safe_rlhf", "critic": {"path": other(tree)}, "cost_critic": {"parallel": {"tp": 2}}}
    sections = {"placement": {"slots_per_node": 2, "pools": {"b": {"slots_per_node": 2}}, "cost_critic": {"pool": "b"}}}
    assert run_problems(tree, algorithm=algorithm, reward={"terms": terms}, **sections) == []


@pytest.mark.parametrize("algorithm", ["grpo", "ppo", "vapo", "prime", "remax"])
def test_problems_of_models_in_the_policy_folder_are_reported_once(tree: dict[str, Any], algorithm: str) -> None:
    assert run_problems(tree, algorithm={"type": algorithm}) == []
    Path(tree["model"]["path"], "model.safetensors").unlink()
    assert run_problems(tree, algorithm={"type": algorithm}) == [
        f"model.path: {tree['model']['path']} holds no safetensors files"
    ]


@pytest.mark.parametrize(
    ("algorithm", "key"),
    [
        ({"type": "ppo", "critic": {"path": "none"}}, "algorithm.critic.path"),
        ({"type": "safe_rlhf", "cost_term": "c", "cost_critic": {"path": "none"}}, "algorithm.cost_critic.path"),
        ({"type": "grpo", "reference": {"path": "none"}}, "algorithm.reference.path"),
        ({"type": "prime", "reward_model": {"path": "none"}}, "algorithm.reward_model.path"),
        ({"type": "distillation", "teacher": {"path": "none"}}, "algorithm.teacher.path"),
    ],
)
def test_missing_folders(tree: dict[str, Any], algorithm: dict[str, Any], key: str) -> None:
    (problem,) = run_problems(tree, algorithm=algorithm, reward={"terms": {"a": {}, "c": {}}})
    assert problem == f"{key}: needs a folder in Hugging Face format, there is no folder none"


def test_reward_model_folder(tree: dict[str, Any]) -> None:
    terms = {"a": {}, "rm": {"type": "model", "path": other(tree)}}
    assert run_problems(tree, reward={"terms": terms}) == [
        "reward.terms.rm.path: needs a reward model, one for sequence classification with 1 label, got Qwen3ForCausalLM"
    ]
    turn_into_reward_model(other(tree))
    assert run_problems(tree, reward={"terms": terms}) == []
    tensors = load_file(Path(other(tree), "model.safetensors"))
    del tensors["score.weight"]
    save_file(tensors, Path(other(tree), "model.safetensors"))
    (problem,) = run_problems(tree, reward={"terms": terms})
    assert problem.startswith("reward.terms.rm.path: ")
    assert "first score.weight" in problem


def test_a_teacher_needs_logits_and_the_tokenizer_of_the_policy(tree: dict[str, Any]) -> None:
    teacher = {"algorithm": {"type": "distillation", "teacher": {"path": other(tree)}}}
    turn_into_reward_model(other(tree))
    (problem,) = run_problems(tree, **teacher)
    assert problem.startswith("algorithm.teacher.path: ")
    assert "has a value head and no logits" in problem
    shutil.rmtree(other(tree))
    write_tiny_model(other(tree), ["another corpus altogether, another corpus altogether"] * 20, seed=0)
    (problem,) = run_problems(tree, **teacher)
    assert problem.startswith("algorithm.teacher.path: needs the tokenizer of model.path, as token ids ")
    assert " tokens differ, first " in problem


def test_parallel_sizes_of_an_auxiliary_model(tree: dict[str, Any]) -> None:
    algorithm = ppo(other(tree), parallel={"tp": 3})
    (heads, *_) = run_problems(tree, algorithm=algorithm, placement={"slots_per_node": 3})
    assert heads == (
        "algorithm.critic.parallel.tp: model.layers.0.self_attn.q_proj.weight has query heads that do not divide, "
        "4 % 3 = 1"
    )
    edit_config(other(tree), intermediate_size=383)
    inherited = {"placement": {"slots_per_node": 2}, "trainer": {"parallel": {"tp": 2}}}
    got = run_problems(tree, algorithm=ppo(other(tree)), **inherited)
    assert (
        "algorithm.critic: trainer.parallel.tp: model.layers.0.mlp.gate_proj.weight has rows that do not divide, "
        "383 % 2 = 1"
    ) in got


def test_fewer_completions_than_ranks_of_a_critic(tree: dict[str, Any]) -> None:
    algorithm = {"type": "ppo", "kl_reward": None, "prompts_per_step": 2, "group_size": 1}
    placement = {"pools": {"b": {"slots_per_node": 3}}, "critic": {"pool": "b"}}
    assert run_problems(tree, algorithm=algorithm, placement=placement) == [
        "algorithm.prompts_per_step: a mini-batch needs at least one completion per data-parallel rank of "
        "algorithm.critic, got prompts_per_step * group_size / num_mini_batches = 2 * 1 / 1 = 2 < slots / "
        "(tp * pp * cp) = 3 / 1 = 3"
    ]


def test_padding_of_the_vocabulary_may_differ(tree: dict[str, Any]) -> None:
    for rows, is_reported in ((400, False), (258, True)):
        file = Path(other(tree), "model.safetensors")
        tensors = load_file(file)
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            tensors[name] = np.zeros((rows, tensors[name].shape[1]), dtype=np.float32)
        save_file(tensors, file)
        edit_config(other(tree), vocab_size=rows)
        got = run_problems(tree, algorithm={"type": "distillation", "teacher": {"path": other(tree)}})
        assert [p.startswith("algorithm.teacher.path: needs a row for each token of the policy") for p in got] == (
            [True] if is_reported else []
        )


def test_gpus_of_all_pools(tree: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(machine_checks, "visible_gpu_names", lambda: ["H200"] * 2)
    placement = {"device": "cuda", "slots_per_node": 2, "pools": {"b": {}}, "critic": {"pool": "b"}}
    assert run_problems(tree, algorithm={"type": "ppo", "kl_reward": None}, placement=placement) == [
        "placement.device: cuda needs nodes * slots_per_node = 1 * 2 = 2, with placement.pools 3 GPUs, this machine "
        "has 2 (RAY_ADDRESS joins a cluster)"
    ]
