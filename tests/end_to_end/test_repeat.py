"""A run with disaggregated engines has the same metrics as one with colocated engines, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.end_to_end.conftest import FinishedRun, Launch
from tests.end_to_end.launched import list_steps
from tests.end_to_end.test_disaggregated import DISAGGREGATED
from tests.end_to_end.tiny_world import STEPS, write_run

COMPARED_METRICS = (
    "loss",
    "grad_norm",
    "reward/mean",
    "response/length",
    "entropy",
    "train_infer_mismatch/logprob_abs_max",
)


@pytest.mark.slow
def test_disaggregated_engines_give_the_same_losses(
    world: Path, tmp_path: Path, launch: Launch, undisturbed: FinishedRun
) -> None:
    command = launch("train", write_run(world, tmp_path, placement=DISAGGREGATED))
    assert command.wait() == 0, command.stderr
    runs = (list_steps(tmp_path / "run"), undisturbed.steps())
    found, expected = ([{name: row[name] for name in COMPARED_METRICS} for row in steps] for steps in runs)
    assert len(found) == STEPS
    assert found == expected
