"""What each step did with its update of the policy, on disk before the weights of the step are pushed.

    <run_dir>/journal/updates/000000000007.jsonl    {"step": 7, "batch": "9d1c...", "updates": 1}
                                                    {"step": 8, "batch": "04fe...", "skipped": "step 8: ..."}

A step that is trained again on the same groups, after a kill or by `megarl replay`, does the same: the weights that
later groups were sampled with depend on it, but limits may have been changed, and engines compared with the trainer
again may differ by other amounts. A file is named by its first step; those before the oldest checkpoint are removed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from megarl.checkpoint.run_lock import require_lock
from megarl.cluster.process.atomic_files import append_line, read_lines
from megarl.config.limits import LimitConfig
from megarl.errors import DataError
from megarl.megatron.requests import TrainStats, UpdateGuardSpec
from megarl.rollout.journal import journal_folder
from megarl.run.remote.rollout_group import FinishedGroup
from megarl.run.schedule_log import SUFFIX, list_files
from megarl.run.step_limits import SKIPPED_METRICS


@dataclass(frozen=True, slots=True, kw_only=True)
class StepUpdate:
    """What a step did with its update of the policy."""

    step: int
    batch: str
    """Hash of the groups that the step was given."""
    skipped: str = ""
    """Why the policy was not trained; empty: it was."""
    probe: Mapping[str, float] = field(default_factory=dict)
    """Metrics of the comparison of engines and trainer before the update; empty if there was none."""
    updates: int = 0
    """Number of updates that were applied."""
    rejected: Mapping[str, int] = field(default_factory=dict)
    """Number of updates that the trainer's guard rejected, by metric; without those that are 0."""
    guard: Mapping[str, Any] = field(default_factory=dict)
    """Limits of the guard, if it has rejected an update."""

    def trained(self, stats: TrainStats, guard: UpdateGuardSpec) -> StepUpdate:
        """Return the record of the step after its training."""
        rejected = {name: int(stats.metrics[name]) for name in SKIPPED_METRICS if stats.metrics.get(name)}
        limits: dict[str, Any] = {"not_finite": guard.not_finite}
        limits["grad_norm"] = None if guard.grad_norm is None else guard.grad_norm.model_dump()
        limits["mismatch"] = {key: limit.model_dump() for key, limit in guard.mismatch.items()}
        updates = int(stats.metrics.get("updates", 0))
        return replace(self, updates=updates, rejected=rejected, guard=limits if rejected else {})

    def apply_guard(self, guard: UpdateGuardSpec) -> UpdateGuardSpec:
        """Return a guard that rejects the updates that were rejected before, and no others."""
        if not self.guard:
            return replace(guard, grad_norm=None, mismatch={})
        grad_norm = self.guard["grad_norm"]
        return replace(
            guard,
            not_finite=self.guard["not_finite"],
            grad_norm=None if grad_norm is None else LimitConfig.model_validate(grad_norm),
            mismatch={key: LimitConfig.model_validate(limit) for key, limit in self.guard["mismatch"].items()},
        )

    @property
    def outcome(self) -> str:
        """What the step did, for messages."""
        rejected = ", ".join(f"{name} {num}" for name, num in self.rejected.items())
        return f"{self.updates} updates were applied, {rejected or 'none skipped'}"


class UpdateLog:
    """The records of a run's steps."""

    def __init__(self, run_dir: str | Path, *, after: int, writes: bool = True) -> None:
        """Read the records of an earlier process of the run.

        Args:
            after: step that the run resumes from; earlier ones are not needed.
            writes: record further steps; False: the journal is another run's.

        Raises:
            DataError: a line is not a record.
        """
        self._run_dir, self._folder, self._writes = run_dir, update_folder(journal_folder(run_dir)), writes
        self._path: Path | None = None
        self._records: dict[int, list[StepUpdate]] = {}
        for path in list_files(self._folder, after):
            for entry in read_lines(path)[0]:
                record = _decode(path, entry)
                if record.step > after:
                    self._records.setdefault(record.step, []).append(record)

    def find(self, step: int, batch: str) -> StepUpdate | None:
        """Return what the step did last with the batch; None if it has not been trained on it."""
        records = self._records.get(step, [])
        return next((record for record in reversed(records) if record.batch == batch), None)

    def write(self, record: StepUpdate) -> None:
        """Append the record of a finished update, unless the log has it; it is on disk when this returns."""
        if not self._writes or self.find(record.step, record.batch) == record:
            return
        require_lock(self._run_dir)
        if self._path is None:
            self._path = self._folder / f"{record.step:012d}{SUFFIX}"
        content = {name: value for name, value in asdict(record).items() if value or name in ("step", "batch")}
        append_line(self._path, content)

    def begin_file(self) -> None:
        """Write the next records to a new file."""
        self._path = None


def update_folder(journal: Path) -> Path:
    """Return the folder of the log in a run's journal folder."""
    return journal / "updates"


def batch_hash(groups: Sequence[FinishedGroup]) -> str:
    """Return a hash that tells the groups of a step from others, also from other samples of the same prompts."""
    found = [(group.summary.prompt_id, group.summary.generation_seconds) for group in groups]
    return hashlib.sha256(repr(found).encode()).hexdigest()[:16]


def _decode(path: Path, entry: Mapping[str, Any]) -> StepUpdate:
    known = {each.name for each in fields(StepUpdate)}
    if not {"step", "batch"} <= entry.keys() <= known:
        raise DataError(f"{path}: a record of an update needs step and batch, and has no other fields than {known}")
    return StepUpdate(**entry)
