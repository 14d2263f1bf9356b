"""Read rows of JSONL and Parquet files, with their line numbers for error messages.

A data file may be on the Hugging Face Hub, such as `hf://datasets/openai/gsm8k/main/train-*.parquet`:
the driver downloads each into the local cache of huggingface_hub and continues with the local file.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from megarl.config.paths import data_paths, replace_data_paths
from megarl.config.run import StageConfig
from megarl.errors import ConfigError, DataError
from megarl.model_files.json_object import refuse_lfs_pointer
from megarl.text import has_surrogate, replace_surrogates

SCHEME = "hf://"

HUB_FILE = re.compile(
    r"hf://datasets/(?P<id>(?P<repo>\w[\w.-]*/\w[\w.-]*)(?:@(?P<revision>[^/@]+))?)/(?P<file>[^/@].*)"
)
"""Organization, name and optionally branch, tag or commit hash of a dataset; then a file, or a pattern of its name."""


def hub_files(config: StageConfig) -> dict[str, str]:
    """Return YAML key -> path of the data files that are on the hub."""
    return {key: path for key, path in data_paths(config).items() if path.startswith(SCHEME)}


def with_local_data[C: StageConfig](
    config: C, recorded: Mapping[str, str] | None = None, notify: Callable[[str], object] = lambda line: None
) -> C:
    """Return `config` with a local file in place of every file on the hub, and the commits in `data.hub_revisions`.

    Args:
        recorded: dataset, as its path names it -> commit of the run to resume; `data.hub_revisions` takes precedence.
        notify: receives one line for each file.

    Raises:
        ConfigError: a file cannot be downloaded; one line per key.
    """
    paths = hub_files(config)
    if not paths:
        return config
    commits = {**(recorded or {}), **config.data.hub_revisions}
    files: dict[str, Path] = {}
    problems = []
    for key, path in paths.items():
        try:
            dataset, commit, files[key] = _download(path, commits)
        except ConfigError as e:
            problems.append(f"{key}: {e}")
        else:
            commits[dataset] = commit  # all files of a dataset are of one commit
            notify(f"{key}: {path} is commit {commit}, in {files[key]}")
    if problems:
        raise ConfigError("\n".join(problems))
    local = replace_data_paths(config, lambda key, path: str(files[key]) if key in files else path)
    return local.model_copy(update={"data": local.data.model_copy(update={"hub_revisions": commits})})


def _download(path: str, commits: Mapping[str, str]) -> tuple[str, str, Path]:
    """Return the dataset that `path` names, its commit, and the local file; `commits`: known ones by dataset."""
    match = HUB_FILE.fullmatch(path)
    if match is None:
        raise ConfigError(f"a file on the hub is hf://datasets/ORGANIZATION/NAME/FILE or NAME@REVISION, got {path}")
    dataset, pattern = match["id"], match["file"]
    from megarl.model_files.hub import download_snapshot  # not at import: it imports huggingface_hub

    try:
        folder = download_snapshot("dataset", match["repo"], commits.get(dataset) or match["revision"], [pattern])
    except ConfigError as e:
        raise ConfigError(f"{path} cannot be loaded from the hub: {e}") from e
    found = sorted(file for file in folder.glob(pattern) if file.is_file())
    if len(found) != 1:
        names = ", ".join(str(file.relative_to(folder)) for file in found) or "none"
        raise ConfigError(f"{path} needs to match one file of the dataset, got {names}")
    return dataset, folder.name, found[0]


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
