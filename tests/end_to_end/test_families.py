"""Two steps of training with families other than Qwen3: sampled and recomputed log-probabilities agree.

The second step samples with weights that the trainer has changed and pushed.
"""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megarl.config import RunConfig
from megarl.data.tiny_checkpoint import train_tokenizer
from tests.end_to_end.components import started
from tests.end_to_end.launched import list_steps
from tests.end_to_end.tiny_world import run_tree
from tests.megatron.families.outside import MISTRAL_PATH, save_mistral
from tests.megatron.fidelity.models import save_model

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


def require_trained(before: Path, after: Path) -> None:
    """Check that all weights have changed, except those of multi-token-prediction layers."""
    old, new = load_file(before / "model.safetensors"), load_file(after / "model.safetensors")
    assert new.keys() == old.keys()
    num_layers = json.loads((before / "config.json").read_text())["num_hidden_layers"]
    further = f"model.layers.{num_layers}."
    copies = {further + "embed_tokens.weight": "model.embed_tokens.weight", further + "shared_head.head.weight": HEAD}
    for name in old:
        if name in copies:
            assert torch.equal(new[name], new[copies[name]]), name
        else:
            # the router's correction bias has no gradient
            kept = name.startswith(further) or name.endswith("e_score_correction_bias")
            assert torch.equal(new[name], old[name]) == kept, name
