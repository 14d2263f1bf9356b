"""The log of a schedule's events on disk, which a killed run resumes from.

    <run_dir>/journal/schedule/000000000001.jsonl     one event per line; a file for each checkpoint's events

A file is named by the number of its first event. Events before the oldest checkpoint to resume from are removed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

from megarl.errors import DataError
from megarl.schedule.events import ScheduleEvent, decode_event, encode_event

SUFFIX = ".jsonl"


def log_folder(journal: Path) -> Path:
    """Return the folder of the log in a run's journal folder."""
    return journal / "schedule"


class ScheduleLog:
    """Appends events; each is on disk before `write` returns, which survives a crash of the process."""

    def __init__(self, folder: Path | None) -> None:
        """`folder`: None: write nothing, because the events are those of another run's log."""
        self._folder = folder
        self._descriptor: int | None = None

    def write(self, event: ScheduleEvent) -> None:
        """Append the event."""
        if self._folder is None:
            return
        if self._descriptor is None:
            self._folder.mkdir(parents=True, exist_ok=True)
            path = self._folder / f"{event.number:012d}{SUFFIX}"
            # a file of this name was begun by a killed run, which wrote no complete event to it
            self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o644)
        line = memoryview(json.dumps(encode_event(event), separators=(",", ":")).encode() + b"\n")
        while line:
            line = line[os.write(self._descriptor, line) :]

    def begin_file(self) -> None:
        """Write the next events to a new file."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def close(self) -> None:
        """Close the file."""
        self.begin_file()


def read_log(folder: Path) -> Iterator[ScheduleEvent]:
    """Yield the events in the order of their numbers; an incomplete line at the end of a file is left out.

    Raises:
        DataError: another line is no event.
    """
    expected = None
    for path in _files(folder):
        *lines, _ = path.read_bytes().split(b"\n")
        for number, line in enumerate(lines, 1):
            try:
                event = decode_event(json.loads(line))
            except (ValueError, DataError) as error:
                raise DataError(f"{path}: line {number} is not an event of a schedule: {error}") from error
            if expected is not None and event.number != expected:
                raise DataError(f"{path}: line {number} is event {event.number}, but {expected} is missing")
            expected = event.number + 1
            yield event


def remove_events(folder: Path, *, up_to: int) -> None:
    """Remove the files that have no event after number `up_to`."""
    files = _files(folder)
    for path, following in pairwise(files):
        if int(following.stem) <= up_to + 1:
            path.unlink(missing_ok=True)


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob(f"*{SUFFIX}") if path.stem.isdecimal())
