"""Which steps of a run are traced."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from megarl.config.trainer import TrainerConfig
from megarl.megatron.requests import ProfileSpec
from tests.algorithms.scripted_run import run_script


def test_only_the_chosen_steps_of_the_policy_are_traced(tmp_path: Path) -> None:
    profile = {"steps": [1, 3], "ranks": [0, 2]}
    run = run_script(tmp_path, {"type": "ppo"}, lambda *_: 1.0, steps=3, trainer={"profile": profile})
    folder = str(tmp_path / "profile")
    first, third = (ProfileSpec(folder=folder, step=step, ranks=(0, 2)) for step in (1, 3))
    assert [request.profile for request in run.arguments("policy", "train")] == [first, None, third]
    assert {request.profile for request in run.arguments("critic", "train")} == {None}


@pytest.mark.parametrize(("steps", "got"), [([1, 11], 11), ([0], 0)])
def test_steps_that_never_come_are_refused(steps: list[int], got: int) -> None:
    section: dict[str, Any] = {"steps": 10, "profile": {"steps": steps}}
    with pytest.raises(ValidationError, match=f"profile.steps needs steps from 1 to trainer.steps = 10, got {got}"):
        TrainerConfig.model_validate(section)
