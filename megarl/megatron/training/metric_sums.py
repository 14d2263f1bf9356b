"""Sums, maxima and quantiles of metrics over micro-batches and ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

QUANTILE = 0.99

BINS_PER_DECADE = 25
"""Of the histogram that quantiles are read from, which makes them exact to 10 %."""

DECADES = range(-7, 3)
"""Powers of ten between which values are distinguished."""


def all_reduce_max(values_n: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Return the maximum of each value over the group, [n]; NaN wins, which an all-reduce with MAX does not ensure."""
    seen_2n = torch.stack([values_n.nan_to_num(-torch.inf, torch.inf, -torch.inf), values_n.isnan().to(values_n)])
    dist.all_reduce(seen_2n, dist.ReduceOp.MAX, group=group)
    return torch.where(seen_2n[1] > 0, torch.nan, seen_2n[0])


def _edges(device: torch.device) -> Tensor:
    """Return the upper edges of the histogram's bins but the last, float64 [b - 1]."""
    count = (len(DECADES) - 1) * BINS_PER_DECADE + 1
    return torch.logspace(DECADES[0], DECADES[-1], count, dtype=torch.float64, device=device)


@dataclass(frozen=True, slots=True)
class DeviceMetrics:
    """Reduced metrics that are still on the device."""

    names: tuple[str, ...] = ()
    values_n: Tensor | None = None
    """float64, in the order of the names; None without metrics."""

    def __getitem__(self, name: str) -> Tensor:
        """Return the scalar of this name."""
        assert self.values_n is not None
        return self.values_n[self.names.index(name)]


def read_metrics(*metrics: DeviceMetrics) -> dict[str, float]:
    """Return the values by name of all metrics together; the host waits for the device once."""
    values = [each.values_n for each in metrics if each.values_n is not None]
    names = [name for each in metrics for name in each.names]
    return dict(zip(names, torch.cat(values).tolist() if values else [], strict=True))


class MetricSums:
    """Accumulates named metrics on the device, with one all-reduce for sums and one for maxima at the end."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._maxima: dict[str, Tensor] = {}
        self._histograms: dict[str, Tensor] = {}

    def add(self, name: str, value: Tensor) -> None:
        """Add a scalar to the sum of this name, in float64."""
        value = value.detach().double()
        self._sums[name] = self._sums[name] + value if name in self._sums else value

    def update_max(self, name: str, value: Tensor) -> None:
        """Update the maximum of this name with a scalar, in float64."""
        value = value.detach().double()
        self._maxima[name] = torch.maximum(self._maxima[name], value) if name in self._maxima else value

    def add_values(self, name: str, values_T: Tensor, mask_T: Tensor) -> None:
        """Add the values inside the mask, which are not negative, to those of which `name` is the 99 % quantile."""
        edges = _edges(values_T.device)
        counts = torch.zeros(len(edges) + 1, dtype=torch.float64, device=values_T.device)
        counts.index_add_(0, torch.bucketize(values_T.detach().double(), edges), mask_T.double())
        self._histograms[name] = self._histograms[name] + counts if name in self._histograms else counts

    def copy(self) -> MetricSums:
        """Return an independent copy."""
        out = MetricSums()
        out._sums, out._maxima, out._histograms = dict(self._sums), dict(self._maxima), dict(self._histograms)
        return out

    def reduce(self, group: dist.ProcessGroup, *, count: int = 1) -> DeviceMetrics:
        """Return each metric reduced over the group, sums divided by `count`; every rank must have the same names."""
        names, reduced = list[str](), list[Tensor]()
        for values, combine in ((self._sums, _all_reduce_sum), (self._maxima, all_reduce_max)):
            if values:
                names += sorted(values)
                reduced.append(combine(torch.stack([values[n] for n in sorted(values)]), group))
                if values is self._sums:
                    reduced[-1] /= count
        for name, counts in self._histograms.items():
            names.append(name)
            reduced.append(_quantile(_all_reduce_sum(counts.clone(), group)))
        return DeviceMetrics(tuple(names), torch.cat(reduced)) if names else DeviceMetrics()


def _all_reduce_sum(values_n: Tensor, group: dist.ProcessGroup) -> Tensor:
    dist.all_reduce(values_n, group=group)
    return values_n


def _quantile(counts: Tensor) -> Tensor:
    """Return the upper edge of the bin with the quantile, [1]: 0 without values, infinite above the last edge."""
    cumulative = counts.cumsum(0)
    total = cumulative[-1:]
    index = (cumulative < QUANTILE * total).sum(0, keepdim=True)
    edges = F.pad(_edges(counts.device), (0, 1), value=math.inf)
    return torch.where(total > 0, edges.index_select(0, index), 0.0)
