"""The checkpoints of a run: `<run_dir>/checkpoints/step-000020`. A name stands for a checkpoint that was whole.

    .step-000020.4f1c09ab.saving     a draft, being written
    step-000020                      the same, once every file and folder is on the disk: renamed last
    .step-000020.4f1c09ab.replaced   what had the name before, until the rename is on the disk
    .step-000020.4f1c09ab.removed    being deleted, which is not done at once

Who writes holds the run's lock; who only reads does not need it.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from megarl.checkpoint.manifest import (
    MANIFEST,
    Contents,
    FileRecord,
    Manifest,
    NewerFormatError,
    read_manifest,
    step_name,
)
from megarl.checkpoint.retention import kept_steps
from megarl.checkpoint.verify import READERS, Advance, damage, damage_told, files_below, hash_file, problems
from megarl.errors import DataError

FOLDER = "checkpoints"

MARGIN_SHARE = 0.02
MARGIN_BYTES = 64 * 2**20
"""What a save leaves free, at least: a run writes other files too."""

GIB = 2**30

_HIDDEN = re.compile(r"\.(step-\d{6,})\.[0-9a-f]+\.(saving|replaced|removed)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """A folder that has a checkpoint's name."""

    step: int
    folder: Path

    @property
    def name(self) -> str:
        """What people call it."""
        return self.folder.name


