"""Where this rank's weights lie in Hugging Face terms, and reading them from a model folder."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from safetensors import safe_open
from torch import Tensor

from megarl.errors import DataError
from megarl.megatron.families.dense import DenseModel
from megarl.megatron.families.mapping import pieces
from megarl.reshard.bucket import dtype_name
from megarl.reshard.layout import WeightLayout, extent, slices


def local_tensors(stage: Any) -> dict[str, Tensor]:
    """megatron-core's parameters of this rank by name, layers numbered globally."""
    offset = get_transformer_layer_offset(stage.config)
    return {_global_name(name, offset): p.data for name, p in stage.named_parameters()}


def layout(
    model: DenseModel, tensors: dict[str, Tensor], groups: ProcessGroupCollection, dtype: torch.dtype
) -> WeightLayout:
    """The boxes that this rank's `tensors` hold."""
    rank, size = groups.tp.rank(), groups.tp.size()
    held = [
        piece
        for name, tensor in tensors.items()
        for piece in pieces(name, model.parameter_map(name), tuple(tensor.shape), rank=rank, size=size)
    ]
    return WeightLayout(model.tensors(dtype_name(dtype)), tuple(held))


def read_weights(path: str, layout: WeightLayout, tensors: dict[str, Tensor]) -> None:
    """Fill `tensors` from the safetensors of folder `path`, reading only what this rank holds; padding becomes 0.

    Raises:
        DataError: a tensor is missing or has another shape.
    """
    reader = _Reader(path)
    for tensor in tensors.values():
        tensor.zero_()
    for piece in layout.pieces:
        spec = layout.tensors[piece.tensor]
        source = reader.slice(piece.tensor)
        if tuple(source.get_shape()) != spec.shape:
            raise DataError(f"{path}: {piece.tensor} needs shape {spec.shape}, got {tuple(source.get_shape())}")
        box = source[slices(piece.box)]
        assert tuple(box.shape) == extent(piece.box), piece
        tensors[piece.local][slices(piece.local_box)].copy_(box)


def _global_name(name: str, offset: int) -> str:
    prefix = "decoder.layers."
    if not name.startswith(prefix):
        return name
    number, rest = name[len(prefix) :].split(".", 1)
    return f"{prefix}{int(number) + offset}.{rest}"


class _Reader:
    """Slices of tensors in a folder of safetensors files, one open handle a file."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._file_of = dict(_tensor_files(Path(path)))
        self._open: dict[str, Any] = {}

    def slice(self, tensor: str) -> Any:
        if tensor not in self._file_of:
            raise DataError(f"{self._path}: the safetensors files hold no tensor {tensor}")
        file = self._file_of[tensor]
        if file not in self._open:
            self._open[file] = safe_open(file, framework="pt")
        return self._open[file].get_slice(tensor)


def _tensor_files(folder: Path) -> Iterator[tuple[str, str]]:
    index = folder / "model.safetensors.index.json"
    if index.exists():
        for tensor, file in json.loads(index.read_text())["weight_map"].items():
            yield tensor, str(folder / file)
        return
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise DataError(f"{folder}: no safetensors files there")
    for path in files:
        with safe_open(path, framework="pt") as handle:
            for tensor in handle.keys():  # noqa: SIM118 -- not a mapping
                yield tensor, str(path)
