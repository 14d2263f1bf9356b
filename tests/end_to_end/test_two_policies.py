"""Two policies that take turns on real engines: each samples with its own weights, in every step."""

from __future__ import annotations

from pathlib import Path

from tests.end_to_end.conftest import Launch
from tests.end_to_end.launched import list_steps
from tests.end_to_end.tiny_world import write_run

MISMATCH = "train_infer_mismatch/logprob_abs_max"


def test_each_policy_samples_with_its_own_weights(world: Path, tmp_path: Path, launch: Launch) -> None:
    optimizer = {"lr": 1e-2, "warmup_steps": 0}
    algorithm = {
        "type": "tests.algorithms.test_two_policies:Duel",
        "kl_loss": None,
        "group_size": 2,
        "prompts_per_step": 4,
        "other": {"optimizer": optimizer},
    }
    trainer = {"steps": 3, "optimizer": optimizer}
    placement = {"slots_per_node": 1}
    command = launch("train", write_run(world, tmp_path, algorithm=algorithm, trainer=trainer, placement=placement))
    assert command.wait() == 0, command.stdout + command.stderr
    steps = list_steps(tmp_path / "run")
    assert len(steps) == 3
    for row in steps:
        assert row["other/grad_norm"] > 0  # both begin with the same weights, and differ from the second step on
        assert row[MISMATCH] <= 1e-4
        assert row[f"other/{MISMATCH}"] <= 1e-4
