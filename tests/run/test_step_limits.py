"""A step's metrics against the limits: which action, in which words, and when skipping ends the run."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from megarl.config.limits import LimitsConfig
from megarl.run.step_limits import MAX_DUMPS, Stage, StepLimits, Verdict, guard_of


def limits(**given: Any) -> StepLimits:
    return StepLimits(LimitsConfig.model_validate(given))


def trained(made: int = 1, **skipped: int) -> dict[str, float]:
    counts = {f"skipped/{reason}": float(skipped.get(reason, 0)) for reason in ("not_finite", "grad_norm", "mismatch")}
    return {"updates": float(made), **counts}


@pytest.mark.parametrize(
    ("given", "stage", "metrics", "verdict"),
    [
        ({}, "sampled", {"reward/mean": math.nan}, ("none", "")),
        ({"reward": {"min": 0.1}}, "sampled", {"reward/mean": 0.2}, ("none", "")),
        (
            {"reward": {"min": 0.1, "action": "warn"}},
            "sampled",
            {"reward/mean": 0.05},
            ("warn", "step 12: reward/mean = 0.05 passed limits.reward.min = 0.1"),
        ),
        ({"kl": 0.5}, "estimated", {}, ("none", "")),
        (
            {"kl": 0.5},
            "estimated",
            {"kl/reference": 0.7},
            ("stop", "step 12: kl/reference = 0.7 passed limits.kl = 0.5"),
        ),
        (
            {"kl": {"max": 0.5, "action": "skip"}},
            "estimated",
            {"kl/reference": math.nan},
            ("skip", "step 12: kl/reference = nan passed limits.kl = 0.5"),
        ),
        ({"kl": 0.5}, "sampled", {"kl/reference": 0.7, "reward/mean": 1}, ("none", "")),
        (
            {"kl": {"max": 0.5, "action": "skip"}},
            "trained",
            {**trained(), "policy/kl_reference": 0.7},
            ("warn", "step 12: policy/kl_reference = 0.7 passed limits.kl = 0.5 in an update, which was made"),
        ),
        (
            {"grad_norm": {"max": 1, "action": "warn"}, "logprob_abs_max": 1e-3},
            "trained",
            {**trained(), "grad_norm_max": 3.0, "mismatch/logprob_abs_max": 0.01},
            (
                "stop",
                "step 12: grad_norm_max = 3 passed limits.grad_norm = 1; mismatch/logprob_abs_max = 0.01 passed "
                "limits.logprob_abs_max = 0.001: trainer and engine disagree about the log-probability of a sampled "
                "token",
            ),
        ),
        (
            {"grad_norm": {"max": 1, "action": "skip"}},
            "trained",
            {**trained(3, grad_norm=1), "grad_norm_max": 3.0},
            ("warn", "step 12: 1 of 4 updates were left out, 1 for limits.grad_norm"),
        ),
        (
            {},
            "trained",
            trained(0, not_finite=2, grad_norm=1),
            (
                "skip",
                "step 12: 3 of 3 updates were left out, 2 for a loss or gradient that is not finite, 1 for "
                "limits.grad_norm",
            ),
        ),
    ],
)
def test_a_passed_limit_has_its_action_and_one_sentence(
    given: dict[str, Any], stage: Stage, metrics: dict[str, float], verdict: tuple[Any, str]
) -> None:
    action, text = verdict
    assert limits(**given).check(stage, metrics, step=12) == Verdict(action=action, text=text)


def test_skips_in_a_row_end_the_run_wherever_they_come_from() -> None:
    watched = limits(reward={"min": 0.0, "action": "skip"}, max_skips_in_a_row=2)
    low, fine = {"reward/mean": -1.0}, {"reward/mean": 1.0}
    assert watched.check("sampled", low, step=1).action == "skip"
    assert watched.check("trained", {}, step=1).action == "none"
    assert watched.check("sampled", fine, step=2).action == "none"
    assert watched.check("trained", trained(0, not_finite=1), step=2).action == "skip"
    assert watched.skips_in_a_row == 2
    verdict = watched.check("sampled", low, step=3)
    assert verdict == Verdict(
        action="stop",
        text="step 3: reward/mean = -1 passed limits.reward.min = 0; 3 steps in a row have left the policy as it is, "
        "which passed limits.max_skips_in_a_row = 2",
    )


@pytest.mark.parametrize("metrics", [trained(), trained(1, not_finite=3)])
def test_an_update_ends_the_row(metrics: dict[str, float]) -> None:
    watched = limits(max_skips_in_a_row=1)
    for step in (1, 3, 5):
        assert watched.check("trained", trained(0, mismatch=1), step=step).action == "skip"
        assert watched.check("trained", metrics, step=step + 1).action in ("none", "warn")
    assert watched.skips_in_a_row == 0


def test_no_skip_is_the_most_where_none_may_be() -> None:
    assert limits(max_skips_in_a_row=0).check("trained", trained(0, not_finite=1), step=1).action == "stop"


def test_the_trainer_is_told_what_to_look_at_and_where_to_dump(tmp_path: Path) -> None:
    given = LimitsConfig.model_validate({"grad_norm": 5, "logprob_abs_max": 1e-3, "not_finite": "skip"})
    guard = guard_of(given, str(tmp_path), 7)
    assert (guard.not_finite, guard.grad_norm, guard.mismatch) == ("skip", given.grad_norm, given.logprob_abs_max)
    assert guard.dump_folder == str(tmp_path / "dumps" / "step-000007")
    critic = guard_of(given, str(tmp_path), 7, model="critic")
    assert (critic.not_finite, critic.grad_norm, critic.mismatch) == ("skip", None, None)
    assert critic.dump_folder == str(tmp_path / "dumps" / "step-000007" / "critic")


def test_a_run_dumps_so_many_steps_and_no_more(tmp_path: Path) -> None:
    for step in range(1, MAX_DUMPS + 1):
        folder = guard_of(LimitsConfig(), str(tmp_path), step).dump_folder
        assert folder is not None
        Path(folder).mkdir(parents=True)
    assert guard_of(LimitsConfig(), str(tmp_path), MAX_DUMPS).dump_folder == folder  # the same step, once more
    assert guard_of(LimitsConfig(), str(tmp_path), MAX_DUMPS + 1).dump_folder is None
