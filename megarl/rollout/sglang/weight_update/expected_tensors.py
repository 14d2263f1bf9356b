"""The tensors of a model folder, which an engine expects from a weight sync."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from megarl.model_files.block_fp8 import VALUES_DTYPE
from megarl.model_files.model_config import read_model_config
from megarl.model_files.weight_index import derived_tensor_patterns, read_headers
from megarl.reshard.transfer.bucket import TensorSlot


@dataclass(frozen=True, slots=True)
class ExpectedTensor:
    """A tensor of the model folder."""

    shape: tuple[int, ...]
    dtype: str
    """Torch dtype name, e.g. `bfloat16`."""
    required: bool
    """The engine needs the tensor; False for tensors that it derives or ignores."""


@functools.cache
def read_expected_tensors(model_path: str) -> Mapping[str, ExpectedTensor]:
    """Return the expected tensors by Hugging Face name, from the safetensors headers of the folder.

    Raises:
        DataError: the folder has no safetensors files, or one of them or config.json cannot be read.
    """
    folder = Path(model_path)
    tensors = read_headers(folder)
    tied = bool(read_model_config(folder).get("tie_word_embeddings", False))
    without = derived_tensor_patterns(tied=tied)
    return {
        name: ExpectedTensor(t.shape, t.dtype, required=not any(fnmatchcase(name, pattern) for pattern in without))
        for name, t in tensors.items()
    }


def find_bucket_problems(
    slots: Iterable[TensorSlot], num_bytes: int, expected: Mapping[str, ExpectedTensor], dtype: str
) -> list[str]:
    """Return one message for each invalid tensor of a bucket of `num_bytes` bytes.

    Args:
        dtype: dtype of the engine; a tensor may have this dtype or that of the folder. Weights in FP8 need to be sent
            so, because their scales are.
    """
    found, seen = [], set()
    for slot in slots:
        wanted = expected.get(slot.name)
        if wanted is None:
            found.append(f"{slot.name} is no tensor of the model")
        elif slot.shape != wanted.shape:
            found.append(f"{slot.name} needs shape {list(wanted.shape)}, got {list(slot.shape)}")
        elif slot.dtype not in (allowed := _allowed_dtypes(dtype, wanted.dtype)):
            needs = " or ".join(dict.fromkeys(allowed))
            found.append(f"{slot.name} needs dtype {needs}, got {slot.dtype}")
        elif slot.name in seen:
            found.append(f"{slot.name} is contained twice")
        elif slot.offset + slot.num_bytes > num_bytes:
            found.append(
                f"{slot.name} ends at byte {slot.offset} + {slot.num_bytes} = {slot.offset + slot.num_bytes}, "
                f"the bucket at {num_bytes}"
            )
        seen.add(slot.name)
    return found


def _allowed_dtypes(of_engine: str, of_folder: str) -> tuple[str, ...]:
    return (of_folder,) if of_folder == VALUES_DTYPE else (of_engine, of_folder)
