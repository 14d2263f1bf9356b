"""Limits of a step: actions, messages and skips, and bounds relative to the run's own steps, in simulated runs."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megarl.config.limits import AUTO_LIMITS, MIN_REFERENCE_STEPS, REFERENCE_STEPS, AutoLimit, LimitConfig, LimitsConfig
from megarl.errors import LimitError
from megarl.run.step_limits import MAX_DUMPS, LimitDecision, MismatchHistory, MismatchLimits, StepLimits, StepStage
from tests.algorithms.scripted_run import run_script

MISMATCH = "train_infer_mismatch/logprob_abs_max"
KL = "train_infer_mismatch/kl"
BF16 = AUTO_LIMITS["bfloat16"]["logprob_kl"]

# fmt: off
DEMO = [2.93e-06, 2.83e-06, 8.40e-06, 3.50e-06, 3.33e-07, 2.59e-06, 5.37e-06, 2.86e-06, 1.70e-06, 3.10e-06, 3.09e-06,
        5.53e-06, 6.51e-06, 4.73e-06, 4.25e-06, 4.62e-06, 2.76e-06, 5.78e-06, 2.62e-06, 2.27e-06, 9.36e-06, 1.97e-06,
        2.48e-06, 2.13e-06, 3.00e-06, 3.11e-06, 1.74e-06, 6.04e-07, 1.50e-06, 4.67e-07, 3.63e-06, 5.39e-06, 4.15e-07,
        1.21e-06, 1.65e-06, 2.47e-07, 4.20e-06, 1.20e-06, 2.31e-06, 1.74e-06]
# fmt: on
"""KL divergence of trainer and engine in the steps of the demo in bfloat16."""

SCALED = [7.2e-5, 8.9e-5, 1.0e-4, 1.0e-3, 5.5e-3]
"""The same if a tensor of the engine is multiplied by 1.25: of those that change it at all, the weakest and others."""


def last_step(values: Iterable[float], limits: MismatchLimits | None = None) -> int | None:
    """Return the step that ended the run, counted from 1."""
    limits = limits or MismatchLimits(LimitsConfig(), "bfloat16")
    return next((step for step, value in enumerate(values, start=1) if list(limits.check({KL: value}))), None)


def resampled(seed: int, scale: float = 1.0) -> Iterator[float]:
    """Yield values of the demo in random order, without end."""
    rng = random.Random(seed)
    while True:
        yield rng.choice(DEMO) * scale


def test_bound_is_four_times_the_largest_of_the_last_values_between_floor_and_limit() -> None:
    auto = AutoLimit(healthy=(1, 2), floor=3.0, limit=500.0)
    rng = np.random.default_rng(0)
    for length in (*range(MIN_REFERENCE_STEPS), MIN_REFERENCE_STEPS, 9, REFERENCE_STEPS, 3 * REFERENCE_STEPS):
        for scale, spread in itertools.product((1e-3, 1.0, 10.0, 1e3), (0.1, 1.0)):
            values = (scale * rng.lognormal(sigma=spread, size=length)).tolist()
            if length < MIN_REFERENCE_STEPS:
                assert auto.bound(values) == auto.limit
            else:
                last = np.array(values[-REFERENCE_STEPS:])
                bound = np.clip(4 * np.sort(last)[-1], auto.floor, auto.limit)
                assert auto.bound(values) == pytest.approx(bound)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 30.0, 1000.0])
def test_healthy_runs_do_not_stop(scale: float) -> None:
    """Also those of models with a smaller or larger mismatch than the demo's."""
    assert last_step(DEMO) is None
    for seed in range(20):
        values = resampled(seed, scale)
        assert last_step(next(values) for _ in range(300)) is None


@pytest.mark.parametrize("kl", SCALED)
def test_wrong_weights_stop_the_run_in_their_first_step(kl: float) -> None:
    """Whether the next push repairs them or not."""
    for broken in range(MIN_REFERENCE_STEPS + 1, 80):
        values = resampled(broken)
        assert last_step(next(values) + (kl if step == broken else 0.0) for step in range(1, 100)) == broken


def test_growth_of_a_factor_of_100_over_200_steps_is_healthy() -> None:
    values = resampled(3)
    assert last_step(next(values) * 100 ** (step / 200) for step in range(200)) is None


def test_a_drifting_engine_stops_at_the_limit() -> None:
    """Its mismatch grows so slowly that no step is far above those before."""
    values = [1e-6 * 1.05**step for step in range(1000)]
    stopped = last_step(values)
    assert stopped is not None
    assert values[stopped - 2] <= BF16.limit < values[stopped - 1]


def test_a_value_that_violates_the_bound_does_not_raise_it() -> None:
    limits = MismatchLimits(LimitsConfig(), "bfloat16")
    assert last_step([2e-5] * MIN_REFERENCE_STEPS, limits) is None
    for _ in range(40):
        assert last_step([9e-3, float("nan")], limits) == 1
    assert limits.of_step()["logprob_kl"].max == pytest.approx(8e-5)


