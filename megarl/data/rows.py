"""Rows of data files, with their line numbers for error messages."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from megarl.data.data_files import find_data_files, read_file
from megarl.errors import DataError
from megarl.model_files.json_object import refuse_lfs_pointer
from megarl.text import replace_surrogates

QUIET_SECONDS = 3.0
"""Work that ends within this time shows no progress bar."""


def track[T](batches: Iterable[list[T]], what: str, *, quiet_seconds: float = QUIET_SECONDS) -> Iterator[list[T]]:
    """Yield `batches` unchanged; after `quiet_seconds`, show the number of rows on stderr if it is a terminal."""
    console = Console(stderr=True)
    progress = Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed} rows"),
        TimeElapsedColumn(),
        console=console,
        transient=True,
    )
    task = progress.add_task(what, total=None)
    begun, shown = time.monotonic(), False
    try:
        for batch in batches:
            yield batch
            progress.advance(task, len(batch))
            if not shown and console.is_terminal and time.monotonic() - begun > quiet_seconds:
                progress.start()
                shown = True
    finally:
        if shown:
            progress.stop()


class Row(NamedTuple):
    """A row and its position in a data file."""

    path: Path
    line: int
    """Line of a JSONL or CSV file (blank lines count), number of the row in another file; from 1."""
    fields: Mapping[str, Any]
    name: str = ""
    """Name of the file among those of a pattern, if it is not the last part of its path."""

    @property
    def where(self) -> str:
        """`<path>:<line>`, to start an error message with."""
        return f"{self.path}:{self.line}"

    @property
    def has_filled_objects(self) -> bool:
        """Whether objects have the keys of all rows, with null for those that they lack, as in columns of a table."""
        return self.path.suffix.lower() in (".parquet", ".arrow")

    @property
    def prompt_id(self) -> str:
        """Identifier of the row, `<file name>:<line>`; bytes of the name that are not UTF-8 are U+FFFD."""
        return f"{replace_surrogates(self.name or self.path.name)}:{self.line}"

    def text(self, field: str, key: str) -> str:
        """Return the string in `field`; `key` is the YAML key that names the field.

        Raises:
            DataError: the field is missing or not a string.
        """
        value = self.value(field, key)
        if not isinstance(value, str):
            raise DataError(f"{self.where}: field {field!r} ({key}) needs a string, got {type(value).__name__}")
        return value

    def response(self, field: str, key: str) -> str:
        """Return the text in `field` that a model is trained on; `key` is the YAML key that names the field.

        Raises:
            DataError: the field is missing, not a string, or blank.
        """
        text = self.text(field, key)
        if not text.strip():
            raise DataError(f"{self.where}: field {field!r} ({key}) is {'blank' if text else 'empty'}")
        return text

    def value(self, field: str, key: str) -> Any:
        """Return the value of `field`; `key` is the YAML key that names the field.

        Raises:
            DataError: the field is missing.
        """
        found = self._look_up(field)
        if found is None:
            has = ", ".join(repr(name) for name in self.fields) or "no fields"
            raise DataError(f"{self.where}: field {field!r} ({key}) is missing; the row has {has}")
        return found[0]

    def find(self, field: str) -> Any:
        """Return the value of `field`; None if it is null or missing."""
        found = self._look_up(field)
        return None if found is None else found[0]

    def has(self, field: str) -> bool:
        """Whether the row has `field`, which may be null."""
        return self._look_up(field) is not None

    def _look_up(self, field: str) -> tuple[Any] | None:
        """Return the value of `field` in a tuple; None if it is missing.

        A name with dots that is no column is a path into objects and lists, which may be the text of JSON:
        `reward_model.ground_truth`, `answers.0`.
        """
        if field in self.fields:
            return (self.fields[field],)
        name, *path = field.split(".")
        if not path or name not in self.fields:
            return None
        value = self.fields[name]
        for part in path:
            if isinstance(value, str):
                value = _parse(value)
            if isinstance(value, Mapping) and part in value:
                value = value[part]
            elif isinstance(value, list) and part.isdecimal() and int(part) < len(value):
                value = value[int(part)]
            else:
                return None
        return (value,)


def _parse(text: str) -> Any:
    """Return the content of a text of JSON; None if it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


MEDIA = ("images", "image", "videos", "video", "audios", "audio")
"""Columns of what no model takes."""


def refuse_media(row: Row) -> None:
    """Raise a `DataError` if a row has images, videos or audio; empty lists are none.

    A text in a column such as `image` is none either: rows for agents name the image of a container there.
    """
    for name in MEDIA:
        value = row.fields.get(name)
        if isinstance(value, dict | list | bytes) and value:
            raise DataError(f"{row.where}: field {name!r} is not empty, and models take no images, videos or audio")


def read_rows(path: str | Path) -> Iterator[Row]:
    """Yield the rows of `path` in order, read lazily: a file, or the files in a folder or of a pattern.

    Raises:
        DataError: as `find_data_files`; there are no rows, or a row cannot be read (the message names file:line).
    """
    files = find_data_files(path)
    for file in files:
        refuse_lfs_pointer(file)
    names = _name_files(files)
    rows = (
        Row(file, line, fields, name)
        for file, name in zip(files, names, strict=True)
        for line, fields in read_file(file)
    )
    return _require_rows(Path(path), rows)


def _name_files(files: list[Path]) -> list[str]:
    """Return a name for each file; empty where the last part of its path is one."""
    if len({file.name for file in files}) == len(files):
        return [""] * len(files)
    parents = [len(file.parts) - 1 for file in files]
    shared = 0
    while shared < min(parents) and len({file.parts[shared] for file in files}) == 1:
        shared += 1
    return ["/".join(file.parts[shared:]) for file in files]


def _require_rows(path: Path, rows: Iterator[Row]) -> Iterator[Row]:
    empty = True
    for row in rows:
        empty = False
        yield row
    if empty:
        raise DataError(f"{path}: the data file has no rows")
