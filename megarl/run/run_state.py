"""State of a run apart from its models: everything else that is needed to resume it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from megarl.data.sampler import SamplerState
from megarl.errors import DataError
from megarl.process.atomic_files import atomic_write
from megarl.run.mismatch_limits import MismatchHistory
from megarl.run.run_totals import RunTotals
from megarl.schedule.events import ScheduleState
from megarl.tracking.tracker import ResumedMetrics

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
