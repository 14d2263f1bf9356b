"""What a run comes to, counted step by step."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from megarl.tracking.phases import PhaseTimer
from megarl.tracking.summary import RunSummary


@dataclass(slots=True, kw_only=True)
class Books:
    """Of a run up to now, whichever processes have run it."""

    seconds: float = 0.0
    seconds_by_phase: dict[str, float] = field(default_factory=dict)
    step_seconds: float = 0.0
    tokens: int = 0
    """That were trained on, prompts included."""
    weight_sync_bytes: int = 0
    logprob_abs_max: float | None = 0.0
    """The largest log-probability mismatch of any step; None where there is nothing to compare with."""
    evaluations: dict[int, float] = field(default_factory=dict)
    """By step."""

    def count_step(self, *, tokens: int, seconds: float, mismatch: float | None = None) -> None:
        """Add a step that is over."""
        self.tokens += tokens
        self.step_seconds += seconds
        if mismatch is not None:
            self.logprob_abs_max = max(self.logprob_abs_max or 0.0, mismatch)

    def by(self, timer: PhaseTimer) -> Books:
        """A copy, as of now by the run's `timer`."""
        evaluations = dict(self.evaluations)
        return replace(self, seconds=timer.seconds(), seconds_by_phase=dict(timer.totals), evaluations=evaluations)

    @property
    def tokens_per_second(self) -> float:
        """Over the time of all steps; 0 before the first."""
        return self.tokens / self.step_seconds if self.step_seconds else 0.0

    def summary(self, *, step: int, steps_planned: int) -> RunSummary:
        """Of a run that has ended after `step`."""
        return RunSummary(
            eval_before=self.evaluations.get(0),
            eval_after=self.evaluations.get(step),
            steps=step,
            steps_planned=steps_planned,
            seconds_total=self.seconds,
            seconds_by_phase=self.seconds_by_phase,
            tokens_per_second=self.tokens_per_second,
            weight_sync_bytes=self.weight_sync_bytes,
            logprob_abs_max=self.logprob_abs_max,
        )
