"""Limits of the difference between trainer and engines; by default relative to the run's own steps.

How much rounding contributes depends on dtype, model and sharpness of its distribution; in bfloat16 it differs by a
factor of 1,000 between models, but little between the steps of a run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from megarl.config.limits import (
    AUTO_LIMITS,
    MIN_REFERENCE_STEPS,
    REFERENCE_STEPS,
    AutoLimit,
    LimitConfig,
    LimitsConfig,
    describe_healthy,
)
from megarl.megatron.requests import MISMATCH_MESSAGE, MISMATCH_METRICS


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
        self.history = {key: MismatchHistory(dtype=dtype) for key in self._auto}
        """By limit that is `auto`; part of the run state, restored on resume."""

    def restore(self, history: Mapping[str, MismatchHistory]) -> None:
        """Continue with the history of a resumed run; not on a device on which the policy has another dtype."""
        same = {key: each for key, each in history.items() if key in self._auto and each.dtype == self._dtype}
        self.history |= same

    def of_step(self) -> dict[str, LimitConfig]:
        """Return the limits of the next step, by key."""
        auto = {key: LimitConfig(max=limit.bound(self.history[key].passed)) for key, limit in self._auto.items()}
        return auto | self._absolute

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
