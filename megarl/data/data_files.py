"""Find the files of a data path, and read their rows: JSON, JSONL, CSV, Parquet and Arrow files, one or several.

Files on the Hugging Face Hub, such as `hf://datasets/openai/gsm8k/main/train-*.parquet`, are downloaded by the driver
into the local cache of huggingface_hub; it continues with the local ones.
"""

from __future__ import annotations

import codecs
import csv
import glob
import gzip
import io
import json
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, cast

import pyarrow as pa
import pyarrow.parquet as pq

from megarl.config.run import StageConfig, data_paths, replace_data_paths
from megarl.errors import ConfigError, DataError
from megarl.text import has_surrogate, replace_surrogates

BATCH_ROWS = 1024

SUFFIXES = (".jsonl", ".json", ".csv", ".parquet", ".arrow")
"""Of these, the ones of text files may be followed by `.gz`."""

TEXT_SUFFIXES = (".jsonl", ".json", ".csv")

DESCRIPTIONS = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json", "metadata.json")
"""Files in folders of datasets that hold no rows."""

MAX_CSV_FIELD = 2**31 - 1

GZIP_MAGIC = b"\x1f\x8b"

NumberedRow = tuple[int, dict[str, Any]]
"""Line of a text file, or number of a row in another one, from 1; and the fields of the row."""


def find_data_files(path: str | Path) -> list[Path]:
    """Return the files of a data path in the order of their rows: a file, or those in a folder or of a pattern.

    A path of an existing file or folder is no pattern. Numbers in names are compared as numbers: `part-10` follows
    `part-2`. Of a folder, hidden files, descriptions of the dataset and files of other suffixes are left out.

    Raises:
        DataError: there is no such file, a file has an unknown suffix, or the files differ in their suffix.
    """
    path = Path(path)
    if path.is_dir():
        found = [file for file in path.iterdir() if _is_shard(file)]
        if not found:
            raise DataError(f"{path}: the folder has no data files, which end in {_list_suffixes()}")
    elif not path.exists() and glob.has_magic(str(path)):
        found = [file for file in map(Path, glob.glob(str(path), recursive=True)) if file.is_file()]
        if not found:
            raise DataError(f"{path}: no data file matches the pattern (working directory {Path.cwd()})")
    else:
        if not path.exists():
            data_suffix(path)
            raise DataError(f"{path}: no such data file (working directory {Path.cwd()})")
        found = [path]
    found.sort(key=_natural_order)
    first = {data_suffix(file): file for file in reversed(found)}
    if len(first) > 1:
        names = ", ".join(f"{file.name} ({suffix})" for suffix, file in sorted(first.items()))
        raise DataError(f"{path}: the data files need to have one suffix, got {names}")
    return found


def data_suffix(file: Path) -> str:
    """Return the suffix by which a file is read, without `.gz`.

    Raises:
        DataError: it is unknown.
    """
    suffixes = [suffix.lower() for suffix in file.suffixes]
    suffix = suffixes[-1] if suffixes else ""
    if suffix == ".gz" and len(suffixes) > 1 and suffixes[-2] in TEXT_SUFFIXES:
        suffix = suffixes[-2]
    if suffix not in SUFFIXES:
        raise DataError(f"{file}: a data file needs the suffix {_list_suffixes()}, got {suffix or 'none'}")
    return suffix


def _list_suffixes() -> str:
    return f"{', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}"


def _is_shard(file: Path) -> bool:
    if not file.is_file() or file.name.startswith((".", "_")) or file.name in DESCRIPTIONS:
        return False
    return file.name.lower().removesuffix(".gz").endswith(SUFFIXES)


def _natural_order(file: Path) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", str(file))]


def read_file(path: Path) -> Iterator[NumberedRow]:
    """Yield the rows of one file in order, read lazily; a `.json` file is read as a whole.

    Raises:
        DataError: a row cannot be read (the message names file:line).
    """
    match data_suffix(path):
        case ".jsonl":
            return _read_text(path, _read_jsonl)
        case ".json":
            return _read_text(path, _read_json)
        case ".csv":
            return _read_text(path, _read_csv)
        case ".parquet":
            return _read_table(path, _read_parquet(path), "Parquet")
        case _:
            return _read_table(path, _read_arrow(path), "Arrow")


