"""Measures how long the GPU works on a block of code, without making the host wait for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class CudaTimer:
    """Total time between the beginning and the end of blocks on the current CUDA stream.

    The events of a block cost a few microseconds; the host waits for the GPU only when the total is read. Kernels of
    other streams do not count, unless the current stream waits for them within a block.
    """

    def __init__(self) -> None:
        self._seconds = 0.0
        self._pending: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def measure(self) -> Iterator[None]:
        """Add the block to the total; a block that raises is not added."""
        begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        begin.record()
        yield
        end.record()
        self._pending.append((begin, end))

    def seconds(self) -> float:
        """Return the total so far, once the GPU has finished the blocks."""
        for begin, end in self._pending:
            end.synchronize()
            self._seconds += begin.elapsed_time(end) / 1000
        self._pending.clear()
        return self._seconds
