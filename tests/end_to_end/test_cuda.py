"""`megarl train` on CUDA devices: engine and trainer agree, with colocated and with disaggregated engines."""

import json
from typing import Any

import pytest

from tests.end_to_end.launched import list_steps
from tests.end_to_end.tiny_world import write_run

ROLLOUT = {"max_new_tokens": 12, "engine": {"extra_args": {"attention_backend": "triton"}}}
"""SGLang's default attention has no kernels for heads as small as those of the tests' models."""
MEAN_TOLERANCE = 0.03
"""Largest mean |difference| of sampled and recomputed log-probabilities in bfloat16."""
MEAN_MISMATCH = "train_infer_mismatch/logprob_abs_mean"
ONE, TWO = ({"device": "cuda", "slots_per_node": number} for number in (1, 2))
DISAGGREGATED = ONE | {"pools": {"engines": {}}, "rollout": {"pool": "engines"}}
ASYNC = {"type": "async", "lookahead": 1, "max_staleness": 1}


def on(number: int, name: str, placement: dict[str, Any], schedule: Any = None, parallel: Any = None) -> Any:
    """Return a parameter set for that number of devices."""
    marks = pytest.mark.gpu if number == 1 else pytest.mark.multigpu
    return pytest.param(placement, schedule or {}, parallel or {}, id=name, marks=marks)


@pytest.mark.parametrize(
    ("placement", "schedule", "parallel"),
    [
        on(1, "colocated", ONE),
        on(1, "colocated, memory is released while requests are in flight", ONE, ASYNC),
        on(2, "colocated, tp 2", TWO, parallel={"tp": 2}),
        on(2, "colocated, pp 2", TWO, parallel={"pp": 2}),
        on(2, "colocated, dp 2", TWO),
        on(2, "disaggregated, weights cross over NCCL", DISAGGREGATED),
        on(2, "disaggregated, weights are pushed while the engine generates", DISAGGREGATED, ASYNC),
    ],
)
def test_sampled_and_recomputed_log_probabilities_agree(placement, schedule, parallel, world, tmp_path, launch):
    pytest.importorskip("ray", reason="needs Ray: make setup-gpu")
    pytest.importorskip("sgl_kernel", reason="needs SGLang's CUDA kernels: make setup-gpu")
    trainer = {"steps": 4, "optimizer": {"lr": 1e-3}, "parallel": parallel}
    sections = {"trainer": trainer, "rollout": ROLLOUT, "placement": placement, "schedule": schedule}
    command = launch("train", write_run(world, tmp_path, **sections))
    assert command.wait() == 0, command.stderr
    steps = list_steps(tmp_path / "run")
    assert [step["step"] for step in steps] == [1, 2, 3, 4]
    # a step that trains on no tokens of the last version probes the engines instead
    assert max((step[MEAN_MISMATCH] for step in steps if MEAN_MISMATCH in step), default=0.0) < MEAN_TOLERANCE
    if schedule:
        assert max(step["staleness/max"] for step in steps) == 1
    else:
        assert [step["policy_version/min"] for step in steps] == [0, 1, 2, 3]
    assert json.loads((tmp_path / "run/summary.json").read_text())["steps"] == 4
    command.assert_no_processes_left()
