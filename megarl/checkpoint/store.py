"""Store of a run's checkpoints, `<run_dir>/checkpoints/step-000020`; a folder gets this name only once it is complete.

    .step-000020.4f1c09ab.saving     checkpoint being written
    step-000020                      the same folder, renamed after every file and folder is fsynced
    .step-000020.4f1c09ab.replaced   previous folder of that name, until the rename is fsynced
    .step-000020.4f1c09ab.removed    checkpoint being deleted, which is not atomic

Writers must hold the run lock, which `begin` and `commit` check by `require_lock`; readers need no lock.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from megarl.checkpoint.manifest import (
    MANIFEST,
    READERS,
    CheckpointMetadata,
    FileRecord,
    Manifest,
    ReadCallback,
    UnsupportedFormatError,
    find_damage,
    find_problems,
    hash_file,
    list_files,
    read_manifest,
    step_name,
    verify_and_report,
)
from megarl.checkpoint.run_lock import require_lock
from megarl.cluster.process.atomic_files import sync_path
from megarl.errors import DataError


def select_kept_steps(candidates: Iterable[int], *, keep_last: int, keep_every: int) -> dict[int, str]:
    """Return the steps whose checkpoints are kept, each with the configuration key that keeps it.

    Args:
        candidates: steps to choose from, in any order.
        keep_last: number of latest steps to keep; at least 1.
        keep_every: also keep the multiples of this number of steps; 0: no others.
    """
    assert keep_last >= 1, keep_last
    steps = sorted(candidates)
    last = set(steps[-keep_last:])
    return {
        step: "keep_last" if step in last else "keep_every"
        for step in steps
        if step in last or (keep_every and step % keep_every == 0)
    }


FOLDER = "checkpoints"

MARGIN_SHARE = 0.02
MARGIN_BYTES = 64 * 2**20
"""Minimum disk space that a save leaves free, for the other files of the run: the larger of both margins."""

GIB = 2**30

_HIDDEN = re.compile(r"\.(step-\d{6,})\.[0-9a-f]+\.(saving|replaced|removed)")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointEntry:
    """A folder with the name of a checkpoint; its content may be damaged."""

    step: int
    folder: Path

    @property
    def name(self) -> str:
        """Folder name of the checkpoint, for messages."""
        return self.folder.name


class CheckpointStore:
    """The checkpoints of one run.

    store.require_disk_space(num_bytes, step=20)
    pending = store.begin(20)
    ...  # write files into pending.folder
    pending.commit(CheckpointMetadata.from_config(config), records_of_written_files)
    store.prune(keep_last=2, keep_every=0)
    """

    def __init__(self, run_dir: str | Path) -> None:
        """Set the folder path; the disk is not accessed."""
        self.folder = Path(run_dir) / FOLDER

    def require_disk_space(self, num_bytes: int, *, step: int) -> None:
        """Return if the disk has room for a checkpoint of `num_bytes` plus a margin.

        Raises:
            DataError: the free space is too small.
        """
        needed = num_bytes + max(int(num_bytes * MARGIN_SHARE), MARGIN_BYTES)
        with _reporting_write_errors(self.folder):
            existing = next(each for each in (self.folder, *self.folder.absolute().parents) if each.exists())
            free = shutil.disk_usage(existing).free
        if free < needed:
            raise DataError(
                f"{self.folder} needs {needed / GIB:.2f} GiB for the checkpoint of step {step}, has {free / GIB:.2f} "
                "GiB free"
            )

    def begin(self, step: int) -> PendingCheckpoint:
        """Create an empty folder for the checkpoint of `step`. Removes checkpoints that were begun and never committed.

        Raises:
            DataError: the folder cannot be written.
            LostLockError: this process has lost the run lock; nothing is removed.
        """
        require_lock(self.folder.parent)
        with _reporting_write_errors(self.folder):
            self.remove_partial()
            if not self.folder.is_dir():
                self.folder.mkdir(parents=True, exist_ok=True)
                sync_path(self.folder.parent)
            folder = self._hidden_path(step_name(step), "saving")
            folder.mkdir()
        return PendingCheckpoint(self, step, folder)

    def remove_partial(self) -> list[str]:
        """Remove folders left behind by interrupted saves and removals; return their names. Requires the run lock.

        A checkpoint whose replacement was interrupted gets its name back.

        Raises:
            DataError: the folder cannot be read or written.
        """
        removed = []
        for path in self._paths():
            match = _HIDDEN.fullmatch(path.name)
            if match is None:
                continue
            name, what = match.groups()
            with _reporting_write_errors(self.folder):
                if what == "replaced" and not (self.folder / name).exists():
                    path.rename(self.folder / name)
                    sync_path(self.folder)
                else:
                    self._remove(path, name)
                    removed.append(path.name)
        return removed

    def entries(self) -> list[CheckpointEntry]:
        """Return all checkpoints sorted by step, valid or not: only folder names are checked.

        Raises:
            DataError: the folder cannot be read. Treating it as empty would make a run start from step 0.
        """
        found = []
        for path in self._paths():
            digits = path.name.removeprefix("step-")
            if digits.isdecimal() and path.name == step_name(int(digits)) and path.is_dir():
                found.append(CheckpointEntry(step=int(digits), folder=path))
        return sorted(found, key=lambda entry: entry.step)

    def _paths(self) -> list[Path]:
        """Return the sorted content of the folder; empty if the folder does not exist."""
        try:
            return sorted(self.folder.iterdir())
        except FileNotFoundError:
            return []
        except OSError as e:
            raise DataError(f"{self.folder} cannot be read: {e.strerror}") from e

    def latest_valid(self, notify: Callable[[str], None], *, deep: bool = False) -> CheckpointEntry | None:
        """Return the latest valid checkpoint; None if there is none. Reports damaged later ones to `notify`.

        Args:
            deep: also read every file and compare its SHA-256; else compare sizes only.

        Raises:
            UnsupportedFormatError: the latest checkpoint that is not damaged has a newer or older format.
        """
        damaged: list[tuple[CheckpointEntry, list[str]]] = []
        latest = None
        for entry in reversed(self.entries()):
            found = verify_and_report(entry.folder, notify) if deep else find_damage(entry.folder)
            if not found:
                latest = entry
                break
            damaged.append((entry, found))
        for entry, found in damaged:
            instead = f"{latest.name} is used instead" if latest else "there is no valid one"
            notify(f"checkpoint {entry.name} is damaged: {summarize_problems(found)}; {instead}")
        return latest

    def find(self, which: str, notify: Callable[[str], None]) -> CheckpointEntry:
        """Return the checkpoint that a user names, after checking its file sizes.

        Args:
            which: `auto` (the latest valid one), a step, a name such as step-000020, or a checkpoint folder of any run.
            notify: receives a line of text for each damaged checkpoint that `auto` skips.

        Raises:
            DataError: the checkpoint does not exist, is damaged, or has a format that this version cannot read.
        """
        try:
            return self._find(which, notify)
        except OSError as e:
            raise DataError(f"checkpoint {which} cannot be read: {e.strerror}") from e

    def _find(self, which: str, notify: Callable[[str], None]) -> CheckpointEntry:
        if which == "auto":
            latest = self.latest_valid(notify)
            if latest is None:
                raise DataError(f"{self.folder} has no valid checkpoint; {self._existing_steps()}")
            return latest
        folder = self.folder / step_name(int(which)) if which.isdecimal() else Path(which)
        if not folder.exists() and (self.folder / which).is_dir():
            folder = self.folder / which
        if not folder.is_dir() or not which:
            named = f"checkpoint of step {which}" if which.isdecimal() else f"folder {which or repr(which)}"
            raise DataError(f"there is no {named}; {self._existing_steps()}")
        if not (folder / MANIFEST).exists():
            if (folder / FOLDER).is_dir():
                raise DataError(
                    f"{folder} is a run folder, not a checkpoint; {CheckpointStore(folder)._existing_steps()}"
                )
            if not re.fullmatch(r"step-\d{6,}", folder.name):
                raise DataError(f"{folder} is not a checkpoint: it has no {MANIFEST}; {self._existing_steps()}")
        if found := find_damage(folder):
            raise DataError(f"checkpoint {folder} is damaged: {summarize_problems(found)}; {self._existing_steps()}")
        return CheckpointEntry(step=read_manifest(folder).step, folder=folder)

    def verify(self, folder: Path, *, deep: bool = True, advance: ReadCallback | None = None) -> list[str]:
        """Return one message for each difference between `folder` and its manifest, by the rules of `find_problems`."""
        return find_problems(folder, deep=deep, advance=advance)

    def retention(
        self, *, keep_last: int, keep_every: int, newest: int | None = None
    ) -> dict[CheckpointEntry, str | None]:
        """Return every checkpoint, by step, with the rule that keeps it; None: `prune` removes it.

        A damaged checkpoint never displaces a valid one. It is removed when the rules would remove it if all were
        valid, because what looks like damage may be a disk that does not respond. Checkpoints in a format that this
        version cannot read are kept. If no checkpoint is valid, all are kept.

        Args:
            newest: step of the latest checkpoint that is known to be valid, if more than sizes was checked: later ones
                count as damaged. 0: none is valid.
        """
        valid, unsupported, entries = set(), {}, self.entries()
        for each in entries:
            try:
                if not find_damage(each.folder) and (newest is None or each.step <= newest):
                    valid.add(each.step)
            except UnsupportedFormatError as error:
                unsupported[each.step] = f"{error.age} format"
        steps = {each.step for each in entries}
        reasons = dict.fromkeys(steps, "none is valid") if not valid else {}
        for candidates in (steps, valid):
            reasons |= select_kept_steps(candidates, keep_last=keep_last, keep_every=keep_every)
        reasons |= unsupported
        return {each: reasons.get(each.step) for each in entries}

    def prune(self, *, keep_last: int, keep_every: int, newest: int | None = None) -> list[CheckpointEntry]:
        """Remove the checkpoints that no retention rule keeps; return them. The latest valid one is always kept.

        Args:
            newest: as in `config.checkpoint`.

        Raises:
            DataError: a checkpoint cannot be removed.
        """
        plan = self.retention(keep_last=keep_last, keep_every=keep_every, newest=newest)
        removed = [entry for entry, kept_by in plan.items() if not kept_by]
        with _reporting_write_errors(self.folder):
            for entry in removed:
                self._remove(entry.folder, entry.name)
        return removed

    def _remove(self, path: Path, name: str) -> None:
        """Rename, then delete: a half-deleted folder has neither a checkpoint's name nor a name that is restored."""
        hidden = self._hidden_path(name, "removed")
        path.rename(hidden)
        sync_path(self.folder)
        _delete(hidden)

    def _publish(self, pending: PendingCheckpoint) -> Path:
        target = self.folder / step_name(pending.step)
        if target.exists():
            target.rename(self._hidden_path(target.name, "replaced"))
        pending.folder.rename(target)
        pending.is_closed = True
        sync_path(self.folder)
        for path in self.folder.glob(f".{target.name}.*.replaced"):
            with suppress(OSError):  # the next save removes it; the new checkpoint is valid
                self._remove(path, target.name)
        return target

    def _hidden_path(self, name: str, state: str) -> Path:
        # a unique name each time: a process that still writes into an abandoned folder must not reach the next one
        return self.folder / f".{name}.{secrets.token_hex(4)}.{state}"

    def _existing_steps(self) -> str:
        steps = ", ".join(str(entry.step) for entry in self.entries())
        return f"{self.folder} has checkpoints of steps {steps}" if steps else f"{self.folder} has no checkpoints"


