"""What is wrong with a model folder, read from its JSON and the headers of its safetensors: no tensor, no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from megarl.errors import DataError
from megarl.megatron.families.dense import DenseModel

SIZES = (
    "hidden_size",
    "intermediate_size",
    "max_position_embeddings",
    "num_attention_heads",
    "num_hidden_layers",
    "rms_norm_eps",
    "vocab_size",
)
"""Keys of config.json without which no supported model can be built."""


def read_hf_config(folder: Path) -> dict[str, Any]:
    """The content of `folder`/config.json, with a positive number under each of `SIZES`.

    Raises:
        DataError: no such folder or file, not a JSON object, or a size is missing.
    """
    if not folder.is_dir():
        raise DataError(f"needs a folder in Hugging Face format, there is no folder {folder}")
    tree = _read_object(folder / "config.json")
    wrong = [key for key in SIZES if not _positive(tree.get(key))]
    if wrong:
        raise DataError(f"{folder / 'config.json'} needs a positive number under {', '.join(wrong)}")
    return tree


def weight_problems(folder: Path, model: DenseModel) -> list[str]:
    """A sentence for each way in which the safetensors of `folder` are not the weights of `model`."""
    try:
        shapes = _tensor_shapes(folder)
    except DataError as e:
        return [str(e)]
    needed = {name: spec.shape for name, spec in model.tensors("float32").items()}
    problems = []
    missing = [name for name in needed if name not in shapes]
    if missing:
        problems.append(
            f"{folder} lacks {len(missing)} of the {len(needed)} tensors of {model.architecture}, first {missing[0]}"
        )
    wrong = [name for name in needed if name in shapes and shapes[name] != needed[name]]
    if wrong:
        name = wrong[0]
        problems.append(
            f"{folder} holds {len(wrong)} tensors of another shape than config.json gives them, first {name}: "
            f"needs {needed[name]}, got {shapes[name]}"
        )
    return problems


def _tensor_shapes(folder: Path) -> Mapping[str, tuple[int, ...]]:
    index = folder / "model.safetensors.index.json"
    if index.exists():
        names = _read_object(index).get("weight_map")
        if not isinstance(names, dict):
            raise DataError(f"{index} needs a mapping under weight_map")
        files = [folder / name for name in sorted({str(file) for file in names.values()})]
    else:
        files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise DataError(f"{folder} holds no safetensors files")
    shapes: dict[str, tuple[int, ...]] = {}
    for file in files:
        try:
            with safe_open(file, framework="np") as handle:
                shapes |= {name: tuple(handle.get_slice(name).get_shape()) for name in handle.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as e:
            raise DataError(f"{file} is not readable as safetensors: {e}") from e
    return shapes


def _read_object(file: Path) -> dict[str, Any]:
    try:
        tree = json.loads(file.read_text(encoding="utf-8"))
    except OSError as e:
        raise DataError(f"{file} cannot be read: {e.strerror}") from e
    except ValueError as e:
        raise DataError(f"{file} is not valid JSON: {e}") from e
    if not isinstance(tree, dict):
        raise DataError(f"{file} needs a JSON object, got {type(tree).__name__}")
    return tree


def _positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0