def _read_text(path: Path, read: Any) -> Iterator[NumberedRow]:
    # Binary, because text mode would also end lines at U+2028 and report a bad byte without its line.
    line = 0
    try:
        with gzip.open(path) if path.suffix.lower() == ".gz" else path.open("rb") as file:
            for line, fields in read(path, cast("BinaryIO", file)):
                yield line, fields
    except (gzip.BadGzipFile, zlib.error, EOFError) as e:
        raise DataError(f"{path}:{line + 1}: not readable as gzip: {e}") from e


def _read_jsonl(path: Path, file: Iterable[bytes]) -> Iterator[NumberedRow]:
    for line, raw in enumerate(file, start=1):
        if raw.strip():
            yield line, _read_object(path, line, raw)


def _read_object(path: Path, line: int, raw: bytes) -> dict[str, Any]:
    fields = _parse(path, line, raw)
    if not isinstance(fields, dict):
        raise DataError(f"{path}:{line}: needs a JSON object, got {type(fields).__name__}")
    if b"\\ud" in raw or b"\\uD" in raw:  # the line is UTF-8, in which only escapes can be surrogates
        _refuse_surrogates(path, line, fields)
    return fields


def _parse(path: Path, line: int, raw: bytes) -> Any:
    if line == 1 and raw.startswith(GZIP_MAGIC):
        raise DataError(f"{path}:1: not valid JSON: the file is compressed with gzip, and needs the suffix .gz")
    try:
        text = raw.decode("utf-8-sig" if line == 1 else "utf-8")
        return _DECODER.decode(text.rstrip(" \t\r\n"))  # so that what is missing at the end is missing in this line
    except json.JSONDecodeError as e:
        at = f"{path}:{line + e.lineno - 1}"
        raise DataError(f"{at}: not valid JSON: {e.msg} at column {e.colno}") from e
    except (ValueError, RecursionError) as e:
        raise DataError(f"{path}:{line}: not valid JSON: {e}") from e


