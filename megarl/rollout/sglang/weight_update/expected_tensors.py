"""Which tensors a model folder holds: the engine's own idea of what a weight sync must bring."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from megarl.model_files.json_object import read_json_object
from megarl.model_files.weight_index import derived_tensors, read_headers
from megarl.reshard.transfer.bucket import TensorSlot


@dataclass(frozen=True, slots=True)
class ManifestEntry:
    """One tensor of the folder."""

    shape: tuple[int, ...]
    dtype: str
    """As torch names it."""
    required: bool
    """False where the engine does without."""


@functools.cache
def read_manifest(model_path: str) -> Mapping[str, ManifestEntry]:
    """Hugging Face name -> entry, from the headers of the folder's safetensors files (no data is read).

    Raises:
        DataError: the folder has no safetensors files, or one of them or config.json is not readable.
    """
    folder = Path(model_path)
    tensors = read_headers(folder)
    tied = bool(read_json_object(folder / "config.json").get("tie_word_embeddings", False))
    without = derived_tensors(tied=tied)
    return {
        name: ManifestEntry(t.shape, t.dtype, required=not any(fnmatchcase(name, pattern) for pattern in without))
        for name, t in tensors.items()
    }


def problems(
    slots: Iterable[TensorSlot], num_bytes: int, manifest: Mapping[str, ManifestEntry], dtype: str
) -> list[str]:
    """What is wrong with a bucket of `num_bytes` bytes, one sentence per tensor; empty where all is well.

    Args:
        dtype: the engine's; a tensor may come in it or in the folder's own.
    """
    found, seen = [], set()
    for slot in slots:
        entry = manifest.get(slot.name)
        if entry is None:
            found.append(f"{slot.name} is no tensor of the model")
        elif slot.shape != entry.shape:
            found.append(f"{slot.name} needs shape {list(entry.shape)}, got {list(slot.shape)}")
        elif slot.dtype not in (dtype, entry.dtype):
            needs = " or ".join(dict.fromkeys((dtype, entry.dtype)))
            found.append(f"{slot.name} needs dtype {needs}, got {slot.dtype}")
        elif slot.name in seen:
            found.append(f"{slot.name} comes twice")
        elif slot.offset + slot.num_bytes > num_bytes:
            found.append(
                f"{slot.name} ends at byte {slot.offset} + {slot.num_bytes} = {slot.offset + slot.num_bytes}, "
                f"the bucket at {num_bytes}"
            )
        seen.add(slot.name)
    return found
