"""Verification of a checkpoint folder against its manifest, by file sizes or checksums."""

from __future__ import annotations

import hashlib
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from megarl.checkpoint.manifest import MANIFEST, FileRecord, Manifest, UnsupportedFormatError, read_manifest, step_name
from megarl.errors import DataError

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
    digest, num_bytes = hashlib.sha256(), 0
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
