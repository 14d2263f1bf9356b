"""The timer of GPU work."""

from __future__ import annotations

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
    matrix, timer, seconds = torch.ones(4096, 4096, device="cuda"), CudaTimer(), 0.0

    def multiply() -> None:
        for _ in range(50):
            matrix @ matrix

    multiply()
    for _ in range(2):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(10**9)  # the host is ahead of the device until the end, however busy it is
        begin.record()
        with timer.measure():
            multiply()
        end.record()
        torch.cuda.synchronize()
        seconds += begin.elapsed_time(end) / 1000
    assert timer.seconds() == pytest.approx(seconds, rel=0.05)
