"""Reward models and direct preference optimization."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from megarl.data.demo_arithmetic import write_arithmetic
from megarl.data.tokenizer import load_tokenizer
from tests.end_to_end.tiny_world import patient

NUM_PAIRS, NUM_HELD_OUT, STEPS = 256, 32, 16


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return paths of training and held-out pairs whose rejected answers are truncated, which is easy to recognize."""
    folder = tmp_path_factory.mktemp("pairs")
    files = write_arithmetic(folder, seed=0, num_train=NUM_PAIRS, num_heldout=NUM_HELD_OUT)
    for path in (files.preferences, files.heldout_preferences):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        rows = [row | {"rejected": row["chosen"].split(" ####")[0]} for row in rows]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"path": str(files.preferences), "eval_path": str(files.heldout_preferences)}


def write_stage(world: Path, folder: Path, pairs: dict[str, str], **sections: Any) -> Path:
    """Write the YAML file of a stage with `STEPS` steps on two ranks, evaluated three times; return its path."""
    tree = {
        "run_dir": str(folder / "run"),
        "model": {"path": str(world / "model")},
        "data": pairs,
        "trainer": {"steps": STEPS, "batch_size": 16, "eval_every": STEPS // 2, "optimizer": {"lr": 1e-3}},
        "placement": {"slots_per_node": 2},
        "checkpoint": {"every": 0},
    }
    path = folder / "stage.yaml"
    path.write_text(yaml.safe_dump(patient(tree | sections)))
    return path


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def by_transformers(folder: Path, pairs: dict[str, str]) -> list[float]:
    """Return the exported model's scores of the held-out answers, as chosen, rejected, chosen, rejected, ..."""
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    tokenizer = load_tokenizer(folder)
    scores = []
    for line in Path(pairs["eval_path"]).read_text().splitlines():
        row = json.loads(line)
        for answer in (row["chosen"], row["rejected"]):
            ids = [*tokenizer(row["prompt"])["input_ids"], *tokenizer(answer)["input_ids"], tokenizer.eos_token_id]
            with torch.no_grad():
                scores.append(float(model(torch.tensor([ids])).logits[0, 0]))
    return scores


def test_reward_model_learns_to_rank_answers_and_loads_in_transformers(world, pairs, run_here, tmp_path):
    assert run_here("rm", write_stage(world, tmp_path, pairs)) == 0
    rows = metrics(tmp_path / "run")
    evaluations = {row["step"]: row["eval/accuracy"] for row in rows if "eval/accuracy" in row}
    assert evaluations.keys() == {0, STEPS // 2, STEPS}
    # the head is initialized to zero: all scores are equal
    assert evaluations[0] == 0.5
    assert evaluations[STEPS] > 0.9
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert (summary["eval_before"], summary["eval_after"], summary["steps"]) == (0.5, evaluations[STEPS], STEPS)
    steps = [row for row in rows if "loss" in row]
    assert [row["step"] for row in steps] == list(range(1, STEPS + 1))
    assert steps[0]["loss"] == pytest.approx(math.log(2), abs=1e-6)
    scores = by_transformers(tmp_path / "run/model", pairs)
    right = [better > worse for better, worse in zip(scores[::2], scores[1::2], strict=True)]
    assert sum(right) / len(right) == pytest.approx(evaluations[STEPS])
    (last,) = (row["eval/gap"] for row in rows if row["step"] == STEPS and "eval/gap" in row)
    assert (sum(scores[::2]) - sum(scores[1::2])) / NUM_HELD_OUT == pytest.approx(last, abs=1e-4)


@pytest.mark.parametrize("reference", ["the trainer", pytest.param("another model", marks=pytest.mark.slow)])
def test_dpo_widens_the_gap_to_the_reference(reference, world, pairs, run_here, tmp_path):
    dpo: dict[str, Any] = {"beta": 0.5, "nll": 0.1}
    if reference == "another model":
        dpo["reference"] = {"path": str(world / "model"), "parallel": {"tp": 2}}
    assert run_here("dpo", write_stage(world, tmp_path, pairs, dpo=dpo)) == 0
    rows = metrics(tmp_path / "run")
    first, last = ({k: v for row in rows if row["step"] == step for k, v in row.items()} for step in (0, STEPS))
    assert first["eval/gap"] == pytest.approx(0, abs=1e-5)
    assert last["eval/gap"] > 1
    assert last["eval/accuracy"] > 0.9
    steps = [row for row in rows if "loss" in row]
    # before the first update policy and reference are the same
    assert steps[0]["gap"] == pytest.approx(0, abs=1e-5)
    assert steps[0]["chosen_reward"] == pytest.approx(0, abs=1e-5)
    assert steps[-1]["gap"] > 1
    assert steps[-1]["chosen_reward"] > steps[-1]["rejected_reward"]
    before, after = (load_file(folder / "model.safetensors") for folder in (world / "model", tmp_path / "run/model"))
    assert before.keys() == after.keys()
    assert not any(torch.equal(before[name], after[name]) for name in before if "embed" not in name)
