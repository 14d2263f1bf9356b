"""`megarl train` on CUDA devices: engine and trainer agree, with colocated and with disaggregated engines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.conftest import Launch
from tests.end_to_end.launched import list_steps
from tests.end_to_end.tiny_world import write_run

ROLLOUT = {"max_new_tokens": 12, "engine": {"extra_args": {"attention_backend": "triton"}}}
"""SGLang's default attention has no kernels for heads as small as those of the tests' models."""

MEAN_TOLERANCE = 0.03
"""Largest mean |difference| of sampled and recomputed log-probabilities in bfloat16."""


def check_run(world: Path, folder: Path, launch: Launch, **sections: Any) -> None:
    pytest.importorskip("sgl_kernel", reason="needs SGLang's CUDA kernels: make setup-gpu")
    trainer = {"steps": 4, "optimizer": {"lr": 1e-3}} | sections.pop("trainer", {})
    command = launch("train", write_run(world, folder, trainer=trainer, rollout=ROLLOUT, **sections))
    assert command.wait(600) == 0, command.stderr
    steps = list_steps(folder / "run")
    assert [step["step"] for step in steps] == [1, 2, 3, 4]
    assert max(step["train_infer_mismatch/logprob_abs_mean"] for step in steps) < MEAN_TOLERANCE
    assert [step["policy_version/min"] for step in steps] == [0, 1, 2, 3]
    assert json.loads((folder / "run/summary.json").read_text())["steps"] == 4
    command.assert_no_processes_left(10)


@pytest.mark.gpu
def test_colocated_run_on_one_device(world: Path, tmp_path: Path, launch: Launch) -> None:
    check_run(world, tmp_path, launch, placement={"device": "cuda", "slots_per_node": 1})


@pytest.mark.multigpu
@pytest.mark.parametrize("parallel", [{"tp": 2}, {"pp": 2}, {}], ids=str)
def test_colocated_run_on_two_devices(parallel: dict[str, int], world: Path, tmp_path: Path, launch: Launch) -> None:
    placement = {"device": "cuda", "slots_per_node": 2}
    check_run(world, tmp_path, launch, placement=placement, trainer={"parallel": parallel})


@pytest.mark.multigpu
def test_disaggregated_run_on_two_devices(world: Path, tmp_path: Path, launch: Launch) -> None:
    """The weights cross from one device to the other over NCCL."""
    placement = {"device": "cuda", "slots_per_node": 1, "pools": {"engines": {}}, "rollout": {"pool": "engines"}}
    check_run(world, tmp_path, launch, placement=placement)
