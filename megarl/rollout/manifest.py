"""Which tensors a model folder holds: the engine's own idea of what a weight sync must bring."""

from __future__ import annotations

import functools
import json
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl.errors import DataError
from megarl.reshard.bucket import TensorSlot

SAFETENSORS_DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}


@dataclass(frozen=True, slots=True)
class ManifestEntry:
    """One tensor of the folder."""

    shape: tuple[int, ...]
    dtype: str
    """As torch names it."""
    required: bool
    """False where the engine derives the tensor itself."""


@functools.cache
def read_manifest(model_path: str) -> Mapping[str, ManifestEntry]:
    """Hugging Face name -> entry, from the headers of the folder's safetensors files (no data is read).

    Raises:
        DataError: the folder has no safetensors files, or one has no readable header.
    """
    folder = Path(model_path)
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise DataError(f"{folder}: a model folder needs *.safetensors, got none")
    tied = _ties_embeddings(folder)
    entries = {}
    for file in files:
        for name, info in _header(file).items():
            derived = name.endswith("rotary_emb.inv_freq") or (tied and name == "lm_head.weight")
            dtype = SAFETENSORS_DTYPES.get(info["dtype"], info["dtype"])
            entries[name] = ManifestEntry(tuple(info["shape"]), dtype, required=not derived)
    return entries


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


def _header(file: Path) -> dict[str, Any]:
    """Tensor name -> {dtype, shape, data_offsets}; the format opens with the JSON's length as a little-endian u64."""
    try:
        with file.open("rb") as f:
            (length,) = struct.unpack("<Q", f.read(8))
            header = json.loads(f.read(length))
    except (OSError, struct.error, ValueError) as e:
        raise DataError(f"{file}: no readable safetensors header: {e}") from e
    header.pop("__metadata__", None)
    assert isinstance(header, dict)
    return header


def _ties_embeddings(folder: Path) -> bool:
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as e:
        raise DataError(f"{folder / 'config.json'}: cannot be read: {e}") from e
    return bool(config.get("tie_word_embeddings", False))