class PendingCheckpoint:
    """A checkpoint that is being written into `folder`, until `commit` or `discard`."""

    def __init__(self, store: CheckpointStore, step: int, folder: Path) -> None:
        """Wrap the empty folder that `CheckpointStore.begin` created."""
        self.step, self.folder = step, folder
        self.is_closed = False
        self._store = store

    def commit(self, metadata: CheckpointMetadata, files: Mapping[str, FileRecord]) -> Path:
        """Fsync all files, write the manifest and rename the folder to its final name; return the final folder.

        Args:
            metadata: manifest entries other than the files.
            files: path relative to `folder` -> size and checksum, for files whose writers computed them. A writer on
                another node has fsynced its files. All other files are read and hashed here.

        Raises:
            DataError: a file is missing, a size differs from `files`, or writing fails. The folder remains uncommitted.
            LostLockError: this process has lost the run lock. The folder remains uncommitted.
        """
        assert not self.is_closed, self.folder
        with _reporting_write_errors(self.folder):
            paths = list_files(self.folder)
            if missing := files.keys() - paths.keys():
                raise DataError(f"{self.folder} lacks {min(missing)}, which its writer reported as written")
            with ThreadPoolExecutor(READERS) as pool:
                found = pool.map(_sync_and_record, paths.values(), map(files.get, paths))
                records = dict(zip(paths, found, strict=True))
            manifest = Manifest(
                model=metadata.model, layout=metadata.layout, data=metadata.data, step=self.step, files=records
            )
            _write(self.folder / MANIFEST, manifest.as_json())
            for at, _, _ in os.walk(self.folder, topdown=False):
                sync_path(Path(at))
            require_lock(self._store.folder.parent)  # last, because hashing and fsync can take minutes
            return self._store._publish(self)

    def discard(self) -> None:
        """Remove the files written so far; the next save removes those that cannot be removed now."""
        if not self.is_closed:
            self.is_closed = True
            with suppress(OSError):
                _delete(self.folder)


