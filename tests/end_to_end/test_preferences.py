"""Reward models and direct preference optimization on Ray and under torchrun."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from ray.util.placement_group import remove_placement_group
from safetensors.torch import load_file

from megarl.config import DpoConfig
from megarl.data.demo_arithmetic import write_arithmetic
from megarl.data.tokenizer import load_tokenizer
from megarl.groups.build import build_dpo, stage_processes
from megarl.run.events import EventLog
from megarl.stages.dpo import DpoRun
from tests.end_to_end.conftest import Launch

NUM_PAIRS, NUM_HELD_OUT = 256, 32


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


def stage_tree(world: Path, run_dir: Path, pairs: dict[str, str], **sections: Any) -> dict[str, Any]:
    """Return a configuration with 30 steps of 32 pairs on two ranks, evaluated three times."""
    return {
        "run_dir": str(run_dir),
        "model": {"path": str(world / "model")},
        "data": pairs,
        "trainer": {"steps": 30, "batch_size": 32, "eval_every": 15, "optimizer": {"lr": 1e-3}},
        "placement": {"slots_per_node": 2},
    } | sections


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


def test_reward_model_learns_to_rank_answers_and_loads_in_transformers(
    world: Path, pairs: dict[str, str], launch: Launch, tmp_path: Path
) -> None:
    config = tmp_path / "rm.yaml"
    config.write_text(yaml.safe_dump(stage_tree(world, tmp_path / "run", pairs)))
    command = launch("rm", config)
    assert command.wait() == 0, command.stderr
    rows = metrics(tmp_path / "run")
    evaluations = {row["step"]: row["eval/accuracy"] for row in rows if "eval/accuracy" in row}
    assert evaluations.keys() == {0, 15, 30}
    # the head is initialized to zero: all scores are equal
    assert evaluations[0] == 0.5
    assert evaluations[30] > 0.9
    assert f"held-out accuracy 0.500 -> {evaluations[30]:.3f} on {NUM_HELD_OUT} pairs" in command.stdout
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert (summary["eval_before"], summary["eval_after"], summary["steps"]) == (0.5, evaluations[30], 30)
    steps = [row for row in rows if "loss" in row]
    assert [row["step"] for row in steps] == list(range(1, 31))
    assert steps[0]["loss"] == pytest.approx(math.log(2), abs=1e-6)
    scores = by_transformers(tmp_path / "run/model", pairs)
    right = [better > worse for better, worse in zip(scores[::2], scores[1::2], strict=True)]
    assert sum(right) / len(right) == pytest.approx(evaluations[30])
    (last,) = (row["eval/gap"] for row in rows if row["step"] == 30 and "eval/gap" in row)
    assert (sum(scores[::2]) - sum(scores[1::2])) / NUM_HELD_OUT == pytest.approx(last, abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["rm", "dpo"])
def test_torchrun_and_ray_give_the_same_results(
    stage: str, world: Path, pairs: dict[str, str], launch: Launch, tmp_path: Path
) -> None:
    trainer = {"steps": 3, "batch_size": 8, "eval_every": 2}
    config = tmp_path / "stage.yaml"
    config.write_text(yaml.safe_dump(stage_tree(world, tmp_path / "run", pairs, trainer=trainer)))
    seen = []
    two_ranks = ("--standalone", "--nproc-per-node", "2", "-m", "megarl")
    for start in (lambda: launch(*two_ranks, stage, config, program="torchrun"), lambda: launch(stage, config)):
        command = start()
        assert command.wait() == 0, command.stderr
        timed = ("tokens_per_second", "time/step_seconds")
        rows = [{k: v for k, v in row.items() if k not in timed} for row in metrics(tmp_path / "run")]
        summary = json.loads((tmp_path / "run/summary.json").read_text())
        assert summary["eval_after"] == rows[-1]["eval/accuracy"]
        seen.append((rows, (tmp_path / "run/model/model.safetensors").read_bytes()))
        (tmp_path / "run").rename(tmp_path / f"run-{len(seen)}")
    assert len(seen[0][0]) == 6
    assert seen[0] == seen[1]


@pytest.mark.parametrize("reference", ["the trainer", pytest.param("another model", marks=pytest.mark.slow)])
def test_dpo_widens_the_gap_to_the_reference(
    reference: str, cluster: None, world: Path, pairs: dict[str, str], tmp_path: Path
) -> None:
    dpo = {"beta": 0.5, "nll": 0.1}
    if reference == "another model":
        dpo["reference"] = {"path": str(world / "model"), "parallel": {"tp": 2}}
    tree = stage_tree(world, tmp_path / "run", pairs, dpo=dpo)
    config = DpoConfig.model_validate(tree | {"trainer": {"steps": 12, "batch_size": 16, "optimizer": {"lr": 1e-3}}})
    processes = stage_processes(config)
    try:
        trainer, frozen = build_dpo(config, processes)
        assert (frozen is None) == (reference == "the trainer")
        DpoRun(config, EventLog(), trainer, frozen).train()
    finally:
        processes.stop()
        remove_placement_group(processes.pool.group)  # the cluster has few slots
    rows = metrics(tmp_path / "run")
    first, last = ({k: v for row in rows if row["step"] == step for k, v in row.items()} for step in (0, 12))
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
