"""Unpickles the index of a checkpoint without executing code of its author.

A pickle executes what it refers to: `os.system` as readily as a data class. An index needs only the data classes of
torch.distributed.checkpoint, so this reader refuses every other name. No signature or checksum is needed for that, and
none would help: the checksums in a manifest are not signed, so anybody can write them.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import TYPE_CHECKING, override

from megarl.errors import DataError

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
