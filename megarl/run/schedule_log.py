"""The log of a schedule's events on disk, which a killed run resumes from.

    <run_dir>/journal/schedule/000000000001.jsonl     one event per line; a file for each checkpoint's events

A file is named by the number of its first event. Events before the oldest checkpoint to resume from are removed.

What other files refer to survives a power failure: an event after which groups are sampled, a batch is trained or
weights are pushed is on disk before its effect, and with it all events before it. The end of the log may be lost, with
groups that have finished since, whose trajectories are in the rollout journal.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path

from megarl.errors import DataError
from megarl.process.atomic_files import make_durable_folder, sync_path
from megarl.schedule.events import Finished, Removed, Resumed, ScheduleEvent, decode_event, encode_event

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
        """Close the file."""
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
