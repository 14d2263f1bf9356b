"""Asynchronous checkpoints: models and run state are saved while the run continues.

begin(step)      the ranks of each model stage their state and write it in the background
add_state(...)   adds the run state, once the step is finished
poll()           between two steps: if everything is written, hash, commit and rename the folder
finish()         the same, but waits until everything is written

In SPMD stages every rank runs this code and makes every call. Only the first rank creates the folder, commits and
prunes; the others receive the result.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol, TypeVar

from megarl.checkpoint.manifest import CheckpointMetadata, FileRecord, hash_files
from megarl.checkpoint.run_lock import require_lock
from megarl.checkpoint.store import CheckpointStore, PendingCheckpoint
from megarl.config import RunConfig, StageConfig, dump_config
from megarl.data.data_files import find_data_files
from megarl.errors import DataError
from megarl.megatron.requests import SavedShard, SaveRequest
from megarl.rollout.journal import journal_folder, remove_steps
from megarl.run.remote.trainer_group import TrainerGroup
from megarl.run.run_logs import first_needed_step, log_folder, remove_events, update_folder
from megarl.run.run_state import RunState

T = TypeVar("T")

POLICY = "policy"
"""Folder of the trained main model in a checkpoint; auxiliary models have folders named after their roles."""


class RunOnRank0(Protocol):
    """Runs a function on the first process only and returns its result on all of them."""

    def __call__(self, function: Callable[[], T], /) -> T:
        """Run `function` on the first process; return its result, or raise its error, on every process."""
        ...


def _run_locally[T](function: Callable[[], T], /) -> T:
    return function()


@dataclass(slots=True, kw_only=True)
class _OpenCheckpoint:
    """A checkpoint that is still being written."""

    step: int
    draft: PendingCheckpoint
    started_at: float
    state: RunState | None = None


class Checkpointer:
    """Creates, completes and prunes the checkpoints of a run; at most one is in progress."""

    def __init__(
        self,
        config: StageConfig,
        models: Mapping[str, TrainerGroup],
        notify: Callable[[str], None],
        *,
        on_saved: Callable[[int], None] = lambda step: None,
        run_on_rank0: RunOnRank0 = _run_locally,
    ) -> None:
        """Args:
        models: all trained models, by the name of their folder in a checkpoint.
        notify: shows a line to the user.
        on_saved: called with the step of each committed checkpoint.
        run_on_rank0: `Processes.run_on_rank0` of the processes that run this code.
        """
        self._config, self._models, self._notify = config, models, notify
        self._on_saved, self._run_on_rank0 = on_saved, run_on_rank0
        self._store = CheckpointStore(config.run_dir)
        self._contents = CheckpointMetadata.from_config(config)  # read now: the model folder may be deleted later
        self._open: _OpenCheckpoint | None = None
        self._committing: _OpenCheckpoint | None = None
        self._commit_result: Future[None] | None = None
        """Result of the commit in progress; only on the first process."""
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._data_hashes: Future[dict[str, FileRecord]] | None = None
        """Hashes of the files of training rows by YAML key; only on the first process."""
        self._run_on_rank0(self._start_data_hashes)
        self._last_num_bytes = 0
        """Size of the last checkpoint, which estimates the size of the next one."""
        self.last_step = 0
        """Step of the last checkpoint that was started; 0: none, or it failed."""

    def _start_data_hashes(self) -> None:
        self._data_hashes = self._thread.submit(_hash_files, self._config.data.training_files)

    def is_due(self, step: int) -> bool:
        """Whether `checkpoint.every` requires a checkpoint after this step; the last step is always saved as well."""
        return step % self._config.checkpoint.every == 0

    def begin(self, step: int) -> dict[str, float]:
        """Start a checkpoint of `step`: all models stage their state. On failure, report it and discard the checkpoint.

        Returns:
            Checkpoint metrics of the step.
        """
        self.finish()
        start, options = time.perf_counter(), self._config.checkpoint
        self.last_step = step
        staged = 0
        draft: PendingCheckpoint | None = None
        saving: dict[str, TrainerGroup] = {}
        try:
            draft = self._run_on_rank0(lambda: self._create_draft(step))
            self._last_num_bytes = 0
            for name, model in self._models.items():
                request = SaveRequest(
                    folder=str(draft.folder / name),
                    asynchronous=options.asynchronous,
                    max_staging_bytes=options.max_staging_bytes,
                )
                stats = model.begin_save(request)
                saving[name] = model
                staged, self._last_num_bytes = staged + stats.staging_bytes, self._last_num_bytes + stats.bytes
            if options.hf:
                self._models[POLICY].save_hf(str(draft.folder / "hf"))
        except DataError as error:
            _finish_all(saving)
            self._abort(step, draft, error)
            return {"checkpoint/failed": 1.0}
        self._open = _OpenCheckpoint(step=step, draft=draft, started_at=start)
        hold = time.perf_counter() - start
        return {
            "checkpoint/hold_seconds": hold,
            "checkpoint/staging_bytes": staged,
            "checkpoint/bytes": self._last_num_bytes,
        }

    def _create_draft(self, step: int) -> PendingCheckpoint:
        self._store.require_disk_space(self._last_num_bytes or self._expected_bytes(), step=step)
        return self._store.begin(step)

    def add_state(self, state: Callable[[], RunState]) -> None:
        """Add run state to the checkpoint started in this step, if any; without `asynchronous`, complete it as well."""
        if self._open is not None and self._open.state is None:
            self._open.state = state()
            if not self._config.checkpoint.asynchronous:
                self.finish()

    def poll(self) -> None:
        """Complete the checkpoint in progress in the background, if all models are written."""
        if self._open is not None and self._is_written():
            self._start_commit(self._open)
        if self._committing is not None and self._run_on_rank0(self._is_committed):
            self._wait_for_commit()

    def finish(self) -> None:
        """Wait for and complete the checkpoint in progress; report and discard it if it could not be written."""
        if self._open is not None:
            # before the collective that agrees on the result, which can time out where ranks wait for the slowest
            for model in self._models.values():
                model.wait_save_written()
            self._start_commit(self._open)
        self._wait_for_commit()

    def _is_written(self) -> bool:
        return all(model.is_save_written() for model in self._models.values())

    def _start_commit(self, checkpoint: _OpenCheckpoint) -> None:
        """Start the part that needs no ranks, in a thread: write the run state, hash the other files, fsync, rename."""
        assert checkpoint.state is not None, f"the checkpoint of step {checkpoint.step} has no state"
        self._wait_for_commit()
        self._open = None
        shards, failure = _finish_all(self._models)
        if failure is not None:
            self._abort(checkpoint.step, checkpoint.draft, failure)
            return
        files = {
            f"{name}/{file.name}": FileRecord(bytes=file.bytes, sha256=file.sha256)
            for name, shard in shards.items()
            for file in shard.files
        }
        self._committing, state = checkpoint, checkpoint.state

        def begin_commit() -> None:
            self._commit_result = self._thread.submit(self._commit, checkpoint, state, files)

        self._run_on_rank0(begin_commit)

    def _is_committed(self) -> bool:
        assert self._commit_result is not None
        return self._commit_result.done()

    def _require_committed(self) -> None:
        assert self._commit_result is not None
        self._commit_result.result()

    def _wait_for_commit(self) -> None:
        if self._committing is None:
            return
        checkpoint, self._committing = self._committing, None
        try:
            self._run_on_rank0(self._require_committed)
        except DataError as error:
            self._abort(checkpoint.step, checkpoint.draft, error)

    def discard(self) -> None:
        """Discard the checkpoint in progress, whose models are lost; a commit in progress is completed."""
        if self._open is not None:
            self._run_on_rank0(self._open.draft.discard)
            self._open = None
        self._wait_for_commit()

    def _commit(self, checkpoint: _OpenCheckpoint, state: RunState, files: Mapping[str, FileRecord]) -> None:
        try:
            state.write(checkpoint.draft.folder)
            (checkpoint.draft.folder / "config.yaml").write_text(dump_config(self._config))
        except OSError as error:
            raise DataError(f"{checkpoint.draft.folder} cannot be written: {error.strerror}") from error
        assert self._data_hashes is not None
        contents = replace(self._contents, data=self._data_hashes.result())
        folder = checkpoint.draft.commit(contents, files)
        self._on_saved(checkpoint.step)
        seconds = time.perf_counter() - checkpoint.started_at
        self._notify(
            f"step {checkpoint.step}: checkpoint {folder.name}, {self._last_num_bytes / 1e6:.2f} MB in {seconds:.1f} s"
        )
        try:
            self._remove_old(checkpoint.step)
        except (DataError, OSError) as error:  # the new checkpoint is valid nevertheless
            self._notify(f"step {checkpoint.step}: cannot remove old checkpoints or their journal: {error}")

    def _remove_old(self, newest: int) -> None:
        options = self._config.checkpoint
        self._store.prune(keep_last=options.keep_last, keep_every=options.keep_every, newest=newest)
        if options.keep_journal == "needed":
            # checkpoints that only keep_every retains are not resumed from automatically: they need no journal
            oldest = self._store.entries()[-options.keep_last :][0]
            remove_journal(self._config, RunState.read(oldest.folder))

    def _abort(self, step: int, draft: PendingCheckpoint | None, error: DataError) -> None:
        """Discard and report the failed checkpoint. If the run has lost its folder, the run ends: LostLockError."""
        if draft is not None:
            self._run_on_rank0(draft.discard)
        self.last_step = 0
        self._notify(f"step {step}: checkpoint failed: {error}")
        # the failure may be that the new owner of the folder has removed the unfinished checkpoint
        self._run_on_rank0(lambda: require_lock(self._config.run_dir))

    def _expected_bytes(self) -> int:
        """Estimate the size of the first checkpoint: weights, float32 master weights and both Adam moments."""
        weights = sum(file.stat().st_size for file in Path(self._config.model.path).glob("*.safetensors"))
        return weights * (3 if self._config.model.dtype == "float32" else 7)


def remove_journal(config: StageConfig, state: RunState) -> None:
    """Remove what a run does not read that continues from `state`, or from that of a later step."""
    run_dir, journal, schedule = config.run_dir, journal_folder(config.run_dir), state.schedule
    remove_events(update_folder(journal), up_to=state.step)
    if schedule is None or not isinstance(config, RunConfig):
        remove_steps(run_dir, up_to=state.step)
        return
    remove_steps(run_dir, up_to=first_needed_step(schedule, config.algorithm.prompts_per_step) - 1)
    remove_events(log_folder(journal), up_to=schedule.num_events)


def _finish_all(models: Mapping[str, TrainerGroup]) -> tuple[dict[str, SavedShard], DataError | None]:
    """Wait until no model is writing; return what each one saved, and the first error."""
    shards, failure = {}, None
    for name, model in models.items():
        try:
            shards[name] = model.finish_save()
        except DataError as error:
            failure = failure or error
    return shards, failure


def _hash_files(files: Mapping[str, str]) -> dict[str, FileRecord]:
    """Return YAML key -> size and checksum of each file, given by key and path."""
    records: dict[str, FileRecord] = {}
    for key, path in files.items():
        try:
            records[key] = hash_files(find_data_files(path))
        except OSError as error:
            raise DataError(f"{key} {path} cannot be read: {error.strerror}") from error
    return records


def load_models(folder: Path, models: Mapping[str, TrainerGroup], notify: Callable[[str], None]) -> None:
    """Load the training state of `models` from the checkpoint in `folder`.

    Args:
        models: by folder name, as for `Checkpointer`.
        notify: shows a line to the user.

    Raises:
        DataError: the checkpoint is of other models, or a file is damaged.
    """
    for name, model in models.items():
        report = model.load_training(str(folder / name))
        if not report.same_layout:
            notify(f"{name}: saved with another parallel layout; RNG states are reinitialized")
