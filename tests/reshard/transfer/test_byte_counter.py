"""Collectives over a backend other than gloo: how they are started, and how they are counted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from megarl.reshard.transfer import byte_counter, torch_groups
from megarl.reshard.transfer.byte_counter import ByteCounter

RANKS = [3, 5, 6]
MEMBER = 1


class Group:
    """A process group of `RANKS`, of which this process is member 1, global rank 5."""

    def rank(self) -> int:
        return MEMBER

    def size(self) -> int:
        return len(RANKS)


class FakeNccl:
    """torch.distributed with one work per call, or per coalesced group of calls."""

    def __init__(self) -> None:
        self.events: list[str] = []

    @contextmanager
    def coalescing_manager(self, group: Group, device: Any, *, async_ops: bool) -> Iterator[Any]:
        assert async_ops
        self.events.append("begin")

        class Started:
            works = ("work",)

        yield Started
        self.events.append("end")

    def record(self, name: str) -> Any:
        def call(*_: object, async_op: bool, **__: object) -> None:
            assert async_op
            self.events.append(name)

        return call


@pytest.fixture
def nccl(monkeypatch: pytest.MonkeyPatch) -> FakeNccl:
    fake = FakeNccl()
    monkeypatch.setattr(torch_groups.distributed_c10d, "_coalescing_manager", fake.coalescing_manager)
    monkeypatch.setattr(byte_counter.dist, "get_backend", lambda _: "nccl")
    monkeypatch.setattr(byte_counter.dist, "get_rank", lambda: RANKS[MEMBER])
    monkeypatch.setattr(byte_counter.dist, "get_process_group_ranks", lambda _: RANKS)
    for name in ("all_gather_into_tensor", "broadcast"):
        monkeypatch.setattr(byte_counter.dist, name, fake.record(name))
    return fake


def test_all_gathers_are_one_call(nccl: FakeNccl) -> None:
    outs = [torch.empty(3 * n, dtype=torch.uint8) for n in (4, 10)]
    counter = ByteCounter()
    (started,) = counter.start_all_gathers([(out, out[: len(out) // 3]) for out in outs], Group())  # type: ignore[arg-type]
    assert nccl.events == ["begin", "all_gather_into_tensor", "all_gather_into_tensor", "end"]
    assert (started.work, started.peers) == ("work", (3, 6))
    assert (counter.bytes_sent, counter.bytes_received, counter.collectives) == (28, 28, 2)


def test_broadcasts_are_one_call(nccl: FakeNccl) -> None:
    counter = ByteCounter()
    tensors = [torch.empty(n, dtype=torch.uint8) for n in (4, 10, 100)]
    sources = [5, 3, 6]
    (started,) = counter.start_broadcasts(list(zip(tensors, sources, strict=True)), Group())  # type: ignore[arg-type]
    assert nccl.events == ["begin", "broadcast", "broadcast", "broadcast", "end"]
    assert (started.work, started.peers) == ("work", (3, 6))
    assert (counter.bytes_sent, counter.bytes_received, counter.collectives) == (2 * 4, 110, 3)
    assert counter.start_broadcasts([], Group()) == []  # type: ignore[arg-type]
