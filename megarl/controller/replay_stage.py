"""Chooses where the replay of a run begins, runs it, and compares its checkpoints with those of the run."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from megarl.checkpoint.store import CheckpointEntry, CheckpointStore
from megarl.config import RunConfig, load_resolved
from megarl.controller.actor import Controller
from megarl.controller.run_stage import rotate, run_stage
from megarl.errors import ConfigError, DataError
from megarl.process.line_file import read_lines
from megarl.rollout.journal.journal_folder import journal_folder, list_steps
from megarl.run.replay_run import last_logged_step, logged_batches
from megarl.run.run_state import RunState
from megarl.run.step_limits import SKIPPED_METRICS
from megarl.schedule.events import ScheduleState
from megarl.schedule.recovery import LogMismatchError
from megarl.schedule.schedule import place
from megarl.tracking.tracker import METRICS_FILE


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayReport:
    """Result of a replay."""

    begun_at: int
    """Step of the checkpoint from which it began; 0: the beginning of the run."""
    last_step: int
    checkpoints: Mapping[int, list[str]]
    """By step of each checkpoint that both have, the names of the values that differ in any bit."""
    seconds: Mapping[str, float]
    """`total`, without the start of the processes, and by phase."""
    first_difference: int | None = None
    """First step whose loss, gradient norm or number of updates differs; None: none, or `tracking.jsonl` is off."""

    @property
    def training_share(self) -> float:
        """Share of `seconds["total"]` in which models compute or are moved."""
        return sum(self.seconds.get(name, 0.0) for name in TRAINING_PHASES) / self.seconds["total"]

    @property
    def line(self) -> str:
        """One line about what was replayed."""
        return (
            f"replayed steps {self.begun_at + 1} to {self.last_step} in {self.seconds['total']:.1f} s, "
            f"{self.training_share:.1%} of it training"
        )


COMPARED_METRICS = ("loss", "grad_norm", "updates", *SKIPPED_METRICS)
"""Metrics that tell whether a step was trained alike."""

TRAINING_PHASES = ("train", "train_critic", "logprobs", "reference", "values", "score", "onload", "offload")
"""Phases in which models compute or are moved."""


def replay_run(run_dir: Path, out: Path) -> ReplayReport:
    """Train the run in `run_dir` again on its journal, from its oldest checkpoint whose journal is whole.

    Args:
        out: folder of the replay; one that exists is renamed.

    Raises:
        ConfigError: there is no run in the folder.
        DataError: no checkpoint has a journal that is whole.
    """
    file = run_dir / "train.yaml"
    if not file.is_file():
        raise ConfigError(f"{run_dir} is not the folder of a run of megarl train: {file.name} is missing")
    config = load_resolved(file)
    assert isinstance(config, RunConfig)
    begin, last_step = _find_range(config, run_dir)
    if out.exists():
        rotate(out)
    out.mkdir(parents=True)
    (out / "journal").symlink_to(os.path.relpath(journal_folder(run_dir), out))
    keep = config.checkpoint.model_copy(update={"keep_journal": "all", "keep_last": last_step or 1})
    config = config.model_copy(
        update={
            "run_dir": str(out),
            "export_dir": None,
            "checkpoint": keep,
            "tracking": config.tracking.model_copy(update={"rollouts": False}),
        }
    )
    resume = None if begin is None else begin.folder
    seconds = run_stage(config, Controller.replay, begins_run=False, extra_arguments=(resume, last_step))
    return ReplayReport(
        begun_at=0 if begin is None else begin.step,
        last_step=last_step,
        checkpoints=_compare(run_dir, out),
        first_difference=first_difference(run_dir / METRICS_FILE, out / METRICS_FILE),
        seconds=seconds,
    )


def _find_range(config: RunConfig, run_dir: Path) -> tuple[CheckpointEntry | None, int]:
    """Return the checkpoint to begin from, None for step 0, and the last step in the journal."""
    entries, is_sync = CheckpointStore(run_dir).entries(), config.schedule.type == "sync"
    steps = set(list_steps(run_dir))
    newest = max((entry.step for entry in entries), default=0)
    last_step = min(max(steps, default=0), newest) if is_sync else last_logged_step(run_dir)
    for entry in (None, *entries):
        begin = 0 if entry is None else entry.step
        if is_sync:
            needed = set(range(begin + 1, last_step + 1))
        else:
            needed = _needed_steps(config, ScheduleState() if entry is None else _schedule(entry), last_step)
        if begin < last_step and needed and needed <= steps:
            return entry, last_step
    raise DataError(
        f"the journal of {run_dir} does not reach from a checkpoint to a later step; with checkpoint.keep_journal: all "
        "it has every step"
    )


def _needed_steps(config: RunConfig, state: ScheduleState, last_step: int) -> set[int]:
    """Return the steps of the journal that the batches after `state` need; none if the log does not continue it."""
    try:
        logged = logged_batches(Path(config.run_dir), state)
    except LogMismatchError:
        return set()
    batches = [lease for lease in logged.leases if lease.step <= last_step]
    return {place(ordinal, config.algorithm.prompts_per_step)[0] for lease in batches for ordinal in lease.ordinals}


def _schedule(entry: CheckpointEntry) -> ScheduleState:
    return RunState.read(entry.folder).schedule or ScheduleState()


def first_difference(file: Path, other: Path) -> int | None:
    """Return the first step that two files of metrics both have, and whose training differs; None: there is none."""
    rows, others = _training_rows(file), _training_rows(other)
    return next((step for step in sorted(rows.keys() & others.keys()) if rows[step] != others[step]), None)


def _training_rows(file: Path) -> dict[int, dict[str, object]]:
    """Return by step what its training has logged, apart from times."""
    if not file.is_file():
        return {}
    rows = [row for row in read_lines(file)[0] if "tokens_per_second" in row]
    return {row["step"]: {name: row[name] for name in row if name in COMPARED_METRICS} for row in rows}


def _compare(run_dir: Path, out: Path) -> dict[int, list[str]]:
    from megarl.checkpoint.compare import differing_values  # imports torch

    replayed = {entry.step: entry.folder for entry in CheckpointStore(out).entries()}
    return {
        entry.step: differing_values(entry.folder, replayed[entry.step])
        for entry in CheckpointStore(run_dir).entries()
        if entry.step in replayed
    }
