"""The manifest of a checkpoint, `manifest.json`, which is written after all files that it lists.

    {"format_version": 2, "step": 20, "model": {...}, "layout": {"policy": {"tp": 2, "world": 4}},
     "files": {"policy/__0_0.distcp": {"bytes": 4096, "sha256": "9f86d0..."}, ...}, "sha256": "60303a..."}

The last key, `sha256`, is the checksum of the manifest itself without this key, as `_canonical` serializes it.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, ClassVar, Self

from pydantic import TypeAdapter, ValidationError

from megarl import __version__
from megarl.config import StageConfig
from megarl.config.trainer import ParallelConfig
from megarl.errors import DataError
from megarl.model_files.json_object import read_json_object
from megarl.model_files.model_config import read_model_config

FORMAT_VERSION = 2
"""Checkpoint format that this version of megarl writes, and the only one that it reads."""

MANIFEST = "manifest.json"

IGNORED_CONFIG_KEYS = (
    "attn_implementation",
    "auto_map",
    "bos_token_id",
    "dtype",
    "eos_token_id",
    "id2label",
    "initializer_range",
    "label2id",
    "pad_token_id",
    "torch_dtype",
    "transformers_version",
    "use_cache",
)
"""Keys of config.json that affect neither weight shapes nor computation. Keys that begin with `_` are ignored too."""


def step_name(step: int) -> str:
    """Return the folder name of a step's checkpoint, such as `step-000020`."""
    return f"step-{step:06d}"


class UnsupportedFormatError(DataError):
    """A checkpoint in a format that this version of megarl cannot read; it may be valid all the same."""

    age: ClassVar[str]
    """`newer` or `older` than `FORMAT_VERSION`."""


class NewerFormatError(UnsupportedFormatError):
    """A checkpoint in a newer format than `FORMAT_VERSION`."""

    age = "newer"


class OlderFormatError(UnsupportedFormatError):
    """A checkpoint in an older format than `FORMAT_VERSION`."""

    age = "older"


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRecord:
    """Size and checksum of a file at the time it was written."""

    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelIdentity:
    """Identity of a model: equal identities imply equal parameter names and shapes."""

    architecture: str
    config: Mapping[str, Any]
    """config.json without `architectures` and `IGNORED_CONFIG_KEYS`."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """Return the identity of a model with this config.json."""
        architectures = config.get("architectures") or [config.get("model_type", "unknown")]
        kept = {
            k: v
            for k, v in config.items()
            if k not in (*IGNORED_CONFIG_KEYS, "architectures") and not k.startswith("_")
        }
        return cls(architecture=str(architectures[0]), config=kept)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointMetadata:
    """Manifest entries that are the same for all checkpoints of a run."""

    model: ModelIdentity
    layout: Mapping[str, Any]
    """Name of each trained model -> its parallel sizes, and its world size under `world`."""
    data: Mapping[str, FileRecord] = field(default_factory=dict)
    """YAML key -> file of training rows, to which the sampler's position refers; empty: not recorded."""

    @classmethod
    def from_config(cls, config: StageConfig) -> Self:
        """Return the metadata of a run's checkpoints, without `data`.

        Raises:
            DataError: the model's config.json cannot be read.
        """
        model = ModelIdentity.from_config(read_model_config(config.model.path))
        layout = {"policy": _layout(config.trainer.parallel, config.placement.slots)}
        for auxiliary in config.auxiliary_models:
            if auxiliary.optimizer is not None:
                layout[auxiliary.name] = _layout(auxiliary.parallel, config.placement.all_pools[auxiliary.pool].slots)
        return cls(model=model, layout=layout)


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest(CheckpointMetadata):
    """Content of `manifest.json` except its checksum."""

    step: int
    files: Mapping[str, FileRecord]
    """Path relative to the checkpoint folder, with `/` as separator -> size and checksum."""
    created: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    """Time of creation in UTC, ISO 8601."""
    megarl_version: str = __version__
    format_version: int = FORMAT_VERSION

    @property
    def num_bytes(self) -> int:
        """Total size of the listed files in bytes."""
        return sum(file.bytes for file in self.files.values())

    def as_json(self) -> bytes:
        """Return the content of `manifest.json`, checksum included."""
        tree = asdict(self)
        return json.dumps(tree | {"sha256": _digest(tree)}, indent=1).encode() + b"\n"