def test_first_steps_and_nan_are_compared_with_the_limit_of_the_dtype() -> None:
    assert last_step([9e-3] * MIN_REFERENCE_STEPS) is None
    assert last_step([1.1e-2]) == 1
    assert last_step([2e-6, 2e-6, float("nan")]) == 3
    assert last_step([9e-9] * 10 + [9e-7] * 3, MismatchLimits(LimitsConfig(), "float32")) is None
    assert last_step([9e-9] * 10 + [1.1e-6], MismatchLimits(LimitsConfig(), "float32")) == 11
    assert last_step([1e-6] * 10 + [1.1e-5], MismatchLimits(LimitsConfig(), "float32")) == 11


def test_explicit_limits_are_absolute() -> None:
    limits = MismatchLimits(LimitsConfig.model_validate({"logprob_kl": 0.5}), "bfloat16")
    assert last_step([1e-9] * 10 + [0.4] * 10, limits) is None
    assert limits.history.keys() == {"logprob_abs_p99"}
    assert last_step([0.6], limits) == 1


def test_messages_state_value_bound_and_healthy_values() -> None:
    limits = MismatchLimits(LimitsConfig(), "bfloat16")
    disagree = "trainer and engine disagree about the log-probability of a sampled token"
    demo = "6.3e-08 to 9.6e-06 in bfloat16 in the demo"
    ((limit, text),) = limits.check({KL: 0.02})
    assert (limit, text) == (LimitConfig(max=0.01), f"{KL} = 0.02 passed limits.logprob_kl = 0.01 ({demo}): {disagree}")
    assert last_step([2e-6, 3e-6, 4e-6, 3e-6] * 2, limits) is None
    note = f" (2e-06 to 4e-06 in the last 8 steps; {demo})"
    ((limit, text),) = limits.check({KL: 4e-5})
    assert limit.max == pytest.approx(1.6e-5)
    assert text == f"{KL} = 4e-05 passed limits.logprob_kl = 1.6e-05{note}: {disagree}"
    assert limits.notes()["logprob_kl"] == note


def test_history_of_another_dtype_is_not_restored() -> None:
    history = MismatchHistory(dtype="float32", passed=(1e-9,) * 9)
    for dtype, expected in (("float32", history), ("bfloat16", MismatchHistory(dtype="bfloat16"))):
        limits = MismatchLimits(LimitsConfig(), dtype)
        limits.restore({"logprob_kl": history})
        assert limits.history["logprob_kl"] == expected


def test_a_run_whose_engine_serves_wrong_weights_ends(tmp_path: Path) -> None:
    steps = itertools.count(1)
    message = rf"^step 10: {KL} = 5e-06 passed limits\.logprob_kl = 1e-06 \(4e-09 to 4e-09 in the last 9 steps; "
    models = {"policy": {"metrics": lambda request: {KL: 5e-6 if next(steps) == 10 else 4e-9}}}
    with pytest.raises(LimitError, match=message):
        run_script(tmp_path, {"type": "grpo", "kl_loss": None}, lambda *a: float(a[2] % 2), steps=20, models=models)


def make_limits(**given: Any) -> StepLimits:
    return StepLimits(LimitsConfig.model_validate(given))


def trained_metrics(num_applied: int = 1, **skipped: int) -> dict[str, float]:
    counts = {f"skipped/{reason}": float(skipped.get(reason, 0)) for reason in ("not_finite", "grad_norm", "mismatch")}
    return {"updates": float(num_applied), **counts}


MIN_REWARD = {"reward": {"min": 0.1, "action": "warn"}}
KL_SKIP = {"kl": {"max": 0.5, "action": "skip"}}


