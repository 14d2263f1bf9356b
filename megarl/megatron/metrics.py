"""Sums and extremes over micro-batches and ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


class MetricSums:
    """Adds up named quantities on the device; one all-reduce per kind at the end."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._maxima: dict[str, Tensor] = {}

    def add(self, name: str, value: Tensor) -> None:
        """Add a scalar, in float64."""
        value = value.detach().double()
        self._sums[name] = self._sums[name] + value if name in self._sums else value

    def maximum(self, name: str, value: Tensor) -> None:
        """Keep the larger of a scalar and what was seen before."""
        value = value.detach().double()
        self._maxima[name] = torch.maximum(self._maxima[name], value) if name in self._maxima else value

    def reduce(self, group: dist.ProcessGroup) -> dict[str, float]:
        """Name -> value over all ranks of the group; every rank must have seen the same names."""
        out: dict[str, float] = {}
        for values, op in ((self._sums, dist.ReduceOp.SUM), (self._maxima, dist.ReduceOp.MAX)):
            if values:
                names = sorted(values)
                stacked = torch.stack([values[n] for n in names])
                dist.all_reduce(stacked, op, group=group)
                out.update(zip(names, stacked.tolist(), strict=True))
        return out
