"""Read rows of JSONL and Parquet files, with their line numbers for error messages."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from megarl.errors import DataError
from megarl.model_files.lfs_pointer import refuse_lfs_pointer
from megarl.text import has_surrogate, replace_surrogates

PARQUET_BATCH_ROWS = 1024


class Row(NamedTuple):
    """A row and its position in a data file."""

    path: Path
    line: int
    """Line of a JSONL file (blank lines count) or row of a Parquet file, from 1."""
    fields: Mapping[str, Any]

    @property
    def where(self) -> str:
        """`<path>:<line>`, to start an error message with."""
        return f"{self.path}:{self.line}"

    @property
    def prompt_id(self) -> str:
        """Identifier of the row, `<file name>:<line>`; bytes of the name that are not UTF-8 are U+FFFD."""
        return f"{replace_surrogates(self.path.name)}:{self.line}"

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
        if field not in self.fields:
            has = ", ".join(repr(name) for name in self.fields) or "no fields"
            raise DataError(f"{self.where}: field {field!r} ({key}) is missing; the row has {has}")
        return self.fields[field]


def read_rows(path: str | Path) -> Iterator[Row]:
    """Yield the rows of `path` in order, read lazily.

    Raises:
        DataError: the file does not exist, has an unknown suffix or no rows, or a row cannot be read (the message names
            file:line).
    """
    path = Path(path)
    match path.suffix:
        case ".jsonl":
            read = _read_jsonl
        case ".parquet":
            read = _read_parquet
        case suffix:
            raise DataError(f"{path}: a data file needs the suffix .jsonl or .parquet, got {suffix or 'none'}")
    if not path.exists():
        raise DataError(f"{path}: no such data file (working directory {Path.cwd()})")
    if not path.is_file():
        raise DataError(f"{path}: needs a file, got a folder")
    refuse_lfs_pointer(path)
    return _require_rows(path, read(path))


def _require_rows(path: Path, rows: Iterator[Row]) -> Iterator[Row]:
    empty = True
    for row in rows:
        empty = False
        yield row
    if empty:
        raise DataError(f"{path}: the data file has no rows")


def _read_jsonl(path: Path) -> Iterator[Row]:
    # Binary, because text mode would also end lines at U+2028 and report a bad byte without its line.
    with path.open("rb") as file:
        for line, raw in enumerate(file, start=1):
            if not raw.strip():
                continue
            try:
                fields = json.loads(raw.decode("utf-8-sig" if line == 1 else "utf-8"))
            except (ValueError, RecursionError) as e:
                raise DataError(f"{path}:{line}: not valid JSON: {e}") from e
            if not isinstance(fields, dict):
                raise DataError(f"{path}:{line}: needs a JSON object, got {type(fields).__name__}")
            if b"\\ud" in raw or b"\\uD" in raw:  # the line is UTF-8, in which only escapes can be surrogates
                _refuse_surrogates(path, line, fields)
            yield Row(path, line, fields)


def _refuse_surrogates(path: Path, line: int, fields: Mapping[str, Any]) -> None:
    for name, value in fields.items():
        if has_surrogate(name) or has_surrogate(json.dumps(value, ensure_ascii=False)):
            raise DataError(
                f"{path}:{line}: field {replace_surrogates(name)!r} has an unpaired surrogate, such as \\ud800, which "
                "is no character; remove it or write the character's whole pair"
            )


def _read_parquet(path: Path) -> Iterator[Row]:
    line = 0
    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=PARQUET_BATCH_ROWS):
                for fields in _to_rows(_with_short_floats(batch)):
                    line += 1
                    yield Row(path, line, fields)
    except (
        pa.ArrowException,
        ValueError,
        OverflowError,
        OSError,
    ) as e:  # also bytes that are no text, and dates of no year
        raise DataError(f"{path}:{line + 1}: not readable as Parquet: {e}") from e


def _to_rows(batch: pa.RecordBatch) -> Iterator[dict[str, Any]]:
    """Yield the rows of a batch; those before one that Python's types cannot hold are yielded before its error."""
    try:
        yield from batch.to_pylist()
    except (ValueError, OverflowError):
        for i in range(batch.num_rows):
            yield from batch.slice(i, 1).to_pylist()


def _with_short_floats(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return the batch with columns of float16 and float32 as float64 of the same shortest decimals: 0.1 stays 0.1."""
    for i, field in enumerate(batch.schema):
        if field.type in (pa.float16(), pa.float32()):
            values = batch.column(i).to_numpy(zero_copy_only=False)  # NaN for null
            doubles = pa.array(
                map(float, values.astype(str)), pa.float64(), mask=batch.column(i).is_null().to_numpy(False)
            )
            batch = batch.set_column(i, field.name, doubles)
    return batch
