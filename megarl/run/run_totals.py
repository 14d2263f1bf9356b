"""Run totals (tokens, time, bytes), accumulated across restarts."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from megarl.tracking.phases import PhaseTimer
from megarl.tracking.summary import RunSummary


@dataclass(slots=True, kw_only=True)
class RunTotals:
    """Totals of a run up to now, over all processes that have run it."""

    seconds: float = 0.0
    seconds_by_phase: dict[str, float] = field(default_factory=dict)
    step_seconds: float = 0.0
    tokens: int = 0
    """Tokens trained on, prompts included."""
    weight_sync_bytes: int = 0
    logprob_abs_max: float | None = 0.0
    """Largest trainer/engine log-prob mismatch of any step; None in stages without engines."""
    evaluations: dict[int, float] = field(default_factory=dict)
    """Evaluation score by step."""

    def add_step(self, *, tokens: int, seconds: float, mismatch: float | None = None) -> None:
        """Add the counts of a finished step."""
        self.tokens += tokens
        self.step_seconds += seconds
        if mismatch is not None:
            self.logprob_abs_max = max(self.logprob_abs_max or 0.0, mismatch)

    def snapshot(self, timer: PhaseTimer) -> RunTotals:
        """Return a copy with the current times of the run's `timer`."""
        evaluations = dict(self.evaluations)
        return replace(self, seconds=timer.seconds(), seconds_by_phase=dict(timer.totals), evaluations=evaluations)

    @property
    def tokens_per_second(self) -> float:
        """Mean training throughput over the time of all steps; 0 before the first step."""
        return self.tokens / self.step_seconds if self.step_seconds else 0.0

    def summary(self, *, step: int, steps_planned: int) -> RunSummary:
        """Return the summary of a run that ended after `step`."""
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
