"""The timer of GPU work."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from megarl.megatron.runtime.cuda_timer import CudaTimer


class FakeEvent:
    """An event of a GPU whose clock is `now`, in milliseconds."""

    now = 0.0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at = FakeEvent.now

    def synchronize(self) -> None:
        assert self.at is not None

    def elapsed_time(self, other: Any) -> float:
        return float(other.at - self.at)


def test_only_time_within_blocks_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    timer = CudaTimer()
    assert timer.seconds() == 0.0
    for _ in range(2):
        with timer.measure():
            FakeEvent.now += 250.0
        FakeEvent.now += 1000.0
    assert timer.seconds() == 0.5
    with pytest.raises(ValueError, match="failed"), timer.measure():
        raise ValueError("failed")
    with timer.measure():
        FakeEvent.now += 125.0
    assert timer.seconds() == 0.625


@pytest.mark.gpu
def test_kernels_that_the_host_does_not_wait_for_count_and_idle_time_does_not() -> None:
    matrix = torch.ones(4096, 4096, device="cuda")

    def multiply(count: int) -> None:
        for _ in range(count):
            matrix @ matrix

    multiply(3)
    torch.cuda.synchronize()
    began = time.perf_counter()
    multiply(50)
    torch.cuda.synchronize()
    expected = time.perf_counter() - began
    timer = CudaTimer()
    for _ in range(2):
        with timer.measure():
            multiply(50)
        torch.cuda.synchronize()
        time.sleep(0.2)
    assert timer.seconds() == pytest.approx(2 * expected, rel=0.5)