class CheckpointStore:
    """Of one run.

    store.require_room(num_bytes, step=20)
    draft = store.begin(20)
    ...  # write below draft.folder
    draft.commit(Contents.of(config), records_of_what_was_written)
    store.prune(keep_last=2, keep_every=0)
    """

    def __init__(self, run_dir: str | Path) -> None:
        """Touches nothing."""
        self.folder = Path(run_dir) / FOLDER

    def require_room(self, num_bytes: int, *, step: int) -> None:
        """Return if the disk has room for a checkpoint of this size, and a margin.

        Raises:
            DataError: it has not.
        """
        needed = num_bytes + max(int(num_bytes * MARGIN_SHARE), MARGIN_BYTES)
        with _writing(self.folder):
            there = next(each for each in (self.folder, *self.folder.absolute().parents) if each.exists())
            free = shutil.disk_usage(there).free
        if free < needed:
            raise DataError(
                f"{self.folder} needs {needed / GIB:.2f} GiB for the checkpoint of step {step}, has {free / GIB:.2f} "
                "GiB free"
            )

    def begin(self, step: int) -> Draft:
        """An empty folder for the checkpoint of `step`; a draft that is not committed yet is given up, see `clean`.

        Raises:
            DataError: the folder cannot be written.
        """
        with _writing(self.folder):
            self.clean()
            if not self.folder.is_dir():
                self.folder.mkdir(parents=True, exist_ok=True)
                _sync(self.folder.parent)
            folder = self._hidden(step_name(step), "saving")
            folder.mkdir()
        return Draft(self, step, folder)

    def clean(self) -> list[str]:
        """Remove what dead saves and interrupted removals have left, and return its names; for the lock's holder only.

        A checkpoint that was to be replaced, and was not, gets its name back.

        Raises:
            DataError: the folder cannot be read or written.
        """
        removed = []
        for path in self._entries():
            match = _HIDDEN.fullmatch(path.name)
            if match is None:
                continue
            name, what = match.groups()
            with _writing(self.folder):
                if what == "replaced" and not (self.folder / name).exists():
                    path.rename(self.folder / name)
                    _sync(self.folder)
                else:
                    self._remove(path, name)
                    removed.append(path.name)
        return removed

    def saved(self) -> list[Saved]:
        """All by step, whole or not: only names are looked at.

        Raises:
            DataError: the folder cannot be read. It is not taken for an empty one: a run would begin anew.
        """
        found = []
        for path in self._entries():
            digits = path.name.removeprefix("step-")
            if digits.isdecimal() and path.name == step_name(int(digits)) and path.is_dir():
                found.append(Saved(step=int(digits), folder=path))
        return sorted(found, key=lambda saved: saved.step)

    def _entries(self) -> list[Path]:
        """What is in the folder, sorted; nothing where there is none."""
        try:
            return sorted(self.folder.iterdir())
        except FileNotFoundError:
            return []
        except OSError as e:
            raise DataError(f"{self.folder} cannot be read: {e.strerror}") from e

    def newest_whole(self, say: Callable[[str], None], *, deep: bool = False) -> Saved | None:
        """The newest checkpoint that can be loaded; None where there is none. Damaged ones are told with `say`.

        Args:
            deep: read every file, and compare its sha256; else only sizes are.

        Raises:
            NewerFormatError: a newer megarl wrote the newest that is not damaged.
        """
        damaged: list[tuple[Saved, list[str]]] = []
        newest = None
        for saved in reversed(self.saved()):
            found = damage_told(saved.folder, say) if deep else damage(saved.folder)
            if not found:
                newest = saved
                break
            damaged.append((saved, found))
        for saved, found in damaged:
            instead = f"{newest.name} is used instead" if newest else "there is none that is whole"
            say(f"checkpoint {saved.name} is damaged: {shortened(found)}; {instead}")
        return newest

    def find(self, which: str, say: Callable[[str], None]) -> Saved:
        """The checkpoint that a user names, which can be loaded as far as sizes tell.

        Args:
            which: `auto`, the newest that is whole; a step; a name, as step-000020; or the folder of one, of any run.
            say: told of damaged ones.

        Raises:
            DataError: there is none of that name, or it is damaged.
        """
        try:
            return self._find(which, say)
        except OSError as e:
            raise DataError(f"checkpoint {which} cannot be read: {e.strerror}") from e

    def _find(self, which: str, say: Callable[[str], None]) -> Saved:
        if which == "auto":
            newest = self.newest_whole(say)
            if newest is None:
                raise DataError(f"{self.folder} has no checkpoint that is whole; {self._what_there_is()}")
            return newest
        folder = self.folder / step_name(int(which)) if which.isdecimal() else Path(which)
        if not folder.exists() and (self.folder / which).is_dir():
            folder = self.folder / which
        if not folder.is_dir() or not which:
            named = f"checkpoint of step {which}" if which.isdecimal() else f"folder {which or repr(which)}"
            raise DataError(f"there is no {named}; {self._what_there_is()}")
        if not (folder / MANIFEST).exists():
            if (folder / FOLDER).is_dir():
                raise DataError(f"{folder} is the folder of a run; {CheckpointStore(folder)._what_there_is()}")
            if not re.fullmatch(r"step-\d{6,}", folder.name):
                raise DataError(f"{folder} is no checkpoint: it has no {MANIFEST}; {self._what_there_is()}")
        if found := damage(folder):
            raise DataError(f"checkpoint {folder} is damaged: {shortened(found)}; {self._what_there_is()}")
        return Saved(step=read_manifest(folder).step, folder=folder)

    def verify(self, folder: Path, *, deep: bool = True, advance: Advance | None = None) -> list[str]:
        """See `megarl.checkpoint.verify.problems`."""
        return problems(folder, deep=deep, advance=advance)

    def retention(self, *, keep_last: int, keep_every: int, newest: int | None = None) -> dict[Saved, str | None]:
        """Every checkpoint by step, with what keeps it; None: it is to go.

        A damaged one takes no whole one's place: it goes when it would if all were whole, as what looks damaged may be
        a disk that does not answer. What a newer megarl wrote stays; where none is whole, all do.

        Args:
            newest: the step of the newest that is known to be whole, where more than sizes is known: later ones count
                as damaged. 0: none is.
        """
        whole, newer, saved = set(), set(), self.saved()
        for each in saved:
            try:
                if not damage(each.folder) and (newest is None or each.step <= newest):
                    whole.add(each.step)
            except NewerFormatError:
                newer.add(each.step)
        steps = {each.step for each in saved}
        reasons = dict.fromkeys(steps, "none is whole") if not whole else {}
        for counted in (steps, whole):
            reasons |= kept_steps(counted, keep_last=keep_last, keep_every=keep_every)
        reasons |= dict.fromkeys(newer, "newer format")
        return {each: reasons.get(each.step) for each in saved}

    def prune(self, *, keep_last: int, keep_every: int, newest: int | None = None) -> list[Saved]:
        """Remove the checkpoints that nothing keeps, and return them. The newest that is whole is always kept.

        Args:
            newest: see `retention`.

        Raises:
            DataError: one cannot be removed.
        """
        plan = self.retention(keep_last=keep_last, keep_every=keep_every, newest=newest)
        gone = [saved for saved, why in plan.items() if not why]
        with _writing(self.folder):
            for saved in gone:
                self._remove(saved.folder, saved.name)
        return gone

    def _remove(self, path: Path, name: str) -> None:
        """In two steps, so that what is only half there has neither a checkpoint's name nor one that gets it back."""
        hidden = self._hidden(name, "removed")
        path.rename(hidden)
        _sync(self.folder)
        _delete(hidden)

    def _publish(self, draft: Draft) -> Path:
        target = self.folder / step_name(draft.step)
        if target.exists():
            target.rename(self._hidden(target.name, "replaced"))
        draft.folder.rename(target)
        draft.is_closed = True
        _sync(self.folder)
        for path in self.folder.glob(f".{target.name}.*.replaced"):
            with suppress(OSError):  # the next save removes it: this one is whole
                self._remove(path, target.name)
        return target

    def _hidden(self, name: str, what: str) -> Path:
        # a name of its own each time: whoever still writes into a draft that was given up does not reach the next one
        return self.folder / f".{name}.{secrets.token_hex(4)}.{what}"

    def _what_there_is(self) -> str:
        steps = ", ".join(str(saved.step) for saved in self.saved())
        return f"{self.folder} has those of steps {steps}" if steps else f"{self.folder} has no checkpoints"


