"""Whether a checkpoint's folder holds what its manifest names."""

from __future__ import annotations

import hashlib
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from megarl.checkpoint.manifest import MANIFEST, FileRecord, Manifest, NewerFormatError, read_manifest, step_name
from megarl.errors import DataError

PIECE_BYTES = 2**22
"""What is read at once."""

READERS = 16
"""Files that are read at the same time: hashing lets go of Python's lock, and a network's disk serves many."""

TELL_SECONDS = 30.0
"""Between two lines that say how far reading has come."""

Advance = Callable[[int], None]
"""Told how many further bytes were read; from several threads."""


def hash_file(path: Path, advance: Advance | None = None) -> FileRecord:
    """Size and sha256 of a file."""
    digest, num_bytes = hashlib.sha256(), 0
    with path.open("rb", buffering=0) as file:
        while piece := file.read(PIECE_BYTES):
            digest.update(piece)
            num_bytes += len(piece)
            if advance is not None:
                advance(len(piece))
    return FileRecord(bytes=num_bytes, sha256=digest.hexdigest())


def files_below(folder: Path) -> dict[str, Path]:
    """Every file of `folder` and the folders in it, by its relative path with `/` between the parts, sorted."""
    found = (Path(at) / name for at, _, names in os.walk(folder) for name in names)
    return dict(sorted((path.relative_to(folder).as_posix(), path) for path in found))


def damage(folder: Path, *, deep: bool = False, advance: Advance | None = None) -> list[str]:
    """What keeps the checkpoint from being loaded, a sentence each with the file; empty: nothing.

    Args:
        deep: read every file, and compare its sha256; else only sizes are.
        advance: told of the bytes read.

    Raises:
        NewerFormatError: a newer megarl wrote it.
    """
    try:
        manifest = read_manifest(folder)
    except NewerFormatError:
        raise
    except DataError as e:
        return [str(e).removeprefix(f"{folder}{os.sep}")]
    return [*_misfits(folder, manifest), *(_other_contents(folder, manifest, advance) if deep else ())]


def damage_told(folder: Path, say: Callable[[str], None]) -> list[str]:
    """As `damage`, every file being read; see `telling`."""
    return damage(folder, deep=True, advance=telling(folder.name, say))


def telling(name: str, say: Callable[[str], None]) -> Advance:
    """Tells every `TELL_SECONDS` how far the comparison of checkpoint `name` has come."""
    lock, since, num_bytes = threading.Lock(), time.monotonic(), 0

    def advance(read: int) -> None:
        nonlocal since, num_bytes
        with lock:
            num_bytes += read
            if time.monotonic() - since >= TELL_SECONDS:
                since = time.monotonic()
                say(f"comparing {name} with its checksums: {num_bytes / 2**30:.1f} GiB read")

    return advance


def problems(folder: Path, *, deep: bool = True, advance: Advance | None = None) -> list[str]:
    """As `damage`, and files that do not belong there."""
    found = damage(folder, deep=deep, advance=advance)
    try:
        named = read_manifest(folder).files.keys()
    except DataError:
        return found  # which say it
    unknown = files_below(folder).keys() - named - {MANIFEST}
    return [*found, *(f"{name} is not in the manifest" for name in sorted(unknown))]


def _misfits(folder: Path, manifest: Manifest) -> Iterator[str]:
    """A step that is not the folder's; files that are not there, or of another size."""
    if re.fullmatch(r"step-\d{6,}", folder.name) and folder.name != step_name(manifest.step):
        yield f"{MANIFEST} is of step {manifest.step}"
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


def _other_contents(folder: Path, manifest: Manifest, advance: Advance | None) -> list[str]:
    """Files of the right size that hold something else."""

    def problem(named: tuple[str, FileRecord]) -> str | None:
        name, record = named
        path = folder / name
        try:
            size = path.stat().st_size
        except OSError:
            size = -1
        if size != record.bytes:
            return None  # said already
        try:
            found = hash_file(path, advance)
        except OSError as e:
            return f"{name} cannot be read: {e.strerror}"
        if found.sha256 == record.sha256:
            return None
        return f"{name} has sha256 {found.sha256}, needs {record.sha256}"

    with ThreadPoolExecutor(READERS) as pool:
        return [said for said in pool.map(problem, manifest.files.items()) if said is not None]
