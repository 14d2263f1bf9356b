"""Two steps of training with families other than Qwen3: sampled and recomputed log-probabilities agree.

The second step samples with weights that the trainer has changed and pushed.
"""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megarl.config import RunConfig
from megarl.data.tiny_checkpoint import train_tokenizer
from tests.end_to_end.components import started
from tests.end_to_end.example_engine import PATH as ENGINE_PATH
from tests.end_to_end.launched import list_steps
from tests.end_to_end.tiny_world import run_tree
from tests.megatron.families.outside import MISTRAL_PATH, save_mistral
from tests.megatron.fidelity.models import STACKED, save_model

STEPS = 2
TOLERANCE = 1e-4
HEAD = "lm_head.weight"
WITH_EXPERTS = ("deepseek_v3", "mixtral")
"""Models that are trained with the routes of the engines."""
OUTSIDE = {"mistral": MISTRAL_PATH}
"""Import path of the families that are not part of the package."""
REWARD = {"terms": {"a_to_m": {"type": "format", "pattern": "[a-m]"}}}
"""A reward that a random model earns in about half of its completions."""


@pytest.fixture(scope="session")
def models(world: Path) -> Path:
    return world / "families"


def save_with_tokenizer(name: str, models: Path, world: Path) -> Path:
    """Save model `name` with a tokenizer that has the same pad and eos tokens; return its folder."""
    folder = Path(save_mistral(models) if name == "mistral" else save_model(name, models))
    rows = map(json.loads, (world / "data/train.jsonl").read_text().splitlines())
    train_tokenizer([row["prompt"] for row in rows], vocab_size=300, context_length=4096).save_pretrained(folder)
    return folder


QUICK = {"deepseek_v3, tp 2 ep 2, exact": ("deepseek_v3", {"tp": 2, "ep": 2, "etp": 1}, {}, "exact")}
SLOW = {
    "mistral outside the package, tp 2, exact": ("mistral", {"tp": 2}, {}, "exact"),
    "llama3, tp 2, gather_hf": ("llama3", {"tp": 2}, {}, "gather_hf"),
    "llama3, tp 2 to tp 2, auto": ("llama3", {"tp": 2}, {"tp": 2}, "auto"),
    "mixtral, ep 2, exact": ("mixtral", {"ep": 2}, {}, "exact"),
    "mixtral, ep 2 to 2 engines, gather_hf": ("mixtral", {"ep": 2}, {"replicas": 2}, "gather_hf"),
    "deepseek_v3, pp 2, gather_hf": ("deepseek_v3", {"pp": 2}, {}, "gather_hf"),
}
CASES = QUICK | SLOW
"""Name -> model, parallel sizes of the trainer, parallel sizes of the engines, strategy."""


@pytest.mark.parametrize("case", [*QUICK, *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW)])
def test_trainer_and_engine_log_probabilities_agree(case, models, world, tmp_path, ranks):
    name, parallel, rollout, strategy = CASES[case]
    folder = save_with_tokenizer(name, models, world)
    moe = {"router_replay": "R3"} if name in WITH_EXPERTS else {}
    tree = run_tree(
        world,
        tmp_path / "run",
        model={"path": str(folder), "family": OUTSIDE.get(name)},
        data={"path": str(world / "data/train.jsonl")},
        trainer={"steps": STEPS, "optimizer": {"lr": 1e-3}, "parallel": parallel, "moe": moe},
        rollout={"max_new_tokens": 12} | rollout,
        reward=REWARD,
        weight_sync={"strategy": strategy},
    )
    config = RunConfig.model_validate(tree)
    with started(config, ranks) as components:
        components.run(config)
    steps = list_steps(tmp_path / "run")
    assert [row["policy_version/min"] for row in steps] == [0, 1]
    assert steps[0]["grad_norm"] > 0
    for row in steps:
        assert row["train_infer_mismatch/logprob_abs_max"] <= TOLERANCE
        assert row.get("router_replay/missing_share") == (0 if moe else None)
    require_trained(folder, tmp_path / "run/model")


NOT_ON_CPU = {
    "qwen3_5": {"tp": 2},
    "gemma2": {"pp": 2},
    "gpt_oss": {"tp": 2},
    "minimax_m2": {"ep": 2},
    "qwen3_next": {"tp": 2, "ep": 2, "etp": 1},
    "qwen3_5_moe": {"ep": 2},
    STACKED: {"pp": 2},
    "deepseek_v32": {"tp": 2, "ep": 2, "etp": 1},
    "glm_moe_dsa": {"ep": 2},
}
"""Model that SGLang does not run on the CPU -> parallel sizes of the trainer."""


@pytest.mark.slow
@pytest.mark.parametrize("name", NOT_ON_CPU)
def test_models_that_the_cpu_engine_lacks_train_with_an_engine_on_transformers(name, models, world, tmp_path, ranks):
    folder = save_with_tokenizer(name, models, world)
    tree = run_tree(
        world,
        tmp_path / "run",
        model={"path": str(folder)},
        data={"path": str(world / "data/train.jsonl")},
        algorithm={"kl_loss": None, "group_size": 8, "prompts_per_step": 4},
        trainer={"steps": STEPS, "optimizer": {"lr": 1e-3}, "parallel": NOT_ON_CPU[name]},
        rollout={"max_new_tokens": 12, "engine": {"type": ENGINE_PATH}},
        reward=REWARD,
        weight_sync={"strategy": "gather_hf"},
    )
    config = RunConfig.model_validate(tree)
    with started(config, ranks) as components:
        components.run(config)
    steps = list_steps(tmp_path / "run")
    assert [row["policy_version/min"] for row in steps] == [0, 1]
    assert steps[0]["grad_norm"] > 0
    assert max(row["train_infer_mismatch/logprob_abs_max"] for row in steps) <= TOLERANCE
    require_trained(folder, tmp_path / "run/model")


def require_trained(before: Path, after: Path) -> None:
    """Check that all weights have changed, except those of multi-token-prediction layers.

    Of the experts of a layer, which tokens choose, some have changed.
    """
    old, new = load_file(before / "model.safetensors"), load_file(after / "model.safetensors")
    assert new.keys() == old.keys()
    num_layers = json.loads((before / "config.json").read_text())["num_hidden_layers"]
    further = f"model.layers.{num_layers}."
    copies = {further + "embed_tokens.weight": "model.embed_tokens.weight", further + "shared_head.head.weight": HEAD}
    chosen = {_any_expert(name) for name in old if not torch.equal(new[name], old[name])}
    for name in old:
        if name in copies:
            assert torch.equal(new[name], new[copies[name]]), name
        else:
            # the router's correction bias and the selection of keys have no gradient
            kept = name.startswith(further) or name.endswith("e_score_correction_bias") or ".indexer." in name
            assert (_any_expert(name) not in chosen) == kept, name


def _any_expert(name: str) -> str:
    """Return the name of a tensor without the number of the expert."""
    return re.sub(r"\.experts\.\d+\.", ".experts.*.", name)
