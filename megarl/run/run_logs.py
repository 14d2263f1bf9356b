"""The logs of a run on disk, which a killed run resumes from: events of its schedule, and what each step updated.

    <run_dir>/journal/schedule/000000000001.jsonl     one event per line; a file for each checkpoint's events

A file is named by the number of its first event. Events before the oldest checkpoint to resume from are removed.

What other files refer to survives a power failure: an event after which groups are sampled, a batch is trained or
weights are pushed is on disk before its effect, and with it all events before it. The end of the log may be lost, with
groups that have finished since, whose trajectories are in the rollout journal.

    <run_dir>/journal/updates/000000000007.jsonl    {"step": 7, "batch": "9d1c...", "updates": 1}
                                                    {"step": 8, "batch": "04fe...", "skipped": "step 8: ..."}

A step that is trained again on the same groups, after a kill or by `megarl replay`, does the same: the weights that
later groups were sampled with depend on it, but limits may have been changed, and engines compared with the trainer
again may differ by other amounts. A file is named by its first step; those before the oldest checkpoint are removed.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megarl.checkpoint.run_lock import require_lock
from megarl.cluster.process.atomic_files import append_line, make_durable_folder, read_lines, sync_path
from megarl.config import RunConfig
from megarl.config.limits import LimitConfig
from megarl.errors import DataError
from megarl.megatron.requests import TrainStats, UpdateGuardSpec
from megarl.rollout.journal import Journal, journal_folder, list_steps, open_journal, parse_step
from megarl.rollout.rollout_worker import GroupJob
from megarl.run.schedule.events import (
    Finished,
    LogMismatchError,
    OpenGroup,
    Pushed,
    Removed,
    Resumed,
    ScheduleEvent,
    ScheduleState,
    TokenVersions,
    decode_event,
    encode_event,
    recover,
)
from megarl.run.schedule.schedule import Schedule, place
from megarl.run.schedule.settings import SchedulePolicy
from megarl.run.step_limits import SKIPPED_METRICS

if TYPE_CHECKING:
    from megarl.run.remote.rollout_group import FinishedGroup

SUFFIX = ".jsonl"


def log_folder(journal: Path) -> Path:
    """Return the folder of the log in a run's journal folder."""
    return journal / "schedule"


