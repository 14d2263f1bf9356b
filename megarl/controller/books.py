"""What a reinforcement-learning run comes to, counted step by step."""

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
    logprob_abs_max: float = 0.0
    """The largest log-probability mismatch of any step."""
    evaluations: dict[int, float] = field(default_factory=dict)
    """By step."""

    def count_step(self, *, tokens: int, seconds: float, mismatch: float) -> None:
        """Add a step that is over."""
        self.tokens += tokens
        self.step_seconds += seconds
        self.logprob_abs_max = max(self.logprob_abs_max, mismatch)

    def by(self, timer: PhaseTimer) -> Books:
        """A copy, as of now by the run's `timer`."""
        evaluations = dict(self.evaluations)
        return replace(self, seconds=timer.seconds(), seconds_by_phase=dict(timer.totals), evaluations=evaluations)

    def summary(self, *, step: int, steps_planned: int) -> RunSummary:
        """Of a run that has ended after `step`."""
        return RunSummary(
            eval_before=self.evaluations.get(0),
            eval_after=self.evaluations.get(step),
            steps=step,
            steps_planned=steps_planned,
            seconds_total=self.seconds,
            seconds_by_phase=self.seconds_by_phase,
            tokens_per_second=self.tokens / self.step_seconds if self.step_seconds else 0.0,
            weight_sync_bytes=self.weight_sync_bytes,
            logprob_abs_max=self.logprob_abs_max,
        )