def _make_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of JSON.

    Raises:
        ValueError: a key occurs more than once.
    """
    found = dict(pairs)
    if len(found) != len(pairs):
        keys = [key for key, _ in pairs]
        repeated = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"an object has the key {replace_surrogates(repeated)!r} more than once")
    return found


_DECODER = json.JSONDecoder(object_pairs_hook=_make_object)


def _refuse_surrogates(path: Path, line: int, fields: Mapping[str, Any]) -> None:
    for name, value in fields.items():
        if has_surrogate(name) or has_surrogate(json.dumps(value, ensure_ascii=False)):
            raise DataError(
                f"{path}:{line}: field {replace_surrogates(name)!r} has an unpaired surrogate, such as \\ud800, which "
                "is no character; remove it or write the character's whole pair"
            )


def _read_json(path: Path, file: BinaryIO) -> Iterator[NumberedRow]:
    """Yield the objects of a list, of the only list in an object, or of lines: some name JSONL files `.json`."""
    first = file.readline()
    rest = file.read()
    if rest.strip() and _is_object(first):
        yield from _read_jsonl(path, io.BytesIO(first + rest))
        return
    if not (first + rest).removeprefix(codecs.BOM_UTF8).strip():
        return
    content = _parse(path, 1, first + rest)
    rows = content
    if isinstance(content, dict):
        lists = {name: value for name, value in content.items() if _is_list_of_rows(value)}
        if len(lists) > 1:
            raise DataError(
                f"{path}:1: needs one list of rows, got {len(lists)}: {', '.join(map(repr, lists))}; write each to its "
                "own file"
            )
        rows = next(iter(lists.values()), [content])
    if not isinstance(rows, list):
        raise DataError(f"{path}: needs a list of JSON objects, got {type(content).__name__}")
    for number, fields in enumerate(rows, start=1):
        if not isinstance(fields, dict):
            raise DataError(f"{path}:{number}: needs JSON objects in its list, got {type(fields).__name__}")
        _refuse_surrogates(path, number, fields)
        yield number, fields


def _is_list_of_rows(value: object) -> bool:
    """Whether a value is a list of objects other than messages and tools, which a row has."""
    if not isinstance(value, list) or not value or not isinstance(value[0], dict):
        return False
    return not any(keys <= value[0].keys() for keys in ({"role"}, {"from", "value"}, {"type", "function"}))


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line.decode("utf-8-sig")), dict)
    except (ValueError, RecursionError):
        return False


def _read_csv(path: Path, file: BinaryIO) -> Iterator[NumberedRow]:
    """Yield the rows of a CSV file with a header, all of whose fields are texts; an empty one is null."""
    csv.field_size_limit(MAX_CSV_FIELD)
    names: list[str] | None = None
    reader = csv.reader(_decode_lines(path, file), strict=True)
    line = 0
    while True:
        try:
            cells = next(reader, None)
        except csv.Error as e:
            raise DataError(f"{path}:{reader.line_num}: not valid CSV: {e}") from e
        begun, line = line + 1, reader.line_num
        if cells is None:
            return
        if not cells:
            continue
        if names is None:
            names = cells
            repeated = sorted({name for name in names if names.count(name) > 1})
            if repeated:
                raise DataError(f"{path}:{begun}: the header names column {repeated[0]!r} more than once")
            continue
        if len(cells) != len(names):
            raise DataError(f"{path}:{begun}: needs {len(names)} fields, as the header has, got {len(cells)}")
        yield begun, {name: cell or None for name, cell in zip(names, cells, strict=True)}


def _decode_lines(path: Path, file: Iterable[bytes]) -> Iterator[str]:
    for line, raw in enumerate(file, start=1):
        try:
            yield raw.decode("utf-8-sig" if line == 1 else "utf-8")
        except UnicodeDecodeError as e:
            raise DataError(f"{path}:{line}: not valid CSV: {e}") from e


def _read_parquet(path: Path) -> Iterator[pa.RecordBatch]:
    with pq.ParquetFile(path) as file:
        yield from file.iter_batches(batch_size=BATCH_ROWS)


def _read_arrow(path: Path) -> Iterator[pa.RecordBatch]:
    """Yield the batches of an Arrow file, or of a stream, as `datasets` saves it."""
    with pa.memory_map(str(path)) as source:
        is_file = source.read(6) == b"ARROW1"
        source.seek(0)
        if is_file:
            reader = pa.ipc.open_file(source)
            batches = (reader.get_batch(i) for i in range(reader.num_record_batches))
        else:
            batches = iter(pa.ipc.open_stream(source))
        for batch in batches:
            for start in range(0, batch.num_rows, BATCH_ROWS):
                yield batch.slice(start, BATCH_ROWS)


def _read_table(path: Path, batches: Iterator[pa.RecordBatch], name: str) -> Iterator[NumberedRow]:
    number = 0
    try:
        for batch in batches:
            _refuse_equal_names(batch.schema)
            for fields in _to_rows(_with_short_floats(batch)):
                number += 1
                yield number, fields
    except (
        pa.ArrowException,
        ValueError,
        OverflowError,
        OSError,
    ) as e:  # also bytes that are no text, and dates of no year
        raise DataError(f"{path}:{number + 1}: not readable as {name}: {e}") from e


def _refuse_equal_names(schema: pa.Schema) -> None:
    """Raise a `ValueError` if several columns have one name: of each row, one value would be lost."""
    repeated = next((name for name in schema.names if schema.names.count(name) > 1), None)
    if repeated is not None:
        raise ValueError(f"the table names column {repeated!r} more than once")


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
    """Return `config` with a local path in place of every path on the hub, and the commits in `data.hub_revisions`.

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
    """Return the dataset that `path` names, its commit, and the local path; `commits`: known ones by dataset.

    The local path is a file, or a pattern that matches the same files.
    """
    match = HUB_FILE.fullmatch(path)
    if match is None:
        raise ConfigError(f"a file on the hub is hf://datasets/ORGANIZATION/NAME/FILE or NAME@REVISION, got {path}")
    dataset, pattern = match["id"], match["file"]
    from megarl.model_files.hub import download_snapshot  # not at import: it imports huggingface_hub

    try:
        folder = download_snapshot(
            "dataset", match["repo"], commits.get(dataset) or match["revision"], [pattern, f"{pattern.rstrip('/')}/*"]
        )
    except ConfigError as e:
        raise ConfigError(f"{path} cannot be loaded from the hub: {e}") from e
    if (folder / pattern).is_dir():
        return dataset, folder.name, folder / pattern
    found = [file for file in folder.glob(pattern) if file.is_file()]
    if not found:
        raise ConfigError(f"{path} needs to match files of the dataset, got none")
    return dataset, folder.name, found[0] if len(found) == 1 else folder / pattern
