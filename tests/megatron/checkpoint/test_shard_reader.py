"""Reading boxes of tensors in files written by `torch.save`."""

from __future__ import annotations

import itertools

import pytest
import torch

from megarl.megatron.checkpoint.shard_reader import read_box


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
