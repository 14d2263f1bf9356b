"""The example of an algorithm outside the package: `megarl train` with its loop, its loss and its frozen anchor."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.end_to_end.conftest import Launch
from tests.end_to_end.launched import list_steps

EXAMPLE = Path(__file__).parents[2] / "examples/custom-algorithm"


def test_the_example_trains(world: Path, tmp_path: Path, launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(EXAMPLE), prepend=":")
    changes = {
        "run_dir": tmp_path / "run",
        "model.path": world / "model",
        "data.path": world / "data/train.jsonl",
        "data.eval_path": "null",
        "algorithm.group_size": 2,
        "algorithm.prompts_per_step": 4,
        "trainer.steps": 3,
        "trainer.optimizer.warmup_steps": 1,
        "rollout.max_new_tokens": 12,
        "reward.terms": "{one: {type: format, pattern: '[a-m]'}}",
        "placement.slots_per_node": 1,
    }
    command = launch("train", EXAMPLE / "demo.yaml", "--set", *(f"{key}={value}" for key, value in changes.items()))
    assert command.wait(200) == 0, command.stdout + command.stderr
    steps = list_steps(tmp_path / "run")
    assert [row["policy_version/min"] for row in steps] == [0, 1, 2]
    assert max(row["grad_norm"] for row in steps) > 0
    assert max(row["train_infer_mismatch/logprob_abs_max"] for row in steps) <= 1e-4
