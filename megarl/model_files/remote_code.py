"""Find the code in a model folder that its `auto_map` entries name. Nothing here runs it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from megarl.errors import DataError
from megarl.model_files.json_object import read_optional_json_object

SWITCH = "model.trust_remote_code: true"

CONFIG_FILES = ("config.json", "tokenizer_config.json")
"""Files with an `auto_map`: class of transformers -> the class in the folder's code that replaces it."""


def tokenizer_code(folder: Path) -> str | None:
    """Return the class that `auto_map.AutoTokenizer` of tokenizer_config.json names, `MODULE.CLASS`; None: none."""
    place = ("tokenizer_config.json", "auto_map.AutoTokenizer")
    return next((name for *where, name in _named_classes(folder) if tuple(where) == place), None)


def require_own_code(folder: Path) -> None:
    """Return if all code that the folder names is in the folder.

    Raises:
        DataError: a class is `REPOSITORY--MODULE.CLASS`: transformers would download the newest code from there.
    """
    for file, key, name in _named_classes(folder):
        if "--" in name:
            raise DataError(
                f"{folder / file}: {key} names {name}, code of another repository, of which no commit is pinned; with "
                f"{SWITCH}, copy it into {folder} and name it without the repository"
            )


def _named_classes(folder: Path) -> Iterator[tuple[str, str, str]]:
    """Yield (file, key, class) for each class that an `auto_map` names."""
    for file in CONFIG_FILES:
        auto_map = read_optional_json_object(folder / file).get("auto_map")
        entries = auto_map if isinstance(auto_map, dict) else {"AutoTokenizer": auto_map}  # a list: an older form
        for key, named in entries.items():
            for name in named if isinstance(named, list) else [named]:
                if isinstance(name, str):
                    yield file, f"auto_map.{key}", name