def summarize_problems(found: list[str]) -> str:
    """Return the first of `found`, followed by the number of further ones."""
    return found[0] if len(found) == 1 else f"{found[0]}, and {len(found) - 1} more"


@contextmanager
def _reporting_write_errors(folder: Path) -> Iterator[None]:
    """Convert OSError in the block, such as that of a full disk, to DataError."""
    try:
        yield
    except OSError as e:
        raise DataError(f"{folder} cannot be written: {e.strerror or e}") from e


def _sync_and_record(path: Path, record: FileRecord | None) -> FileRecord:
    """Fsync a file and return `record` after comparing its size; without a record, read and hash the file."""
    size = path.stat().st_size
    if record is not None and record.bytes != size:
        raise DataError(f"{path} has {size} bytes, needs {record.bytes}")
    sync_path(path)
    return record or hash_file(path)


def _write(path: Path, content: bytes) -> None:
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _delete(folder: Path) -> None:
    """Delete a folder. Files that a live writer adds meanwhile, or keeps open on NFS, are left for the next attempt."""
    try:
        if folder.is_symlink():  # a user has moved the folder elsewhere: remove only the link
            folder.unlink()
        else:
            shutil.rmtree(folder)
    except OSError as e:
        if e.errno not in (errno.ENOTEMPTY, errno.ENOENT, errno.EBUSY):
            raise