_ADAPTER = TypeAdapter(Manifest)


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of the checkpoint in `folder`.

    Raises:
        UnsupportedFormatError: the checkpoint has a newer or older format.
        DataError: the manifest is missing or damaged.
    """
    file = folder / MANIFEST
    try:
        file.stat()
    except (FileNotFoundError, NotADirectoryError) as e:
        raise DataError(f"{file} is missing") from e
    except OSError as e:
        raise DataError(f"{file} cannot be read: {e.strerror}") from e
    tree = read_json_object(file)
    version = tree.get("format_version")
    if not isinstance(version, int) or version < 1:
        raise DataError(f"{file} needs an integer of at least 1 under format_version, got {version!r}")
    if version != FORMAT_VERSION:
        reason = f"checkpoint {folder} has format {version}, but this version of megarl reads format {FORMAT_VERSION}"
        if version > FORMAT_VERSION:
            raise NewerFormatError(f"{reason}: use the newer version that wrote the checkpoint")
        raise OlderFormatError(f"{reason}: start a new run, or resume with the version that wrote the checkpoint")
    stated, found = tree.pop("sha256", None), _digest(tree)
    if stated != found:
        raise DataError(f"{file} has sha256 {found}, but its own key sha256 states {stated}")
    try:
        return _ADAPTER.validate_python(tree)
    except ValidationError as e:
        problem = e.errors(include_url=False)[0]
        raise DataError(f"{file}: {'.'.join(map(str, problem['loc']))}: {problem['msg']}") from e


def require_same_model(saved: ModelIdentity, current: ModelIdentity, checkpoint: str) -> None:
    """Return if both identities are equal.

    Args:
        checkpoint: name of the checkpoint, for the error message.

    Raises:
        DataError: the identities differ; the message lists every key that differs.
    """
    differences = []
    if saved.architecture != current.architecture:
        differences.append(f"architecture {saved.architecture}, got {current.architecture}")
    for key in sorted(saved.config.keys() | current.config.keys()):
        before, after = saved.config.get(key), current.config.get(key)
        if before != after:
            differences.append(f"{key} {before!r}, got {after!r}")
    if differences:
        raise DataError(f"checkpoint {checkpoint} belongs to another model: needs {'; '.join(differences)}")


def _layout(parallel: ParallelConfig, world: int) -> dict[str, Any]:
    return parallel.model_dump(mode="json", exclude_none=True) | {"world": world}


def _canonical(tree: Any) -> bytes:
    return json.dumps(tree, sort_keys=True, separators=(",", ":")).encode()


def _digest(tree: Mapping[str, Any]) -> str:
    return hashlib.sha256(_canonical(tree)).hexdigest()


CHUNK_BYTES = 2**22
"""Bytes per read call while hashing."""

READERS = 16
"""Number of files hashed concurrently: hashing releases the GIL, and network file systems serve parallel reads."""

REPORT_SECONDS = 30.0
"""Interval between two progress reports while files are hashed."""

ReadCallback = Callable[[int], None]
"""Receives the number of bytes of each read. Called from several threads."""


def hash_file(path: Path, advance: ReadCallback | None = None) -> FileRecord:
    """Return the size and SHA-256 of a file."""
    return hash_files([path], advance)


def hash_files(paths: Sequence[Path], advance: ReadCallback | None = None) -> FileRecord:
    """Return the size and SHA-256 of the contents of files, one after another."""
    digest, num_bytes = hashlib.sha256(), 0
    for path in paths:
        with path.open("rb", buffering=0) as file:
            while chunk := file.read(CHUNK_BYTES):
                digest.update(chunk)
                num_bytes += len(chunk)
                if advance is not None:
                    advance(len(chunk))
    return FileRecord(bytes=num_bytes, sha256=digest.hexdigest())


def list_files(folder: Path) -> dict[str, Path]:
    """Return all files in `folder` and its subfolders, keyed and sorted by relative path with `/` as separator."""
    found = (Path(at) / name for at, _, names in os.walk(folder) for name in names)
    return dict(sorted((path.relative_to(folder).as_posix(), path) for path in found))


def find_damage(folder: Path, *, deep: bool = False, advance: ReadCallback | None = None) -> list[str]:
    """Return the problems that keep the checkpoint from being loaded, one message per file; empty if it is valid.

    Args:
        deep: also read every file and compare its SHA-256; else compare sizes only.
        advance: receives the number of bytes of each read.

    Raises:
        UnsupportedFormatError: the checkpoint has a newer or older format.
    """
    try:
        manifest = read_manifest(folder)
    except UnsupportedFormatError:
        raise
    except DataError as e:
        return [str(e).removeprefix(f"{folder}{os.sep}")]
    return [
        *_find_size_problems(folder, manifest),
        *(_find_checksum_problems(folder, manifest, advance) if deep else ()),
    ]


def verify_and_report(folder: Path, notify: Callable[[str], None]) -> list[str]:
    """Return the problems that `find_damage` finds by checksum; report the progress to `notify`."""
    return find_damage(folder, deep=True, advance=make_progress_reporter(folder.name, notify))


def make_progress_reporter(name: str, notify: Callable[[str], None]) -> ReadCallback:
    """Return a callback that reports the bytes read of checkpoint `name` to `notify` every `REPORT_SECONDS`."""
    lock, since, num_bytes = threading.Lock(), time.monotonic(), 0

    def advance(read: int) -> None:
        nonlocal since, num_bytes
        with lock:
            num_bytes += read
            if time.monotonic() - since >= REPORT_SECONDS:
                since = time.monotonic()
                notify(f"comparing {name} with its checksums: {num_bytes / 2**30:.1f} GiB read")

    return advance


def find_problems(folder: Path, *, deep: bool = True, advance: ReadCallback | None = None) -> list[str]:
    """Return the problems that `find_damage` finds, and the files that the manifest does not list."""
    found = find_damage(folder, deep=deep, advance=advance)
    try:
        listed = read_manifest(folder).files.keys()
    except DataError:
        return found  # reported there already
    unknown = list_files(folder).keys() - listed - {MANIFEST}
    return [*found, *(f"{name} is not in the manifest" for name in sorted(unknown))]


def _find_size_problems(folder: Path, manifest: Manifest) -> Iterator[str]:
    """Yield a mismatch of step and folder name, then each file that is missing or has another size."""
    if re.fullmatch(r"step-\d{6,}", folder.name) and folder.name != step_name(manifest.step):
        yield f"{MANIFEST} belongs to step {manifest.step}"
    for name, record in manifest.files.items():
        try:
            size = (folder / name).stat().st_size
        except (FileNotFoundError, NotADirectoryError):
            yield f"{name} is missing, needs {record.bytes} bytes"
            continue
        except OSError as e:
            yield f"{name} cannot be read: {e.strerror}"
            continue
        if size != record.bytes:
            yield f"{name} has {size} bytes, needs {record.bytes}"


def _find_checksum_problems(folder: Path, manifest: Manifest, advance: ReadCallback | None) -> list[str]:
    """Return a message for each file of the stated size whose SHA-256 differs."""

    def find_problem(listed: tuple[str, FileRecord]) -> str | None:
        name, record = listed
        path = folder / name
        try:
            size = path.stat().st_size
        except OSError:
            size = -1
        if size != record.bytes:
            return None  # reported by `_find_size_problems`
        try:
            found = hash_file(path, advance)
        except OSError as e:
            return f"{name} cannot be read: {e.strerror}"
        if found.sha256 == record.sha256:
            return None
        return f"{name} has sha256 {found.sha256}, needs {record.sha256}"

    with ThreadPoolExecutor(READERS) as pool:
        return [found for found in pool.map(find_problem, manifest.files.items()) if found is not None]