class Draft:
    """A checkpoint that is being written into `folder`."""

    def __init__(self, store: CheckpointStore, step: int, folder: Path) -> None:
        """See `CheckpointStore.begin`."""
        self.step, self.folder = step, folder
        self.is_closed = False
        self._store = store

    def commit(self, contents: Contents, files: Mapping[str, FileRecord]) -> Path:
        """Give the checkpoint its name, once all of it is on the disk; return its folder.

        Args:
            contents: what its manifest says beside its files.
            files: what its writers know of those they wrote, and brought to the disk where they are on another
                machine; by path relative to `folder`. All others are read.

        Raises:
            DataError: a file is not as its writer says, or the disk refuses. The draft is as it was.
        """
        assert not self.is_closed, self.folder
        with _writing(self.folder):
            there = files_below(self.folder)
            if missing := files.keys() - there.keys():
                raise DataError(f"{self.folder} lacks {min(missing)}, which was to be written")
            with ThreadPoolExecutor(READERS) as pool:
                found = pool.map(_on_disk, there.values(), map(files.get, there))
                records = dict(zip(there, found, strict=True))
            manifest = Manifest(
                model=contents.model, layout=contents.layout, data=contents.data, step=self.step, files=records
            )
            _write(self.folder / MANIFEST, manifest.as_json())
            for at, _, _ in os.walk(self.folder, topdown=False):
                _sync(Path(at))
            return self._store._publish(self)

    def discard(self) -> None:
        """Remove what was written. What cannot be removed, the next save removes."""
        if not self.is_closed:
            self.is_closed = True
            with suppress(OSError):
                _delete(self.folder)


def shortened(found: list[str]) -> str:
    """The first of several problems, and how many more there are."""
    return found[0] if len(found) == 1 else f"{found[0]}, and {len(found) - 1} more"


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """What the disk refuses, as a sentence: it may be full."""
    try:
        yield
    except OSError as e:
        raise DataError(f"{folder} cannot be written: {e.strerror or e}") from e


def _on_disk(path: Path, record: FileRecord | None) -> FileRecord:
    """Of a file, once it is on the disk; its size has to be that of `record`, where there is one, else it is read."""
    size = path.stat().st_size
    if record is not None and record.bytes != size:
        raise DataError(f"{path} has {size} bytes, needs {record.bytes}")
    _sync(path)
    return record or hash_file(path)


def _write(path: Path, content: bytes) -> None:
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync(path: Path) -> None:
    """Bring a file, or the names in a folder, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _delete(folder: Path) -> None:
    """All of it; what a writer that is not dead yet adds meanwhile, or keeps open on NFS, is left for the next time."""
    try:
        if folder.is_symlink():  # somebody has moved it to another disk, where it stays
            folder.unlink()
        else:
            shutil.rmtree(folder)
    except OSError as e:
        if e.errno not in (errno.ENOTEMPTY, errno.ENOENT, errno.EBUSY):
            raise
