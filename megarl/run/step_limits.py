"""Checks the metrics of a step against `limits:`, and decides whether to warn, skip the update or stop the run.

The difference between trainer and engines is limited by default relative to the run's own steps: how much rounding
contributes depends on dtype, model and sharpness of its distribution; in bfloat16 it differs by a factor of 1,000
between models, but little between the steps of a run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from megarl.config.limits import (
    AUTO_LIMITS,
    MIN_REFERENCE_STEPS,
    REFERENCE_STEPS,
    AutoLimit,
    LimitConfig,
    LimitsConfig,
    describe_healthy,
)
from megarl.megatron.requests import MISMATCH_MESSAGE, MISMATCH_METRICS, MISSING_ROUTES, UpdateGuardSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class MismatchHistory:
    """What a run remembers of one statistic; part of the run state."""

    dtype: str
    """Of the policy, float32 or bfloat16."""
    passed: tuple[float, ...] = ()
    """Values of the last steps within their bound, oldest first."""


class MismatchLimits:
    """The limits of `MISMATCH_METRICS`: absolute ones, and those that are `auto`."""

    def __init__(self, limits: LimitsConfig, dtype: str) -> None:
        self._dtype, self._absolute = dtype, limits.mismatch
        self._auto: Mapping[str, AutoLimit] = {key: AUTO_LIMITS[dtype][key] for key in limits.auto_keys}
        self._largest = {key: LimitConfig(max=auto.limit) for key, auto in self._auto.items()}
        self.history = {key: MismatchHistory(dtype=dtype) for key in self._auto}
        """By limit that is `auto`; part of the run state, restored on resume."""

    def restore(self, history: Mapping[str, MismatchHistory]) -> None:
        """Continue with the history of a resumed run; not on a device on which the policy has another dtype."""
        same = {key: each for key, each in history.items() if key in self._auto and each.dtype == self._dtype}
        self.history |= same

    def of_step(self) -> dict[str, LimitConfig]:
        """Return the limits of the next step, by key."""
        bounds = {key: auto.bound(self.history[key].passed) for key, auto in self._auto.items()}
        changed = {key: self._largest[key].model_copy(update={"max": bound}) for key, bound in bounds.items()}
        return changed | self._absolute

    def notes(self) -> dict[str, str]:
        """Return what messages add about each limit of `of_step`: healthy values, of this run and the demo."""
        return {key: self._note(key) for key in (*self._auto, *self._absolute)}

    def check(self, metrics: Mapping[str, float]) -> Iterator[tuple[LimitConfig, str]]:
        """Yield each limit that a finished step violates, with a message; add the other values to the history."""
        notes = self.notes()
        for key, limit in self.of_step().items():
            metric = MISMATCH_METRICS[key]
            if metric not in metrics:
                continue
            value = metrics[metric]
            text = limit.violation(key, metric, value)
            if text is not None:
                yield limit, f"{text}{notes[key]}: {MISMATCH_MESSAGE}"
            elif key in self._auto:
                history = self.history[key]
                self.history[key] = replace(history, passed=(*history.passed, value)[-REFERENCE_STEPS:])

    def _note(self, key: str) -> str:
        passed = self.history[key].passed if key in self._auto else ()
        texts = [describe_healthy(key, self._dtype)]
        if len(passed) >= MIN_REFERENCE_STEPS:
            texts.insert(0, f"{min(passed):.2g} to {max(passed):.2g} in the last {len(passed)} steps")
        note = "; ".join(filter(None, texts))
        return f" ({note})" if note else ""


StepStage = Literal["sampled", "estimated", "trained"]
"""When metrics are checked: after sampling and rewards, after the estimates and before training, after training."""

Action = Literal["warn", "skip", "stop"]

MAX_DUMPS = 5
"""Number of steps of a run whose rejected batches are dumped."""

_CHECKED_METRICS: Mapping[StepStage, tuple[tuple[str, str], ...]] = {
    "sampled": (("reward", "reward/mean"),),
    "estimated": (("kl", "kl/reference"),),
    "trained": (
        ("kl", "policy/kl_reference"),
        ("grad_norm", "grad_norm_max"),
        ("missing_routes", MISSING_ROUTES),
    ),
}
"""Per stage, the limits to check and the metric that each one bounds; `MismatchLimits` has further ones."""

_REASONS = {
    "skipped/not_finite": "a loss or gradient that is not finite",
    "skipped/grad_norm": "limits.grad_norm",
    "skipped/mismatch": "limits of the mismatch between trainer and engines",
}


SKIPPED_METRICS = tuple(_REASONS)
"""The trainer's metrics that count the updates which its guard has rejected, by reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitDecision:
    """What to do with the step after a check."""

    action: Literal["none", "warn", "skip", "stop"]
    """`skip`: do not train the policy on this batch; in stage `trained`: no update was applied."""
    message: str = ""
    """One sentence that names the step; empty for `none`."""


_SEVERITY = ("none", "warn", "skip", "stop")


