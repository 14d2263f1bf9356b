"""The report of a replay."""

from __future__ import annotations

import pytest

from megarl.controller.replay_stage import ReplayReport


def test_share_of_training_counts_all_phases_of_models() -> None:
    seconds = {"total": 20.0, "train": 12.0, "train_critic": 4.0, "values": 2.5, "rollout": 0.5, "estimate": 0.25}
    report = ReplayReport(begun_at=4, last_step=12, checkpoints={}, seconds=seconds)
    assert report.training_share == pytest.approx(18.5 / 20)
    assert report.line == "replayed steps 5 to 12 in 20.0 s, 92.5% of it training"
