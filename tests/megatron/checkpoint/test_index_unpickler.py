"""Tests of the reader of indices from unknown authors."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

from megarl.megatron.checkpoint.index_unpickler import UntrustedIndexError, read_untrusted_index


def test_index_of_torch_is_read_completely(tmp_path: Path) -> None:
    dtypes = (torch.float32, torch.bfloat16, torch.int64, torch.float8_e4m3fn, torch.uint8)
    state = {"tensors": {str(dtype): torch.ones(2, 3).to(dtype) for dtype in dtypes}, "text": "a", "list": [1, {}]}
    save(state, storage_writer=FileSystemWriter(tmp_path), no_dist=True)
    file = tmp_path / ".metadata"
    assert read_untrusted_index(file) == pickle.loads(file.read_bytes())


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("os", "system"),
        ("builtins", "eval"),
        ("torch", "load"),
        ("torch", "serialization.os.system"),
        ("torch.serialization", "load"),
        ("torch.distributed.checkpoint.metadata", "torch.load"),
        ("pathlib", "os.system"),
    ],
)
def test_any_other_name_is_refused(module: str, name: str, tmp_path: Path) -> None:
    file = tmp_path / ".metadata"
    # protocol 4: two strings and STACK_GLOBAL, whose name may be dotted
    words = b"".join(b"\x8c" + bytes([len(word)]) + word.encode() for word in (module, name))
    file.write_bytes(b"\x80\x04" + words + b"\x93.")
    with pytest.raises(UntrustedIndexError, match=rf"^refers to {module}\.{name}, which no index"):
        read_untrusted_index(file)


def test_pickle_of_something_else_is_no_index(tmp_path: Path) -> None:
    file = tmp_path / ".metadata"
    file.write_bytes(pickle.dumps(torch.Size([1])))
    with pytest.raises(pickle.UnpicklingError, match="needs the class Metadata, got Size"):
        read_untrusted_index(file)
