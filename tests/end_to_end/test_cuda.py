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
    pytest.importorskip("ray", reason="needs Ray: make setup-gpu")
    pytest.importorskip("sgl_kernel", reason="needs SGLang's CUDA kernels: make setup-gpu")
    trainer = {"steps": 4, "optimizer": {"lr": 1e-3}} | sections.pop("trainer", {})
    command = launch("train", write_run(world, folder, trainer=trainer, rollout=ROLLOUT, **sections))
    assert command.wait() == 0, command.stderr
    steps = list_steps(folder / "run")
    assert [step["step"] for step in steps] == [1, 2, 3, 4]
    means = [step["train_infer_mismatch/logprob_abs_mean"] for step in steps if is_compared(step)]
    assert max(means, default=0.0) < MEAN_TOLERANCE
    if "schedule" in sections:
        assert max(step["staleness/max"] for step in steps) == 1
    else:
        assert [step["policy_version/min"] for step in steps] == [0, 1, 2, 3]
    assert json.loads((folder / "run/summary.json").read_text())["steps"] == 4
    command.assert_no_processes_left()


def is_compared(step: dict[str, float]) -> bool:
    """Return whether the step trained on tokens of the last version; if not, the engines were probed instead."""
    return "train_infer_mismatch/logprob_abs_mean" in step


@pytest.mark.gpu
def test_colocated_asynchronous_run_on_one_device(world: Path, tmp_path: Path, launch: Launch) -> None:
    """The engine releases its memory while requests are in flight."""
    schedule = {"type": "async", "lookahead": 1, "max_staleness": 1}
    check_run(world, tmp_path, launch, placement={"device": "cuda", "slots_per_node": 1}, schedule=schedule)


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


@pytest.mark.multigpu
def test_disaggregated_asynchronous_run_on_two_devices(world: Path, tmp_path: Path, launch: Launch) -> None:
    """Weights are pushed while the engine generates."""
    placement = {"device": "cuda", "slots_per_node": 1, "pools": {"engines": {}}, "rollout": {"pool": "engines"}}
    schedule = {"type": "async", "lookahead": 1, "max_staleness": 1}
    check_run(world, tmp_path, launch, placement=placement, schedule=schedule)