class ScheduleLog:
    """Appends events; each survives a crash of the process once `write` has returned."""

    def __init__(self, folder: Path | None) -> None:
        """`folder`: None: write nothing, because the events are those of another run's log."""
        self._folder = folder
        self._descriptor: int | None = None

    def write(self, event: ScheduleEvent) -> None:
        """Append the event; fsync the file unless a run that resumes finds the event in the rollout journal."""
        if self._folder is None:
            return
        is_new = self._descriptor is None
        if self._descriptor is None:
            make_durable_folder(self._folder)
            path = self._folder / f"{event.number:012d}{SUFFIX}"
            # a file of this name was begun by a killed run, which wrote no complete event to it
            self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o644)
        line = memoryview(json.dumps(encode_event(event), separators=(",", ":")).encode() + b"\n")
        while line:
            line = line[os.write(self._descriptor, line) :]
        if not isinstance(event, Finished | Removed):
            os.fsync(self._descriptor)
            if is_new:
                sync_path(self._folder)

    def begin_file(self) -> None:
        """Write the next events to a new file; those before are on disk."""
        if self._descriptor is not None:
            os.fsync(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = None

    def close(self) -> None:
        """Close the file, once it is on disk."""
        self.begin_file()


def read_log(folder: Path, after: int = 0) -> Iterator[ScheduleEvent]:
    """Yield the events in the order of their numbers; an incomplete line at the end of a file is left out.

    Events may be missing before a `Resumed` event: a power failure has cut the log of a run, which then resumed from a
    checkpoint after the cut.

    Args:
        after: files that have no event after this number are not read.

    Raises:
        DataError: another line is no event, or another event is missing.
    """
    expected = None
    for path in list_files(folder, after):
        *lines, _ = path.read_bytes().split(b"\n")
        for number, line in enumerate(lines, 1):
            try:
                event = decode_event(json.loads(line))
            except (ValueError, DataError) as error:
                raise DataError(f"{path}: line {number} is not an event of a schedule: {error}") from error
            is_next = expected in (None, event.number)
            if not is_next and not (isinstance(event, Resumed) and event.number > (expected or 0)):
                raise DataError(f"{path}: line {number} is event {event.number}, but {expected} is missing")
            expected = event.number + 1
            yield event


def list_files(folder: Path, after: int = 0) -> list[Path]:
    """Return the files of a log, whose names are the numbers of their first lines, without those up to line `after`."""
    files = sorted(path for path in folder.glob(f"*{SUFFIX}") if path.stem.isdecimal())
    pairs = zip_longest(files, files[1:])
    return [path for path, following in pairs if following is None or int(following.stem) > after + 1]


def remove_events(folder: Path, *, up_to: int) -> None:
    """Remove the files that have no event after number `up_to`."""
    kept = set(list_files(folder, up_to))
    for path in list_files(folder):
        if path not in kept:
            path.unlink(missing_ok=True)


_GROUP = re.compile(r"step-\d+(?:-again(?P<attempt>\d+))?-(?P<index>\d+)")
"""Request ids of groups, as in `GroupJobs`."""


def open_schedule(
    config: RunConfig, state: ScheduleState, make_job: Callable[[OpenGroup], GroupJob]
) -> tuple[Schedule, bool]:
    """Return the schedule that continues `state`, and whether it resumes a run that has sampled groups before.

    Args:
        state: of the checkpoint; that of a new run if there is none.
        make_job: returns the job of an open group, under whose request id the journal has the group if it is finished.

    Raises:
        DataError: the log of the schedule is damaged, or does not continue the state.
        WorkerError: the journal cannot be read.
    """
    folder = log_folder(journal_folder(config.run_dir))
    try:
        logged = recover(state, read_log(folder, state.num_events))
    except LogMismatchError as error:
        raise DataError(f"{folder}: {error}") from error
    journal = open_journal(config)
    logged = _add_unlogged(config, logged, journal)
    has_sampled = bool(logged.num_events or logged.groups)
    if has_sampled:
        logged = recover(logged, (), _find_finished(logged, journal, make_job))
    policy, groups_per_step = SchedulePolicy.of(config.schedule), config.algorithm.prompts_per_step
    schedule = Schedule(policy, groups_per_step, num_steps=config.trainer.steps, state=logged)
    return schedule, has_sampled


def replay_schedule(config: RunConfig, state: ScheduleState, *, last_step: int) -> Schedule:
    """Return the schedule that repeats the logged batches after `state`, up to that of `last_step`; raises as there."""
    policy, groups_per_step = SchedulePolicy.of(config.schedule), config.algorithm.prompts_per_step
    logged = logged_batches(Path(config.run_dir), state)
    return Schedule(policy, groups_per_step, num_steps=last_step, state=logged)


def logged_batches(run_dir: Path, state: ScheduleState) -> ScheduleState:
    """Return the state from which a replay begins: the logged batches after `state`, and no other group.

    Raises:
        LogMismatchError: the log of the schedule does not continue the state.
        DataError: the log is damaged.
    """
    events = read_log(log_folder(journal_folder(run_dir)), state.num_events)
    return replace(recover(state, events), groups=())


def last_logged_step(run_dir: Path) -> int:
    """Return the last step whose batch is in the log of the schedule and was trained; 0: none."""
    folder = log_folder(journal_folder(run_dir))
    for path in reversed(list_files(folder)):  # the last files have it
        versions = [event.version for event in read_log(folder, int(path.stem) - 1) if isinstance(event, Pushed)]
        if versions:
            return max(versions)
    return 0


def _add_unlogged(config: RunConfig, state: ScheduleState, journal: Journal) -> ScheduleState:
    """Return the state with the groups that the journal has and the log has lost, as groups to be sampled again.

    Their request ids are not used for other samples: some may be of weights that the run does not have any more.
    """
    groups_per_step, next_ordinal, num_events = config.algorithm.prompts_per_step, state.next_ordinal, state.num_events
    first_step = first_needed_step(state, groups_per_step)
    for step in [step for step in list_steps(config.run_dir) if step >= first_step]:
        for match in filter(None, map(_GROUP.fullmatch, journal.request_ids(step))):
            next_ordinal = max(next_ordinal, (step - 1) * groups_per_step + int(match["index"]) + 1)
            num_events = max(num_events, int(match["attempt"] or 0))
    version = max((lease.step for lease in state.leases), default=state.version)
    lost = [OpenGroup(ordinal=each, version=version) for each in range(state.next_ordinal, next_ordinal)]
    return replace(state, next_ordinal=next_ordinal, num_events=num_events, groups=(*state.groups, *lost))


def _find_finished(
    state: ScheduleState, journal: Journal, make_job: Callable[[OpenGroup], GroupJob]
) -> dict[int, TokenVersions]:
    """Return the versions of those open or leased groups that the journal has, by ordinal."""
    found = {}
    for group in (*state.groups, *(group for lease in state.leases for group in lease.groups)):
        job = make_job(group)
        step = parse_step(job.request_id)
        assert step is not None, f"{job.request_id} is not in the journal"
        (entry,) = journal.lookup(step, [job])
        if entry is not None:
            versions = [v for trajectory in entry.summary.trajectories for v, _ in trajectory.tokens_by_version]
            found[group.ordinal] = TokenVersions(
                oldest=min(versions, default=group.version), newest=max(versions, default=group.version)
            )
    return found


def first_needed_step(state: ScheduleState, groups_per_step: int) -> int:
    """Return the first step of the journal that has groups which a run resumed from `state` may read."""
    open_groups = (*state.groups, *(group for lease in state.leases for group in lease.groups))
    first = min([state.next_ordinal, *(group.ordinal for group in open_groups)])
    return place(first, groups_per_step)[0]


def continues_log(config: RunConfig, state: ScheduleState) -> bool:
    """Return whether a run can resume from `state` with the log of the run folder, which may lack its last events.

    Raises:
        DataError: the log is damaged.
    """
    try:
        recover(state, read_log(log_folder(journal_folder(config.run_dir)), state.num_events))
    except LogMismatchError:
        return False
    return True


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
