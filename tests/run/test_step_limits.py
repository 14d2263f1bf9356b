"""Step limits: action and message of each violation, and consecutive skips that stop the run."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from megarl.config.limits import LimitsConfig
from megarl.run.step_limits import MAX_DUMPS, LimitDecision, StepLimits, StepStage

MISMATCH = "train_infer_mismatch/logprob_abs_max"


def make_limits(**given: Any) -> StepLimits:
    return StepLimits(LimitsConfig.model_validate(given))


def trained_metrics(num_applied: int = 1, **skipped: int) -> dict[str, float]:
    counts = {f"skipped/{reason}": float(skipped.get(reason, 0)) for reason in ("not_finite", "grad_norm", "mismatch")}
    return {"updates": float(num_applied), **counts}


@pytest.mark.parametrize(
    ("given", "stage", "metrics", "action", "text"),
    [
        ({}, "sampled", {"reward/mean": math.nan}, "none", ""),
        ({"reward": {"min": 0.1}}, "sampled", {"reward/mean": 0.2}, "none", ""),
        (
            {"reward": {"min": 0.1, "action": "warn"}},
            *("sampled", {"reward/mean": 0.05}, "warn", "reward/mean = 0.05 passed limits.reward.min = 0.1"),
        ),
        ({"kl": 0.5}, "estimated", {}, "none", ""),
        ({"kl": 0.5}, "estimated", {"kl/reference": 0.7}, "stop", "kl/reference = 0.7 passed limits.kl = 0.5"),
        (
            {"kl": {"max": 0.5, "action": "skip"}},
            *("estimated", {"kl/reference": math.nan}, "skip", "kl/reference = nan passed limits.kl = 0.5"),
        ),
        ({"kl": 0.5}, "sampled", {"kl/reference": 0.7, "reward/mean": 1}, "none", ""),
        (
            {"kl": {"max": 0.5, "action": "skip"}},
            *("trained", {**trained_metrics(), "policy/kl_reference": 0.7}, "warn"),
            "policy/kl_reference = 0.7 passed limits.kl = 0.5; the update was applied",
        ),
        (
            {"grad_norm": {"max": 1, "action": "warn"}, "logprob_abs_max": 1e-3},
            *("trained", {**trained_metrics(), "grad_norm_max": 3.0, MISMATCH: 0.01}, "stop"),
            f"grad_norm_max = 3 passed limits.grad_norm = 1; {MISMATCH} = 0.01 passed limits.logprob_abs_max = 0.001: "
            "trainer and engine disagree about the log-probability of a sampled token",
        ),
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
    assert decision.action == "stop"
    assert decision.message.startswith(
        "step 3: reward/mean = -1 passed limits.reward.min = 0; 3 steps in a row did not"
    )
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