@pytest.mark.parametrize(
    ("given", "stage", "metrics", "action", "text"),
    [
        ({}, "sampled", {"reward/mean": math.nan}, "none", ""),
        ({"reward": {"min": 0.1}}, "sampled", {"reward/mean": 0.2}, "none", ""),
        (MIN_REWARD, "sampled", {"reward/mean": 0.05}, "warn", "reward/mean = 0.05 passed limits.reward.min = 0.1"),
        ({"kl": 0.5}, "estimated", {}, "none", ""),
        ({"kl": 0.5}, "estimated", {"kl/reference": 0.7}, "stop", "kl/reference = 0.7 passed limits.kl = 0.5"),
        (KL_SKIP, "estimated", {"kl/reference": math.nan}, "skip", "kl/reference = nan passed limits.kl = 0.5"),
        ({"kl": 0.5}, "sampled", {"kl/reference": 0.7, "reward/mean": 1}, "none", ""),
        (
            *(KL_SKIP, "trained", {**trained_metrics(), "policy/kl_reference": 0.7}, "warn"),
            "policy/kl_reference = 0.7 passed limits.kl = 0.5; the update was applied",
        ),
        (
            {"grad_norm": {"max": 1, "action": "warn"}, "logprob_abs_max": 1e-3},
            *("trained", {**trained_metrics(), "grad_norm_max": 3.0, MISMATCH: 0.01}, "stop"),
            f"grad_norm_max = 3 passed limits.grad_norm = 1; {MISMATCH} = 0.01 passed limits.logprob_abs_max = 0.001: "
            "trainer and engine disagree about the log-probability of a sampled token",
        ),
        (
            *({}, "trained", {**trained_metrics(), "router_replay/missing_share": 0.02}, "warn"),
            "router_replay/missing_share = 0.02 passed limits.missing_routes = 0.01",
        ),
        ({}, "trained", {**trained_metrics(), "router_replay/missing_share": 0.005}, "none", ""),
        (
            {"grad_norm": {"max": 1, "action": "skip"}},
            *("trained", {**trained_metrics(3, grad_norm=1), "grad_norm_max": 3.0}, "warn"),
            "1 of 4 updates were skipped, 1 for limits.grad_norm",
        ),
        (
            *({}, "trained", trained_metrics(0, not_finite=2, grad_norm=1), "skip"),
            "3 of 3 updates were skipped, 2 for a loss or gradient that is not finite, 1 for limits.grad_norm",
        ),
    ],
)
def test_each_violation_has_an_action_and_a_message(
    given: dict[str, Any], stage: StepStage, metrics: dict[str, float], action: Any, text: str
) -> None:
    message = text and f"step 12: {text}"
    assert make_limits(**given).check(stage, metrics, step=12) == LimitDecision(action=action, message=message)


def test_consecutive_skips_of_any_stage_stop_the_run() -> None:
    step_limits = make_limits(reward={"min": 0.0, "action": "skip"}, max_skips_in_a_row=2)
    bad, good = {"reward/mean": -1.0}, {"reward/mean": 1.0}
    assert step_limits.check("sampled", bad, step=1).action == "skip"
    assert step_limits.check("trained", {}, step=1).action == "none"
    assert step_limits.check("sampled", good, step=2).action == "none"
    assert step_limits.check("trained", trained_metrics(0, not_finite=1), step=2).action == "skip"
    assert step_limits.skips_in_a_row == 2
    decision = step_limits.check("sampled", bad, step=3)
    start = "step 3: reward/mean = -1 passed limits.reward.min = 0; 3 steps in a row did not"
    assert (decision.action, decision.message[: len(start)]) == ("stop", start)
    assert "limits.max_skips_in_a_row = 2" in decision.message


@pytest.mark.parametrize("metrics", [trained_metrics(), trained_metrics(1, not_finite=3)])
def test_an_update_resets_the_skip_count(metrics: dict[str, float]) -> None:
    step_limits = make_limits(max_skips_in_a_row=1)
    for step in (1, 3, 5):
        assert step_limits.check("trained", trained_metrics(0, mismatch=1), step=step).action == "skip"
        assert step_limits.check("trained", metrics, step=step + 1).action in ("none", "warn")
    assert step_limits.skips_in_a_row == 0
    assert make_limits(max_skips_in_a_row=0).check("trained", trained_metrics(0, not_finite=1), step=1).action == "stop"


def test_guard_has_limits_and_dump_folder(tmp_path: Path) -> None:
    given = LimitsConfig.model_validate({"grad_norm": 5, "logprob_abs_max": 1e-3, "not_finite": "skip"})
    guard = StepLimits(given, "bfloat16").guard(str(tmp_path), 7)
    assert (guard.not_finite, guard.grad_norm) == ("skip", given.grad_norm)
    limits = {key: limit.max for key, limit in guard.mismatch.items()}
    assert limits == {"logprob_kl": 0.01, "logprob_abs_p99": 1.0, "logprob_abs_max": 1e-3}
    assert guard.mismatch_notes["logprob_kl"] == " (6.3e-08 to 9.6e-06 in bfloat16 in the demo)"
    assert guard.mismatch_notes["logprob_abs_max"] == ""
    assert guard.dump_folder == str(tmp_path / "dumps" / "step-000007")
    critic = StepLimits(given).guard(str(tmp_path), 7, model="critic")
    assert (critic.not_finite, critic.grad_norm, critic.mismatch) == ("skip", None, {})
    assert critic.dump_folder == str(tmp_path / "dumps" / "step-000007" / "critic")


def test_the_number_of_dumped_steps_is_limited(tmp_path: Path) -> None:
    def folder_of(step: int) -> str | None:
        return make_limits().guard(str(tmp_path), step).dump_folder

    for step in range(1, MAX_DUMPS + 1):
        folder = folder_of(step)
        assert folder is not None
        Path(folder).mkdir(parents=True)
    assert folder_of(MAX_DUMPS) == folder, "the same step does not count again"
    assert folder_of(MAX_DUMPS + 1) is None
