"""Files of a Megatron checkpoint and its index; usable without ranks and without megatron-core.

    <root>/latest_checkpointed_iteration.txt    folder to load: `release` or an iteration number
    <root>/release/ or <root>/iter_0000100/     metadata.json, .metadata (the index), *.distcp (the tensors), common.pt
    <root>/hf/                                  config.json, tokenizer and other files of the model folder
    <root>/hf/passed/                           its tensors that exports repeat, such as those of a vision tower

The first two are Megatron-LM's. megarl adds the third, which conversion back to Hugging Face format needs. The index is
a pickle, which is read without executing code of its author. What is not a tensor is in common.pt, which megarl writes
and every version of megatron-core reads; megatron-core 0.19 itself writes it into a .distcp file, under the name
`COMMON_STATE` of the index.

A pickle executes what it refers to: `os.system` as readily as a data class. An index needs only the data classes of
torch.distributed.checkpoint, so every other name is refused. No signature or checksum is needed for that, and none
would help: the checksums in a manifest are not signed, so anybody can write them.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, override

from megarl.errors import DataError
from megarl.model_files.json_object import refuse_lfs_pointer

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata


INDEX_NAMES = {
    "collections": {"OrderedDict"},
    "megatron.core.dist_checkpointing.strategies.torch": {"MCoreMetadata", "MCoreSavePlan"},
    "pathlib": {"Path", "PosixPath", "PurePosixPath"},
    "pathlib._local": {"Path", "PosixPath", "PurePosixPath"},  # Python 3.13
    "torch": {"Size"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    # megatron-core stores how its ranks wrote the checkpoint
    "torch.distributed.checkpoint.planner": {"SavePlan", "TensorWriteData", "WriteItem", "WriteItemType"},
    "torch.serialization": {"_get_layout"},
}
"""Names that an index may refer to, by module, besides the dtypes of torch; creating one of them executes no code."""


class UntrustedIndexError(DataError):
    """The index refers to something that no index needs, and whose execution could do harm."""


class _IndexUnpickler(pickle.Unpickler):
    @override
    def find_class(self, module: str, name: str) -> object:
        if name in INDEX_NAMES.get(module, ()) or (module == "torch" and _is_dtype(name)):
            return super().find_class(module, name)
        raise UntrustedIndexError(f"refers to {module}.{name}, which no index of a checkpoint needs")


def read_untrusted_index(file: Path) -> Metadata:
    """Return the index in the pickle `file`.

    Raises:
        UntrustedIndexError: the pickle refers to anything but `INDEX_NAMES`; nothing of it was executed.
        OSError, EOFError, pickle.UnpicklingError, AttributeError, ValueError: the file is not an index.
    """
    from torch.distributed.checkpoint.metadata import Metadata

    with file.open("rb") as stream:
        index = _IndexUnpickler(stream).load()
    if not isinstance(index, Metadata):
        raise pickle.UnpicklingError(f"needs the class Metadata, got {type(index).__name__}")
    return index


def _is_dtype(name: str) -> bool:
    import torch

    return isinstance(torch.__dict__.get(name), torch.dtype)


TRACKER = "latest_checkpointed_iteration.txt"
RELEASE = "release"
"""Megatron-LM's name for weights that it did not train: it loads them and starts at iteration 0."""

COMPANIONS = "hf"
"""Folder of the Hugging Face files that accompany the weights: config.json, tokenizer."""


COMMON_STATE = "common_state/shard_0_1"
"""Name in the index of what is not a tensor, in checkpoints without common.pt."""


@dataclass(frozen=True, slots=True)
class IndexedTensor:
    """Shape and dtype of a full tensor in a checkpoint."""

    shape: tuple[int, ...]
    dtype: str
    """Torch dtype name, e.g. `float32`."""


