"""Tensors of a model folder's safetensors files, from headers only; torch is not imported."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from megarl.errors import DataError
from megarl.model_files.file_plan import Box
from megarl.model_files.header import StoredTensor, read_header
from megarl.model_files.json_object import read_json_object
from megarl.model_files.quantization import combine_packed, find_scale_problems, scales_of

INDEX = "model.safetensors.index.json"
"""File that maps tensor names to safetensors files, in folders with several of them."""

MAX_NAMES = 3
"""Maximum number of tensors that an error message names."""


EMBEDDING_TENSOR, HEAD_TENSOR = "model.embed_tokens.weight", "lm_head.weight"


_PAIRED = re.compile(r".*\.experts\.gate_up_proj(_bias)?")


def paired_shape(name: str, shape: tuple[int, ...], names: Container[str]) -> tuple[int, ...]:
    """Return the shape in which layouts see a stored tensor: [.., n, 2] for [.., 2 n] with gate and up in turn.

    gpt-oss stores the first projections of experts so, and their biases. A range of pairs is a box, the gates alone are
    none. Other models have no biases, and all gates above all ups.

    Args:
        names: all tensors of the model.
    """
    is_paired = _PAIRED.fullmatch(name) and (name.endswith("_bias") or f"{name}_bias" in names)
    return (*shape[:-1], shape[-1] // 2, 2) if is_paired else shape


def stored_shape(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape in files of a tensor that megarl sees as `shape`, the inverse of `paired_shape`."""
    is_paired = _PAIRED.fullmatch(name) and len(shape) == (3 if name.endswith("_bias") else 4)
    return (*shape[:-2], 2 * shape[-2]) if is_paired else shape


def merge_pairs(box: Box) -> Box:
    """Return the box in the stored tensor of a box in a tensor of pairs, which has all of each pair."""
    *rest, (start, stop), pair = box
    assert pair == (0, 2), box
    return (*rest, (2 * start, 2 * stop))


def derived_tensor_patterns(*, tied: bool) -> tuple[str, ...]:
    """Return name patterns of tensors that are copies of others or computed from them, and need not be read.

    Args:
        tied: whether the output head shares the embedding weight.
    """
    return ("*rotary_emb.inv_freq", *copied_tensor_patterns(tied=tied))


def copied_tensor_patterns(*, tied: bool) -> dict[str, str]:
    """Return name pattern -> original of the tensors that need to be copies of others; `tied`: as above."""
    head = EMBEDDING_TENSOR if tied else HEAD_TENSOR
    copies = {
        # DeepSeek-V3 stores copies of the embedding and the head in its multi-token prediction layers
        "model.layers.*.embed_tokens.weight": EMBEDDING_TENSOR,
        "model.layers.*.shared_head.head.weight": head,
    }
    return copies | {HEAD_TENSOR: EMBEDDING_TENSOR} if tied else copies


def read_headers(folder: Path) -> dict[str, StoredTensor]:
    """Return the tensors of the files that the index names, or of all *.safetensors files without an index.

    Weights of 4 bits are a `PackedTensor` each.

    Raises:
        DataError: there are no safetensors files, one cannot be read, they contradict the index, or a part of a weight
            of 4 bits is missing or does not fit.
    """
    index = folder / INDEX
    file_of = _read_index(index) if index.exists() else {}
    files = sorted({folder / file for file in file_of.values()} or folder.glob("*.safetensors"))
    if not files:
        raise DataError(f"{folder} holds no safetensors files")
    tensors: dict[str, StoredTensor] = {}
    for file in files:
        if not file.exists():
            raise DataError(f"{file} is not readable as safetensors: {INDEX} names it, but it does not exist")
        for name, stored in read_header(file).items():
            if folder / file_of.get(name, file.name) != file:
                continue
            if name in tensors:
                raise DataError(f"{name} is in {tensors[name].file} and in {file}, and there is no {INDEX} to choose")
            tensors[name] = stored
    for name, held_by in file_of.items():
        if name not in tensors:
            raise DataError(f"{index} maps {name} to {held_by}, which does not contain it")
    return combine_packed(tensors)


def find_tensor_mismatches(
    folder: Path,
    needed: Mapping[str, tuple[int, ...]],
    *,
    model: str = "the model",
    ignored: Sequence[str] = (),
    optional: Sequence[str] = (),
) -> list[str]:
    """Return one message for each kind of mismatch between the tensors in `folder` and those `model` needs.

    Args:
        needed: tensor name -> shape.
        model: name of the model in messages.
        ignored: name patterns (`*` matches anything) of tensors that may exist and are not needed.
        optional: names in `needed` of tensors that may be missing.
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
        shapes = [f"{name}: needs {needed[name]}, got {tensors[name].shape}" for name in wrong[:MAX_NAMES]]
        found.append(
            f"{folder} holds {len(wrong)} tensors of another shape than config.json gives them, first "
            f"{'; '.join(shapes)}"
        )
    scales = scales_of(tensors)
    unexpected = [
        name for name in tensors if name not in needed and name not in scales and not matches_any(name, ignored)
    ]
    if unexpected:
        found.append(
            f"{folder} holds {len(unexpected)} tensors that {model} as config.json describes it does not have, "
            f"{_first(sorted(unexpected))}"
        )
    needed_or_scales = {name: each for name, each in tensors.items() if name in needed or scales.get(name) in needed}
    unscaled = list(find_scale_problems(needed_or_scales))
    if unscaled:
        more = f"; {len(unscaled) - 1} more weights likewise" if len(unscaled) > 1 else ""
        found.append(unscaled[0] + more)
    return found


def _read_index(index: Path) -> dict[str, str]:
    names = read_json_object(index).get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(file, str) for file in names.values()):
        raise DataError(f"{index} needs a mapping from tensors to files under weight_map")
    return names


def matches_any(name: str, patterns: Iterable[str]) -> bool:
    """Return whether `name` matches one of the patterns, in which `*` stands for any text."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _first(names: Sequence[str]) -> str:
    more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return f"first {', '.join(names[:MAX_NAMES])}{more}"
