"""Bitwise comparison of the trained models in two checkpoints."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as load_distributed

INDEX, COMMON = ".metadata", "common.pt"


def read_models(folder: Path) -> dict[str, Any]:
    """Return all values of the models in the checkpoint `folder` as `<model or file>/<name>` -> value.

    Weights, master weights, moments, step counts, learning rate and random states; tensors are unsharded.
    """
    found: dict[str, Any] = {}
    for index in sorted(folder.rglob(INDEX)):
        name = index.parent.relative_to(folder).as_posix()
        found |= {f"{name}/{key}": value for key, value in _read_distributed(index.parent).items()}
    for path in sorted(folder.rglob(COMMON)):
        found[path.relative_to(folder).as_posix()] = torch.load(path, weights_only=False)
    return found


def differing_values(folder: Path, other: Path) -> list[str]:
    """Return the names of the values that differ in any bit, or that only one of the checkpoints has."""
    values, others = read_models(folder), read_models(other)
    names = sorted(values.keys() | others.keys())
    return [
        name
        for name in names
        if name not in values or name not in others or not is_bitwise_equal(values[name], others[name])
    ]


def is_bitwise_equal(value: Any, other: Any) -> bool:
    """Return whether both values have the same types and bits."""
    if isinstance(value, Tensor) and isinstance(other, Tensor):
        return value.dtype == other.dtype and value.shape == other.shape and torch.equal(_bytes(value), _bytes(other))
    if isinstance(value, Mapping) and isinstance(other, Mapping):
        return list(value) == list(other) and all(is_bitwise_equal(value[key], other[key]) for key in value)
    if isinstance(value, list | tuple) and type(value) is type(other):
        return len(value) == len(other) and all(map(is_bitwise_equal, value, other))
    return type(value) is type(other) and pickle.dumps(value) == pickle.dumps(other)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _read_distributed(folder: Path) -> dict[str, Any]:
    index = FileSystemReader(folder).read_metadata()
    state: dict[str, Any] = {}
    for name, stored in index.state_dict_metadata.items():
        state[name] = None
        if isinstance(stored, TensorStorageMetadata):
            # zeros: the checkpoint need not store every element
            state[name] = torch.zeros(stored.size, dtype=stored.properties.dtype)
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        load_distributed(state, storage_reader=FileSystemReader(folder), planner=planner, no_dist=True)
    return state
