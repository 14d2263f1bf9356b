"""A run's models and state, saved while the run goes on.

begin(step)      each model's ranks stage what they hold, and write it in the background
add_state(...)   the controller's part, once the step is over
poll()           between two steps: where everything is written, the folder gets its name
finish()         the same, waiting for it

Where the ranks of the models run the controller's code themselves, all of them call all of this, and one of them makes
the folder, commits and prunes: the others learn what has come of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol, TypeVar

from megarl.checkpoint.manifest import Contents, FileRecord
from megarl.checkpoint.store import CheckpointStore, Draft
from megarl.checkpoint.verify import hash_file
from megarl.config import StageConfig, dump_config
from megarl.errors import DataError
from megarl.groups.trainer_group import TrainerGroup
from megarl.megatron.requests import SavedPart, SaveOrder
from megarl.rollout.journal.journal_folder import drop_steps
from megarl.run.run_state import RunState

T = TypeVar("T")

LOOK_SECONDS = 0.02
"""Between two looks at whether a checkpoint is written, where that is waited for."""

POLICY = "policy"
"""The folder of the stage's own model in a checkpoint; other models' are called as their roles are."""


class OnFirst(Protocol):
    """See `Processes.on_first`."""

    def __call__(self, make: Callable[[], T], /) -> T:
        """What `make` returns."""
        ...


def _here(make: Callable[[], T], /) -> T:
    return make()


@dataclass(slots=True, kw_only=True)
class _Open:
    """A checkpoint that is being written."""

    step: int
    draft: Draft
    since: float
    state: RunState | None = None


class Checkpointer:
    """Keeps the checkpoints of a run, one at a time under way."""

    def __init__(
        self,
        config: StageConfig,
        models: Mapping[str, TrainerGroup],
        say: Callable[[str], None],
        *,
        saved: Callable[[int], None] = lambda step: None,
        on_first: OnFirst = _here,
    ) -> None:
        """Args:
        models: all that are trained, by the names of their folders.
        say: shows the user a line.
        saved: is told the step of each checkpoint.
        on_first: of the processes that run this.
        """
        self._config, self._models, self._say = config, models, say
        self._saved, self._on_first = saved, on_first
        self._store = CheckpointStore(config.run_dir)
        self._contents = Contents.of(config)  # now: the model's folder may be gone later
        self._open: _Open | None = None
        self._completing: _Open | None = None
        self._committed: Future[None] | None = None
        """Of the one that is being completed, where that is done."""
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._data: Future[FileRecord] | None = None
        """Where it is done."""
        self._on_first(self._begin_hash)
        self._num_bytes = 0
        """Of the last one: what the next will take."""
        self.last_step = 0
        """The step of the last one that was begun; 0: none."""

    def _begin_hash(self) -> None:
        self._data = self._thread.submit(hash_file, Path(self._config.data.path))

    def is_due(self, step: int) -> bool:
        """Whether one is to be begun after this step, the last step's apart."""
        return step % self._config.checkpoint.every == 0

    def begin(self, step: int) -> dict[str, float]:
        """Have all models stage their state as of the end of `step`, for a checkpoint that is given up where it fails.

        Returns:
            Metrics.
        """
        self.finish()
        start, options = time.perf_counter(), self._config.checkpoint
        self.last_step = step
        staged = 0
        draft: Draft | None = None
        begun: dict[str, TrainerGroup] = {}
        try:
            draft = self._on_first(lambda: self._draft(step))
            self._num_bytes = 0
            for name, model in self._models.items():
                order = SaveOrder(
                    folder=str(draft.folder / name),
                    asynchronous=options.asynchronous,
                    max_staging_bytes=options.max_staging_bytes,
                )
                stats = model.begin_save(order)
                begun[name] = model
                staged, self._num_bytes = staged + stats.staging_bytes, self._num_bytes + stats.bytes
            if options.hf:
                self._models[POLICY].save_hf(str(draft.folder / "hf"))
        except DataError as error:
            _finish_all(begun)
            self._give_up(step, draft, error)
            return {"checkpoint/failed": 1.0}
        self._open = _Open(step=step, draft=draft, since=start)
        hold = time.perf_counter() - start
        return {
            "checkpoint/hold_seconds": hold,
            "checkpoint/staging_bytes": staged,
            "checkpoint/bytes": self._num_bytes,
        }

    def _draft(self, step: int) -> Draft:
        self._store.require_room(self._num_bytes or self._expected_bytes(), step=step)
        return self._store.begin(step)

    def add_state(self, state: Callable[[], RunState]) -> None:
        """The controller's part of the checkpoint that was begun in this step, if one was."""
        if self._open is not None and self._open.state is None:
            self._open.state = state()
            if not self._config.checkpoint.asynchronous:
                self.finish()

    def poll(self) -> None:
        """Complete the checkpoint that is under way in the background, if its models are written."""
        if self._open is not None and self._is_written():
            self._complete(self._open)
        if self._completing is not None and self._on_first(self._is_committed):
            self._wait()

    def finish(self) -> None:
        """Complete the checkpoint that is under way; one that could not be written is told, and given up."""
        if self._open is not None:
            # asked, since ranks that are done would wait for the others in a collective, for no longer than its limit
            while not self._is_written():
                time.sleep(LOOK_SECONDS)
            self._complete(self._open)
        self._wait()

    def _is_written(self) -> bool:
        return all(model.save_is_written() for model in self._models.values())

    def _complete(self, this: _Open) -> None:
        """Begin what the ranks are not needed for: hashing what else there is, and bringing all of it to the disk."""
        assert this.state is not None, f"the checkpoint of step {this.step} has no state"
        self._wait()
        self._open = None
        parts, failure = _finish_all(self._models)
        if failure is not None:
            self._give_up(this.step, this.draft, failure)
            return
        files = {
            f"{name}/{file.name}": FileRecord(bytes=file.bytes, sha256=file.sha256)
            for name, part in parts.items()
            for file in part.files
        }
        self._completing, state = this, this.state

        def begin_commit() -> None:
            self._committed = self._thread.submit(self._commit, this, state, files)

        self._on_first(begin_commit)

    def _is_committed(self) -> bool:
        assert self._committed is not None
        return self._committed.done()

    def _require_committed(self) -> None:
        assert self._committed is not None
        self._committed.result()

    def _wait(self) -> None:
        if self._completing is None:
            return
        this, self._completing = self._completing, None
        try:
            self._on_first(self._require_committed)
        except DataError as error:
            self._give_up(this.step, this.draft, error)

    def discard(self) -> None:
        """Give the one up that is under way: its models are gone."""
        if self._open is not None:
            self._on_first(self._open.draft.discard)
            self._open = None
        self._wait()

    def _commit(self, this: _Open, state: RunState, files: Mapping[str, FileRecord]) -> None:
        try:
            state.write(this.draft.folder)
            (this.draft.folder / "config.yaml").write_text(dump_config(self._config))
        except OSError as error:
            raise DataError(f"{this.draft.folder} cannot be written: {error.strerror}") from error
        assert self._data is not None
        try:
            contents = replace(self._contents, data=self._data.result())
        except OSError as error:
            raise DataError(f"data.path {self._config.data.path} cannot be read: {error.strerror}") from error
        folder = this.draft.commit(contents, files)
        self._saved(this.step)
        seconds = time.perf_counter() - this.since
        self._say(f"step {this.step}: checkpoint {folder.name}, {self._num_bytes / 1e6:.2f} MB in {seconds:.1f} s")
        try:
            self._remove_old(this.step)
        except (DataError, OSError) as error:  # the checkpoint is whole nevertheless
            self._say(f"step {this.step}: what is not needed any more could not be removed: {error}")

    def _remove_old(self, newest: int) -> None:
        options = self._config.checkpoint
        self._store.prune(keep_last=options.keep_last, keep_every=options.keep_every, newest=newest)
        # those that keep_every keeps are for going back, not for going on: they need no journal
        drop_steps(self._config.run_dir, upto=self._store.saved()[-options.keep_last :][0].step)

    def _give_up(self, step: int, draft: Draft | None, error: DataError) -> None:
        if draft is not None:
            self._on_first(draft.discard)
        self.last_step = 0
        self._say(f"step {step}: no checkpoint: {error}")

    def _expected_bytes(self) -> int:
        """Before there was one: weights, and as float32 masters and both moments."""
        weights = sum(file.stat().st_size for file in Path(self._config.model.path).glob("*.safetensors"))
        return weights * (3 if self._config.model.dtype == "float32" else 7)


def _finish_all(models: Mapping[str, TrainerGroup]) -> tuple[dict[str, SavedPart], DataError | None]:
    """What was saved of each, and what went wrong first; afterwards none is still writing."""
    parts, failure = {}, None
    for name, model in models.items():
        try:
            parts[name] = model.finish_save()
        except DataError as error:
            failure = failure or error
    return parts, failure


def load_models(folder: Path, models: Mapping[str, TrainerGroup], say: Callable[[str], None]) -> None:
    """Have `models` go on from the checkpoint in `folder`.

    Args:
        models: as `Checkpointer` has them.
        say: shows the user a line.

    Raises:
        DataError: it is of other models, or a file is damaged.
    """
    for name, model in models.items():
        report = model.load_training(str(folder / name))
        if not report.same_layout:
            say(f"{name}: saved in another layout; the random numbers of its ranks begin anew")
