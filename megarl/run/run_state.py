"""State of a run in a checkpoint, without the models: step, position in the data, schedule, totals."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from megarl.cluster.process.atomic_files import atomic_write
from megarl.data.sampler import SamplerState
from megarl.errors import DataError
from megarl.run.schedule.events import ScheduleState
from megarl.run.step_limits import MismatchHistory
from megarl.tracking.progress import RunSummary
from megarl.tracking.timing import PhaseTimer
from megarl.tracking.tracker import ResumedMetrics


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


STATE_FILE = "state.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """Run state between two steps. Groups in flight or not used yet are part of `schedule`; with `sync`, none is.

    SFT, reward-model and DPO stages leave the RL fields at their defaults.
    """

    step: int = 0
    """Number of the last finished step."""
    policy_version: int = 0
    samplers: Mapping[str, SamplerState] = field(default_factory=dict)
    """Position of each data sampler, in rows."""
    algorithm_state: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    """Fields of each state registered with `RLRun.register_state`, by name."""
    schedule: ScheduleState | None = None
    """Of schedules other than `sync`, which have groups in flight between two steps."""
    skips_in_a_row: int = 0
    """Consecutive steps without a policy update, see `limits.max_skips_in_a_row`."""
    mismatch: Mapping[str, MismatchHistory] = field(default_factory=dict)
    """By limit that is `auto`, the steps that it refers to."""
    reward_weights: Mapping[str, float] = field(default_factory=dict)
    """Weights of the reward terms in the last finished step; empty for stages without rewards."""
    metrics_bytes: int = 0
    """Length of `metrics.jsonl` in bytes."""
    totals: RunTotals = field(default_factory=RunTotals)

    def write(self, folder: Path) -> None:
        """Write `state.json` into `folder` atomically."""
        with atomic_write(folder / STATE_FILE) as draft:
            draft.write_text(json.dumps(asdict(self), indent=2) + "\n")

    @classmethod
    def read(cls, folder: Path) -> RunState:
        """Read `state.json` from the checkpoint in `folder`.

        Raises:
            DataError: the file is missing or invalid.
        """
        path = folder / STATE_FILE
        try:
            return _ADAPTER.validate_json(path.read_bytes())
        except OSError as e:
            raise DataError(f"{path} cannot be read: {e.strerror}") from e
        except ValidationError as e:
            where = e.errors()[0]
            raise DataError(f"{path}: {'.'.join(map(str, where['loc'])) or 'the file'}: {where['msg']}") from e


def resumed_metrics(state: RunState) -> ResumedMetrics:
    """Return the step and file position at which the metrics of a resumed run continue."""
    return ResumedMetrics(step=state.step, num_bytes=state.metrics_bytes)


_ADAPTER = TypeAdapter(RunState)
