"""Holds a step's metrics against the run's limits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megarl.config.limits import LimitConfig, LimitsConfig
from megarl.megatron.requests import DISAGREE, MISMATCH, Guard

Stage = Literal["sampled", "estimated", "trained"]
"""After the completions and their rewards; after what models say of them, before training; after training."""

Action = Literal["warn", "skip", "stop"]

MAX_DUMPS = 5
"""Steps of a run whose refused batches are kept."""

_WATCHED: Mapping[Stage, tuple[tuple[str, str], ...]] = {
    "sampled": (("reward", "reward/mean"),),
    "estimated": (("kl", "kl/reference"),),
    "trained": (
        ("kl", "policy/kl_reference"),
        ("grad_norm", "grad_norm_max"),
        ("logprob_abs_max", MISMATCH),
    ),
}
"""Limits with the metrics that are held against them."""

_REASONS = {
    "skipped/not_finite": "a loss or gradient that is not finite",
    "skipped/grad_norm": "limits.grad_norm",
    "skipped/mismatch": "limits.logprob_abs_max",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What is to become of a step."""

    action: Literal["none", "warn", "skip", "stop"]
    """`skip`: the policy is not to be trained on the step's batch; after training: it was not."""
    text: str = ""
    """One sentence, which names the step; empty with `none`."""


_SEVERITY = ("none", "warn", "skip", "stop")


class StepLimits:
    """A run's limits, and how long it has gone without an update."""

    def __init__(self, limits: LimitsConfig) -> None:
        self._limits = limits
        self.skips_in_a_row = 0
        """Steps up to now that left the policy as it is; what a resumed run has to go on with."""

    def check(self, stage: Stage, metrics: Mapping[str, float], *, step: int) -> Verdict:
        """Of what `metrics` has at this stage of the step.

        Args:
            metrics: after training the trainer's; empty where the policy was not trained, which is no news.
        """
        found = list(self._passed(stage, metrics))
        if stage == "trained":
            found += _left_out(metrics)
            if metrics.get("updates"):
                self.skips_in_a_row = 0
        if not found:
            return Verdict(action="none")
        action = max((action for action, _ in found), key=_SEVERITY.index)
        text = f"step {step}: {'; '.join(text for _, text in found)}"
        return self._counted(Verdict(action=action, text=text))

    def _passed(self, stage: Stage, metrics: Mapping[str, float]) -> Iterator[tuple[Action, str]]:
        for key, metric in _WATCHED[stage]:
            limit: LimitConfig | None = getattr(self._limits, key)
            text = None if limit is None or metric not in metrics else limit.refusal(key, metric, metrics[metric])
            if limit is None or text is None:
                continue
            if key == "logprob_abs_max":
                text += f": {DISAGREE}"
            if stage != "trained" or limit.action != "skip":
                yield limit.action, text
            elif key == "kl":
                yield "warn", f"{text} in an update, which was made"

    def _counted(self, verdict: Verdict) -> Verdict:
        if verdict.action == "skip":
            self.skips_in_a_row += 1
            most = self._limits.max_skips_in_a_row
            if self.skips_in_a_row > most:
                row = f"{self.skips_in_a_row} steps in a row have left the policy as it is"
                return Verdict(
                    action="stop", text=f"{verdict.text}; {row}, which passed limits.max_skips_in_a_row = {most}"
                )
        return verdict


def _left_out(metrics: Mapping[str, float]) -> Iterator[tuple[Action, str]]:
    """What the trainer's guard did: `skip` where no update was made."""
    counts = {reason: int(metrics.get(name, 0)) for name, reason in _REASONS.items()}
    skipped = sum(counts.values())
    if skipped:
        made = int(metrics["updates"])
        why = ", ".join(f"{count} for {reason}" for reason, count in counts.items() if count)
        yield ("warn" if made else "skip"), f"{skipped} of {made + skipped} updates were left out, {why}"


def guard_of(limits: LimitsConfig, run_dir: str, step: int, *, model: str = "") -> Guard:
    """What the trainer is to look at in this step; refused batches go to `<run_dir>/dumps/step-<step>`.

    Args:
        model: of one beside the policy, its name; only what is not finite is looked for.
    """
    dumps = Path(run_dir).absolute() / "dumps"
    name = f"step-{step:06d}"
    others = [folder for folder in dumps.glob("step-*") if folder.name != name]
    return Guard(
        not_finite=limits.not_finite,
        grad_norm=None if model else limits.grad_norm,
        mismatch=None if model else limits.logprob_abs_max,
        dump_folder=str(dumps / name / model) if len(others) < MAX_DUMPS else None,
    )