def find_weights(root: Path) -> Path:
    """Return the folder in `root` that its tracker file names.

    Raises:
        DataError: `root` is not a checkpoint, or the folder does not exist.
    """
    tracker = root / TRACKER
    if not root.is_dir():
        raise DataError(f"needs the folder of a Megatron checkpoint, there is no folder {root}")
    try:
        named = tracker.read_text().strip()
    except OSError as e:
        raise DataError(f"{root} is no Megatron checkpoint: {TRACKER} cannot be read: {e.strerror}") from e
    if named != RELEASE and not named.isdecimal():
        raise DataError(f"{tracker} needs the number of an iteration or `{RELEASE}`, got {named!r}")
    folder = root / (RELEASE if named == RELEASE else f"iter_{int(named):07d}")
    if not folder.is_dir():
        raise DataError(f"{tracker} names {named}, and there is no folder {folder}")
    return folder


def read_index(folder: Path, *, trust: bool = False) -> Mapping[str, IndexedTensor]:
    """Return every tensor of a distributed checkpoint by its name.

    Args:
        trust: read any pickle, which may execute code of its author.

    Raises:
        UntrustedIndexError: the index needs `trust`.
        DataError: the index cannot be read, or a file that it names is missing or truncated.
    """
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    index = _load_index(folder, trust=trust)
    return {
        name: IndexedTensor(tuple(stored.size), str(stored.properties.dtype).removeprefix("torch."))
        for name, stored in index.state_dict_metadata.items()
        if isinstance(stored, TensorStorageMetadata)
    }


def read_common_state(folder: Path, *, trust: bool = False) -> Mapping[str, object]:
    """Return what a distributed checkpoint holds besides tensors, without executing code of its author.

    Args:
        trust: as in `read_index`.

    Raises:
        DataError: the checkpoint is incomplete, or holds objects of other classes than megatron-core's.
    """
    import megatron.core  # noqa: F401  # registers the classes that it stores as safe
    import torch

    index = _load_index(folder, trust=trust)
    file: Path = folder / "common.pt"
    try:
        if file.is_file():
            found: Mapping[str, object] = torch.load(file, map_location="cpu", weights_only=True)
            return found
        place = next(place for key, place in index.storage_data.items() if key.fqn == COMMON_STATE)
        file = folder / place.relative_path
        with file.open("rb") as stream:
            stream.seek(place.offset)
            (found,) = torch.load(io.BytesIO(stream.read(place.length)), map_location="cpu", weights_only=True)
            return found
    except (OSError, EOFError, RuntimeError, pickle.UnpicklingError) as e:
        raise DataError(f"{file} cannot be read: {e}") from e


def _load_index(folder: Path, *, trust: bool) -> Metadata:
    """Read the index of a checkpoint whose files are complete."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    for name in ("metadata.json", ".metadata"):
        if not (folder / name).is_file():
            raise DataError(f"{folder} is no distributed checkpoint of megatron-core: it has no {name}")
    for file in folder.iterdir():
        refuse_lfs_pointer(file)
    file = folder / ".metadata"
    try:
        index = FileSystemReader(folder).read_metadata() if trust else read_untrusted_index(file)
    except UntrustedIndexError as e:
        raise UntrustedIndexError(f"{file} {e}; reading it may execute code of its author") from e
    except (OSError, EOFError, pickle.UnpicklingError, ImportError, AttributeError, ValueError, TypeError) as e:
        raise DataError(f"{file} cannot be read as the index of a checkpoint: {e}") from e
    if COMMON_STATE not in index.state_dict_metadata and not (folder / "common.pt").is_file():
        raise DataError(f"{folder} is no distributed checkpoint of megatron-core: it has no common.pt")
    _require_files(folder, index.storage_data)
    return index


def _require_files(folder: Path, stored: Mapping[object, object]) -> None:
    needed: dict[str, int] = {}
    for place in stored.values():
        end = place.offset + place.length  # type: ignore[attr-defined]  # torch's _StorageInfo
        name = place.relative_path  # type: ignore[attr-defined]
        needed[name] = max(needed.get(name, 0), end)
    for name, num_bytes in sorted(needed.items()):
        file = folder / name
        if not file.is_file():
            raise DataError(f"{file} is missing: the checkpoint's index places {num_bytes} bytes in it")
        size = file.stat().st_size
        if size < num_bytes:
            raise DataError(
                f"{file} is cut short, its tensors need {num_bytes} bytes, got {size}, {num_bytes - size} less"
            )
