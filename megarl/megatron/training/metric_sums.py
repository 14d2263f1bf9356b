"""Sums and extremes over micro-batches and ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


def largest(values_n: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Each value's largest on any rank of the group, NaN above all: a maximum over ranks alone may lose it."""
    seen_2n = torch.stack([values_n.nan_to_num(-torch.inf, torch.inf, -torch.inf), values_n.isnan().to(values_n)])
    dist.all_reduce(seen_2n, dist.ReduceOp.MAX, group=group)
    return torch.where(seen_2n[1] > 0, torch.nan, seen_2n[0])


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

    def copy(self) -> MetricSums:
        """One that goes its own way from here."""
        out = MetricSums()
        out._sums, out._maxima = dict(self._sums), dict(self._maxima)
        return out

    def largest_here(self, name: str) -> float:
        """The maximum of this rank, 0 where it has seen none."""
        return float(self._maxima[name]) if name in self._maxima else 0.0

    def reduce(self, group: dist.ProcessGroup) -> dict[str, float]:
        """Name -> value over all ranks of the group; every rank must have seen the same names."""
        out: dict[str, float] = {}
        for values, combine in ((self._sums, _total), (self._maxima, largest)):
            if values:
                names = sorted(values)
                combined = combine(torch.stack([values[n] for n in names]), group)
                out.update(zip(names, combined.tolist(), strict=True))
        return out


def _total(values_n: Tensor, group: dist.ProcessGroup) -> Tensor:
    dist.all_reduce(values_n, group=group)
    return values_n
