"""Read JSON files that hold one object."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

from megarl.errors import DataError

POINTER_START = b"version https://git-lfs.github.com/spec/"


def refuse_lfs_pointer(file: Path) -> None:
    """Return if `file` is something else than a Git LFS pointer, or cannot be read, which its reader reports.

    Raises:
        DataError: it is a pointer.
    """
    try:
        with file.open("rb") as stream:
            start = stream.read(len(POINTER_START))
    except OSError:
        return
    if start == POINTER_START:
        raise DataError(f"{file} is a Git LFS pointer, not the file itself: run `git lfs pull` in its repository")


JsonObject: TypeAlias = dict[str, Any]
"""A parsed JSON object, such as a config.json."""

JsonMapping: TypeAlias = Mapping[str, Any]
"""A parsed JSON object that is only read."""


def read_json_object(file: Path) -> JsonObject:
    """Read a JSON file that holds one object.

    Raises:
        DataError: the file cannot be read, or its content is not a JSON object.
    """
    try:
        tree = json.loads(file.read_text(encoding="utf-8"))
    except OSError as e:
        raise DataError(f"{file} cannot be read: {e.strerror}") from e
    except (ValueError, RecursionError) as e:
        refuse_lfs_pointer(file)
        raise DataError(f"{file} is not valid JSON: {e}") from e
    if not isinstance(tree, dict):
        raise DataError(f"{file} needs a JSON object, got {type(tree).__name__}")
    return tree


def read_optional_json_object(file: Path) -> JsonObject:
    """Read a JSON file as `read_json_object` does; return an empty object if there is no such file."""
    return read_json_object(file) if file.exists() else {}
