"""Sums and maxima of metrics over micro-batches and ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


def all_reduce_max(values_n: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Return the maximum of each value over the group, [n]; NaN wins, which an all-reduce with MAX does not ensure."""
    seen_2n = torch.stack([values_n.nan_to_num(-torch.inf, torch.inf, -torch.inf), values_n.isnan().to(values_n)])
    dist.all_reduce(seen_2n, dist.ReduceOp.MAX, group=group)
    return torch.where(seen_2n[1] > 0, torch.nan, seen_2n[0])


class MetricSums:
    """Accumulates named scalars on the device, with one all-reduce for sums and one for maxima at the end."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._maxima: dict[str, Tensor] = {}

    def add(self, name: str, value: Tensor) -> None:
        """Add a scalar to the sum of this name, in float64."""
        value = value.detach().double()
        self._sums[name] = self._sums[name] + value if name in self._sums else value

    def update_max(self, name: str, value: Tensor) -> None:
        """Update the maximum of this name with a scalar, in float64."""
        value = value.detach().double()
        self._maxima[name] = torch.maximum(self._maxima[name], value) if name in self._maxima else value

    def copy(self) -> MetricSums:
        """Return an independent copy."""
        out = MetricSums()
        out._sums, out._maxima = dict(self._sums), dict(self._maxima)
        return out

    def local_max(self, name: str) -> float:
        """Return this rank's maximum, or 0 if it has none of this name."""
        return float(self._maxima[name]) if name in self._maxima else 0.0

    def reduce(self, group: dist.ProcessGroup) -> dict[str, float]:
        """Return each metric reduced over the group; every rank must have the same names."""
        out: dict[str, float] = {}
        for values, combine in ((self._sums, _all_reduce_sum), (self._maxima, all_reduce_max)):
            if values:
                names = sorted(values)
                combined = combine(torch.stack([values[n] for n in names]), group)
                out.update(zip(names, combined.tolist(), strict=True))
        return out


def _all_reduce_sum(values_n: Tensor, group: dist.ProcessGroup) -> Tensor:
    dist.all_reduce(values_n, group=group)
    return values_n
