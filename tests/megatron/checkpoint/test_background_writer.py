"""Host staging of tensors: which tensors are staged, and how much memory it takes."""

from __future__ import annotations

import pytest
import torch

from megarl.megatron.checkpoint import background_writer
from megarl.megatron.checkpoint.background_writer import HostStaging


def next_power(num_bytes):
    return next(2**n for n in range(40) if 2**n >= num_bytes) if num_bytes else 0


@pytest.mark.parametrize("limit", [None, 0, 1000, 4095, 4096, 10_000])
@pytest.mark.parametrize("allocated", [lambda n: n, next_power], ids=["pageable", "pinned"])
def test_staged_bytes_are_those_of_the_buffers(limit, allocated, monkeypatch):
    monkeypatch.setattr(background_writer, "_allocated_bytes", allocated)
    monkeypatch.setattr(background_writer, "BUFFER_BYTES", 4096)
    torch.manual_seed(0)
    tensors = [torch.randn(n) for n in (540, 10, 600, 300, 16, 1, 1000, 700, 33, 480)]
    copy = HostStaging(tensors, limit)
    copy.stage()
    assert copy.num_bytes == sum(allocated(len(buffer)) for buffer in copy._buffers)
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
    copy.stage()
    for tensor in tensors:
        tensor.zero_()
    for staged, tensor in zip(copy.tensors, tensors, strict=True):
        assert staged.device.type == "cpu"
        assert staged.is_pinned() == (device == "cuda")
        assert torch.equal(staged, torch.arange(len(tensor), dtype=torch.float32))
