"""`megarl train` with a program that talks with the policy through the gateway."""

from __future__ import annotations

import sys
from pathlib import Path

from megarl.rollout.journal.journal import read_step
from megarl.rollout.journal.journal_folder import list_steps as journal_steps
from tests.end_to_end.conftest import Launch
from tests.end_to_end.launched import list_steps
from tests.end_to_end.tiny_world import write_run


def test_a_program_is_trained_through_the_gateway(world: Path, tmp_path: Path, launch: Launch) -> None:
    model = {
        "path": str(tmp_path / "model"),
        "tiny": {"hidden_size": 64, "num_layers": 2, "context_length": 160, "chat": True},
    }
    command = [sys.executable, str(Path(__file__).with_name("two_turns.py"))]
    config = write_run(
        world,
        tmp_path,
        model=model,
        algorithm={"type": "grpo", "kl_loss": None, "group_size": 4, "prompts_per_step": 2},
        trainer={"steps": 2, "optimizer": {"lr": 1e-3}},
        rollout={"max_new_tokens": 90, "harness": {"command": command, "max_turn_tokens": 12, "max_programs": 4}},
        reward={"terms": {"ones": {"type": "environment"}}},
        placement={"slots_per_node": 1},
        checkpoint={"every": 0},
    )
    run = launch("train", config)
    assert run.wait() == 0, run.stderr
    run.assert_no_processes_left()
    steps = list_steps(tmp_path / "run")
    assert all(row["train_infer_mismatch/logprob_abs_max"] <= 1e-4 for row in steps)
    assert all(row["rollout/turns"] == 2 for row in steps)
    trajectories = [
        trajectory
        for step in journal_steps(tmp_path / "run")
        for entry in read_step(tmp_path / "run", step)
        for trajectory in entry.trajectories
    ]
    assert len(trajectories) >= 2 * 2 * 4  # and those of evaluation
    assert not any(trajectory.reward_errors for trajectory in trajectories)
