"""Collectives over a backend other than gloo: how they are started, and how they are counted."""

from contextlib import contextmanager
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from megarl.reshard.transfer import byte_counter, torch_groups
from megarl.reshard.transfer.byte_counter import ByteCounter

RANKS = [3, 5, 6]
MEMBER = 1
GROUP = Mock(**{"rank.return_value": MEMBER, "size.return_value": len(RANKS)})
"""A process group of `RANKS`, of which this process is member 1, global rank 5."""


@pytest.fixture
def events(monkeypatch):
    """Return the calls of torch.distributed, which stands for NCCL: one work per coalesced group of calls."""
    found = []

    @contextmanager
    def coalescing_manager(group, device, *, async_ops):
        assert async_ops
        found.append("begin")
        yield SimpleNamespace(works=("work",))
        found.append("end")

    def record(name):
        def call(*_, async_op, **__):
            assert async_op
            found.append(name)

        return call

    monkeypatch.setattr(torch_groups.distributed_c10d, "_coalescing_manager", coalescing_manager)
    monkeypatch.setattr(byte_counter.dist, "get_backend", lambda _: "nccl")
    monkeypatch.setattr(byte_counter.dist, "get_rank", lambda: RANKS[MEMBER])
    monkeypatch.setattr(byte_counter.dist, "get_process_group_ranks", lambda _: RANKS)
    for name in ("all_gather_into_tensor", "broadcast"):
        monkeypatch.setattr(byte_counter.dist, name, record(name))
    return found


def test_all_gathers_are_one_call(events):
    outs, counter = [torch.empty(3 * n, dtype=torch.uint8) for n in (4, 10)], ByteCounter()
    (started,) = counter.start_all_gathers([(out, out[: len(out) // 3]) for out in outs], GROUP)
    assert events == ["begin", "all_gather_into_tensor", "all_gather_into_tensor", "end"]
    assert (started.work, started.peers) == ("work", (3, 6))
    assert (counter.bytes_sent, counter.bytes_received, counter.collectives) == (28, 28, 2)


def test_broadcasts_are_one_call(events):
    tensors, counter = [torch.empty(n, dtype=torch.uint8) for n in (4, 10, 100)], ByteCounter()
    (started,) = counter.start_broadcasts(list(zip(tensors, [5, 3, 6], strict=True)), GROUP)
    assert events == ["begin", "broadcast", "broadcast", "broadcast", "end"]
    assert (started.work, started.peers) == ("work", (3, 6))
    assert (counter.bytes_sent, counter.bytes_received, counter.collectives) == (2 * 4, 110, 3)
    assert counter.start_broadcasts([], GROUP) == []
