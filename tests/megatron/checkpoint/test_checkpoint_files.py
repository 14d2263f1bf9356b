"""Parts of checkpoint files: tensors staged on the host, indices from unknown authors, and boxes of stored tensors."""

import itertools
import pickle
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

from megarl.megatron.checkpoint import background_writer
from megarl.megatron.checkpoint.background_writer import HostStaging
from megarl.megatron.checkpoint.checkpoint_files import UntrustedIndexError, read_untrusted_index
from megarl.megatron.checkpoint.shards import read_box
from tests.errors import expect_error


def next_power(num_bytes):
    return next(2**n for n in range(40) if 2**n >= num_bytes) if num_bytes else 0


@pytest.mark.parametrize("limit", [None, 0, 1000, 4095, 4096, 10_000])
@pytest.mark.parametrize("allocated", [lambda n: n, next_power], ids=["pageable", "pinned"])
def test_staged_bytes_are_those_of_the_buffers(limit, allocated, monkeypatch):
    monkeypatch.setattr(background_writer, "allocated_bytes", allocated)
    monkeypatch.setattr(background_writer, "BUFFER_BYTES", 4096)
    torch.manual_seed(0)
    tensors = [torch.randn(n) for n in (540, 10, 600, 300, 16, 1, 1000, 700, 33, 480)]
    copy = HostStaging(tensors, limit)
    copy.stage(tensors)
    assert copy.num_bytes == sum(allocated(len(buffer)) for buffer in copy.buffers)
    assert copy.num_bytes <= (limit if limit is not None else 1.7 * 4 * sum(map(len, tensors)))
    assert sorted(copy.staged + copy.not_staged) == list(range(len(tensors)))
    assert not copy.not_staged or limit is not None
    before = [tensors[number].clone() for number in copy.staged]
    for tensor in tensors:
        tensor.zero_()
    assert all(torch.equal(*pair) for pair in zip(copy.tensors, before, strict=True))


def test_staged_copies_keep_the_values_of_their_time(device):
    tensors = [torch.arange(n, dtype=torch.float32, device=device) for n in (540, 10, 1000)]
    copy = HostStaging(tensors, None)
    copy.stage(tensors)
    for tensor in tensors:
        tensor.zero_()
    for staged, tensor in zip(copy.tensors, tensors, strict=True):
        assert staged.device.type == "cpu"
        assert staged.is_pinned() == (device == "cuda")
        assert torch.equal(staged, torch.arange(len(tensor), dtype=torch.float32))


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
    with expect_error(pickle.UnpicklingError, "Metadata", "Size"):
        read_untrusted_index(file)


class CountingFile:
    """A file that counts the bytes read from it."""

    def __init__(self, file):
        self.file, self.num_bytes = file, 0
        self.seek = file.seek

    def read(self, size=-1):
        data = self.file.read(size)
        self.num_bytes += len(data)
        return data

    def readinto(self, memory):
        self.num_bytes += len(memory)
        return self.file.readinto(memory)


def store_tensor(tensor, path):
    """Write the tensor between other bytes; return its (offset, length) in the file."""
    with path.open("wb") as file:
        file.write(b"x" * 777)
        torch.save(tensor, file)
        length = file.tell() - 777
        file.write(b"y" * 333)
    return 777, length


@pytest.mark.parametrize("shape", [(), (7,), (4, 5), (2, 3, 4), (1, 3, 4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_reads_every_box_of_a_tensor(shape, dtype, tmp_path):
    tensor = torch.randn(shape).to(dtype)
    location = store_tensor(tensor, tmp_path / "file")
    ranges = [[(a, b) for a in range(n) for b in range(a + 1, n + 1)] for n in shape]
    with (tmp_path / "file").open("rb") as file:
        for box in itertools.product(*ranges):
            offset, lengths = [a for a, _ in box], [b - a for a, b in box]
            got = read_box(file, *location, dtype, shape, offset, lengths)
            assert torch.equal(got, tensor[tuple(slice(a, b) for a, b in box)])


def test_reads_only_the_needed_rows(tmp_path):
    tensor = torch.randn(4096, 64)
    location = store_tensor(tensor, tmp_path / "file")
    with (tmp_path / "file").open("rb", buffering=0) as file:
        counting = CountingFile(file)
        got = read_box(counting, *location, torch.float32, (4096, 64), (100, 0), (10, 64))
    assert torch.equal(got, tensor[100:110])
    assert counting.num_bytes < 10 * 64 * 4 + 4000


@pytest.mark.parametrize(("offset", "message"), [(0, "no tensor begins at byte"), (777, "needs ")])
def test_reading_a_missing_tensor_raises(offset, message, tmp_path):
    begin, length = store_tensor(torch.zeros(8), tmp_path / "file")
    with (tmp_path / "file").open("rb") as file, pytest.raises(ValueError, match=message):
        read_box(file, offset, length if offset else begin, torch.float32, (9,), (0,), (9,))
