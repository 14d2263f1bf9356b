"""What is staged on the host, and how much that takes."""

from __future__ import annotations

import pytest
import torch

from megarl.megatron.checkpoint import background_writer
from megarl.megatron.checkpoint.background_writer import HostCopy


def next_power(num_bytes):
    return next(2**n for n in range(40) if 2**n >= num_bytes) if num_bytes else 0


@pytest.mark.parametrize("limit", [None, 0, 1000, 4095, 4096, 10_000])
@pytest.mark.parametrize("taken", [lambda n: n, next_power], ids=["as asked for", "pinned"])
def test_staged_bytes_are_what_buffers_take(limit, taken, monkeypatch):
    monkeypatch.setattr(background_writer, "_taken", taken)
    monkeypatch.setattr(background_writer, "BUFFER_BYTES", 4096)
    torch.manual_seed(0)
    tensors = [torch.randn(n) for n in (540, 10, 600, 300, 16, 1, 1000, 700, 33, 480)]
    copy = HostCopy(tensors, limit)
    copy.fill()
    assert copy.num_bytes == sum(taken(len(buffer)) for buffer in copy._buffers)
    assert copy.num_bytes <= (limit if limit is not None else 1.7 * 4 * sum(map(len, tensors)))
    assert sorted(copy.copied + copy.rest) == list(range(len(tensors)))
    assert not copy.rest or limit is not None
    before = [tensors[number].clone() for number in copy.copied]
    for tensor in tensors:
        tensor.zero_()
    assert all(torch.equal(*pair) for pair in zip(copy.tensors, before, strict=True))
