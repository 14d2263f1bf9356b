"""The data of examples/environments: its demonstrations are those of the environments that the recipes name."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from megarl.batch.trajectory import Prompt
from megarl.config.import_path import load_object
from megarl.rollout.environments.environment import Task

ROOT = Path(__file__).parents[2]

NUM_PLAYED = 20


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def make_environment(name: str, folder: Path) -> Any:
    """Return an environment of the recipe, with the data of `folder`."""
    text = (ROOT / "yaml" / "agents" / f"{name}.yaml").read_text().replace(f"runs/{name}/data", str(folder))
    config = yaml.safe_load(text)["rollout"]["env"]
    environment: Any = load_object(config["path"], key="rollout.env.path", kind="class")
    return environment(**config.get("kwargs", {}))


@pytest.mark.parametrize("name", ["calculator", "python", "search"])
def test_demonstrated_calls_have_the_results_of_the_environment(name: str, tmp_path: Path) -> None:
    script = ROOT / "examples" / "environments" / "make_data.py"
    subprocess.run([sys.executable, str(script), name, str(tmp_path)], check=True)
    train, held_out = read(tmp_path / "train.jsonl"), read(tmp_path / "heldout.jsonl")
    assert len(train) >= 3900
    assert len(held_out) >= 150
    assert not {row["prompt"] for row in train} & {row["prompt"] for row in held_out}
    demonstrations = read(tmp_path / "sft.jsonl")
    first = [row["response"] for row in demonstrations if len(row["prompt"]) == 1]
    assert 0.2 < sum("####" not in response for response in first) / len(first) < 0.3
    answers = {row["prompt"]: row["answer"] for row in train}
    played = [row for row in demonstrations if len(row["prompt"]) > 1][:NUM_PLAYED]
    assert len(played) == NUM_PLAYED
    shared: dict[str, Any] = {}
    for row in played:
        question, call, result = row["prompt"]
        env = make_environment(name, tmp_path)
        prompt = Prompt(prompt_id="p:1", text="", token_ids=(), row={}, answer=answers[question["content"]])
        try:
            env.reset(Task(prompt=prompt, messages=[question], seed=1, shared=shared))
            step = env.step(call["content"])
            assert list(step.messages) == [result]
            assert env.step(row["response"]).reward == 1.0
        finally:
            env.close()