class StepLimits:
    """Limits of a run, and the count of consecutive steps without a policy update."""

    def __init__(self, limits: LimitsConfig, dtype: str = "float32") -> None:
        """`dtype`: of the policy, float32 or bfloat16; determines limits that are `auto`."""
        self._limits = limits
        self.mismatch = MismatchLimits(limits, dtype)
        """Its history is part of the run state, restored on resume."""
        self.skips_in_a_row = 0
        """Consecutive steps without a policy update; part of the run state, restored on resume."""

    def guard(self, run_dir: str, step: int, *, model: str = "") -> UpdateGuardSpec:
        """Return the update guard of a step; rejected batches are dumped to `<run_dir>/dumps/step-<step>`.

        Args:
            model: name of the auxiliary model trained, which is only checked for non-finite values; empty for the
                policy.
        """
        limits, dumps, name = self._limits, Path(run_dir).absolute() / "dumps", f"step-{step:06d}"
        other_folders = [folder for folder in dumps.glob("step-*") if folder.name != name]
        return UpdateGuardSpec(
            not_finite=limits.not_finite,
            grad_norm=None if model else limits.grad_norm,
            mismatch={} if model else self.mismatch.of_step(),
            mismatch_notes={} if model else self.mismatch.notes(),
            dump_folder=str(dumps / name / model) if len(other_folders) < MAX_DUMPS else None,
        )

    def check(
        self, stage: StepStage, metrics: Mapping[str, float], *, step: int, reasons: Sequence[str] = ()
    ) -> LimitDecision:
        """Check the metrics known at this stage of the step against the limits.

        Args:
            metrics: in stage `trained`, the trainer's metrics; empty if the policy was not trained.
            reasons: why the update has to be skipped, whatever the metrics are.
        """
        violations = [*self._exceeded_limits(stage, metrics), *(("skip", reason) for reason in reasons)]
        if stage == "sampled" and "reward/mean" not in metrics:
            violations.append(("skip", "all completions were dropped, because rewards failed (on_error: drop)"))
        if stage == "trained":
            violations += self._exceeded_mismatch(metrics)
            violations += _skipped_updates(metrics)
            if metrics.get("updates"):
                self.skips_in_a_row = 0
        if not violations:
            return LimitDecision(action="none")
        action = max((action for action, _ in violations), key=_SEVERITY.index)
        text = f"step {step}: {'; '.join(text for _, text in violations)}"
        return self._count_skips(LimitDecision(action=action, message=text))

    def check_engines(self, metrics: Mapping[str, float], *, step: int) -> LimitDecision:
        """Check the mismatch of a probe of the engines before the update of a step."""
        found = [(limit.action, text) for limit, text in self.mismatch.check(metrics)]
        if not found:
            return LimitDecision(action="none")
        action = max((action for action, _ in found), key=_SEVERITY.index)
        return self._count_skips(
            LimitDecision(action=action, message=f"step {step}: {'; '.join(text for _, text in found)}")
        )

    def repeat(self, probe: Mapping[str, float], *, is_skipped: bool) -> None:
        """Count a step before its training as it was decided before: it is repeated on the same groups."""
        for _ in self.mismatch.check(probe):
            pass
        self.skips_in_a_row += is_skipped

    def _exceeded_limits(self, stage: StepStage, metrics: Mapping[str, float]) -> Iterator[tuple[Action, str]]:
        for key, metric in _CHECKED_METRICS[stage]:
            limit: LimitConfig | None = getattr(self._limits, key)
            text = None if limit is None or metric not in metrics else limit.violation(key, metric, metrics[metric])
            if limit is None or text is None:
                continue
            if stage != "trained" or limit.action != "skip":
                yield limit.action, text
            elif key == "kl":
                yield "warn", f"{text}; the update was applied"

    def _exceeded_mismatch(self, metrics: Mapping[str, float]) -> Iterator[tuple[Action, str]]:
        for limit, text in self.mismatch.check(metrics):
            if limit.action != "skip":  # the trainer has skipped the update
                yield limit.action, text

    def _count_skips(self, decision: LimitDecision) -> LimitDecision:
        if decision.action == "skip":
            self.skips_in_a_row += 1
            most = self._limits.max_skips_in_a_row
            if self.skips_in_a_row > most:
                row = f"{self.skips_in_a_row} steps in a row did not update the policy"
                return LimitDecision(
                    action="stop",
                    message=f"{decision.message}; {row}, which exceeds limits.max_skips_in_a_row = {most}",
                )
        return decision


def _skipped_updates(metrics: Mapping[str, float]) -> Iterator[tuple[Action, str]]:
    """Yield the action for updates rejected by the trainer's guard: `skip` if no update was applied, else `warn`."""
    counts = {reason: int(metrics.get(name, 0)) for name, reason in _REASONS.items()}
    num_skipped = sum(counts.values())
    if num_skipped:
        num_applied = int(metrics["updates"])
        why = ", ".join(f"{count} for {reason}" for reason, count in counts.items() if count)
        yield (
            ("warn" if num_applied else "skip"),
            f"{num_skipped} of {num_applied + num_skipped} updates were skipped, {why}",
        )
