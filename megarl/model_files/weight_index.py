"""What the safetensors of a model folder hold, from their headers alone; torch is not imported."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from megarl.errors import DataError
from megarl.model_files.header import StoredTensor, read_header
from megarl.model_files.json_object import read_json_object

INDEX = "model.safetensors.index.json"
"""Says which file holds which tensor, where there are several."""

SHOWN = 3
"""Tensors that a sentence names."""


def derived_tensors(*, tied: bool) -> tuple[str, ...]:
    """Patterns of names of tensors that are computed from others or repeat them: nobody needs to read them.

    Args:
        tied: whether the head is the embedding.
    """
    derived = (
        "*rotary_emb.inv_freq",
        # where layers predict further tokens, DeepSeek-V3 repeats the embedding and the head in them
        "model.layers.*.embed_tokens.weight",
        "model.layers.*.shared_head.head.weight",
    )
    return (*derived, "lm_head.weight") if tied else derived


def read_headers(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor of the files that the index names, or of all *.safetensors where there is no index.

    Raises:
        DataError: there are no such files, one is not readable, or they do not hold what the index says.
    """
    index = folder / INDEX
    file_of = _read_index(index) if index.exists() else {}
    files = sorted({folder / file for file in file_of.values()} or folder.glob("*.safetensors"))
    if not files:
        raise DataError(f"{folder} holds no safetensors files")
    tensors: dict[str, StoredTensor] = {}
    for file in files:
        if not file.exists():
            raise DataError(f"{file} is not readable as safetensors: {INDEX} names it and it is not there")
        for name, stored in read_header(file).items():
            if folder / file_of.get(name, file.name) != file:
                continue
            if name in tensors:
                raise DataError(f"{name} lies in {tensors[name].file} and in {file}, which no {INDEX} tells apart")
            tensors[name] = stored
    for name, held_by in file_of.items():
        if name not in tensors:
            raise DataError(f"{index} places {name} in {held_by}, which does not hold it")
    return tensors


def problems(
    folder: Path,
    needed: Mapping[str, tuple[int, ...]],
    *,
    model: str = "the model",
    ignored: Sequence[str] = (),
    optional: Sequence[str] = (),
) -> list[str]:
    """A sentence for each way in which `folder` does not hold the tensors of `model`; empty where it does.

    Args:
        needed: the shape of every tensor.
        ignored: names, with `*` for anything, of tensors that may be there and are not needed.
        optional: of `needed`, those that may be missing.
    """
    try:
        tensors = read_headers(folder)
    except DataError as e:
        return [str(e)]
    found = []
    missing = [name for name in needed if name not in tensors and name not in optional]
    if missing:
        found.append(f"{folder} lacks {len(missing)} of the {len(needed)} tensors of {model}, {_first(missing)}")
    wrong = [name for name in needed if name in tensors and tensors[name].shape != needed[name]]
    if wrong:
        shapes = [f"{name}: needs {needed[name]}, got {tensors[name].shape}" for name in wrong[:SHOWN]]
        found.append(
            f"{folder} holds {len(wrong)} tensors of another shape than config.json gives them, first "
            f"{'; '.join(shapes)}"
        )
    unexpected = [name for name in tensors if name not in needed and not _matches(name, ignored)]
    if unexpected:
        found.append(
            f"{folder} holds {len(unexpected)} tensors that {model} as config.json describes it does not have, "
            f"{_first(sorted(unexpected))}"
        )
    return found


def _read_index(index: Path) -> dict[str, str]:
    names = read_json_object(index).get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(file, str) for file in names.values()):
        raise DataError(f"{index} needs a mapping from tensors to files under weight_map")
    return names


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _first(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return f"first {', '.join(names[:SHOWN])}{more}"
