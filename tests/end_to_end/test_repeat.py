"""Two runs of the same configuration have bitwise equal metrics, with colocated and disaggregated engines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.launched import LaunchedCommand
from tests.end_to_end.tiny_world import write_run

COMPARED_METRICS = (
    "loss",
    "grad_norm",
    "reward/mean",
    "response/length",
    "entropy",
    "train_infer_mismatch/logprob_abs_max",
)

DISAGGREGATED = {"slots_per_node": 2, "pools": {"engines": {}}, "rollout": {"pool": "engines"}}


def losses(world: Path, folder: Path, **sections: Any) -> list[dict[str, float]]:
    folder.mkdir()
    run = write_run(world, folder, **sections)
    command = LaunchedCommand(folder, "train", run, "--set", "trainer.steps=6", "data.eval_path=null")
    try:
        assert command.wait() == 0, command.stderr
    finally:
        command.end()
    rows = map(json.loads, (folder / "run" / "metrics.jsonl").read_text().splitlines())
    return [{name: row[name] for name in COMPARED_METRICS} for row in rows if "loss" in row]


@pytest.mark.slow
def test_same_seed_gives_the_same_losses(world: Path, tmp_path: Path) -> None:
    first, second = losses(world, tmp_path / "a"), losses(world, tmp_path / "b")
    disaggregated = losses(world, tmp_path / "c", placement=DISAGGREGATED)
    assert len(first) == 6
    assert first == second == disaggregated
