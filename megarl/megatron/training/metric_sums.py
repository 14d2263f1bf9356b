"""Sums, maxima and quantiles of metrics over micro-batches and ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megarl.cluster.placement.hardware import find_gpu_type
from megarl.megatron.modeling.megatron_model import MegatronModel
from megarl.megatron.modeling.router import PackRouter, find_routers
from megarl.megatron.requests import TrainRequest
from megarl.megatron.runtime import platform

if TYPE_CHECKING:
    from megarl.megatron.modeling.megatron_model import MegatronModel


PASSES = 3
"""Cost of an update in forward passes: the backward pass computes two matrix products for each one of the forward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Throughput:
    """What the throughput of one model's training steps is computed from."""

    num_gpus: int
    """GPUs that train the model."""
    peak_flops: float | None
    """Operations per second that one of them can do in the model's dtype; None if not known."""

    @classmethod
    def on_this_gpu(cls, model: MegatronModel) -> Throughput:
        """Return it for a model that all ranks train, on GPUs of the kind that this rank has."""
        gpu = find_gpu_type(torch.cuda.get_device_name()) if model.dtype == torch.bfloat16 else None
        peak = None if gpu is None else gpu.flops_per_second
        return cls(num_gpus=dist.get_world_size(), peak_flops=peak)

    def metrics(self, request: TrainRequest, seconds: float) -> dict[str, float]:
        """Return the metrics of a training step that took so long.

        Operations are those of the forward and backward passes of updates (PaLM, arXiv 2204.02311, appendix B): what
        recomputation and forward passes for log-probabilities add does not count. Tokens are those of all samples.
        """
        totals = request.totals
        assert totals is not None, "the request has not been split over replicas"
        per_gpu = 1.0 / (seconds * self.num_gpus)
        flops = per_gpu * PASSES * request.epochs * totals.forward_flops
        out = {
            "throughput/tokens_per_second_per_gpu": per_gpu * totals.num_tokens,
            "throughput/tflops_per_gpu": flops / 1e12,
        }
        if self.peak_flops is not None:
            out["throughput/mfu"] = flops / self.peak_flops
        return out


class ExpertLoad:
    """Tokens per expert and layer in the training passes of a step; padding is not counted.

    Counts stay on the device until the end of the step. A recomputed forward pass is counted once.
    """

    def __init__(self, model: MegatronModel) -> None:
        self._groups = model.groups
        self._counts_LE: Tensor | None = None
        if model.architecture.experts is not None:
            # on all pipeline stages, also those without such a layer, because they are summed over stages
            shape = model.config.num_layers, model.architecture.num_experts
            self._counts_LE = torch.zeros(shape, dtype=torch.int64, device=platform.device())
        for router in find_routers(chunk.module for chunk in model.chunks):
            router.register_forward_hook(self._count)

    def _count(self, router: PackRouter, inputs: tuple[Tensor, Tensor], output: tuple[Tensor, Tensor]) -> None:
        # the first pass of a recomputed layer and passes for log-probabilities have no gradients
        if torch.is_grad_enabled():
            assert self._counts_LE is not None
            self._counts_LE[router.layer_number - 1] += (output[1] & ~inputs[1][:, :1]).sum(0)

    def metrics(self) -> dict[str, float]:
        """Return the load of the step, over all ranks, and start the next step; empty without experts. Collective call.

        `expert_load/max_over_mean`: tokens of the busiest expert over the mean, averaged over layers;
        `..._max`: in the worst layer; `expert_load/unused`: share of experts without a token.
        """
        if self._counts_LE is None:
            return {}
        counts_LE, self._counts_LE = self._counts_LE, torch.zeros_like(self._counts_LE)
        for group in (self._groups.tp_dp_cp, self._groups.pp):
            dist.all_reduce(counts_LE, group=group)
        ratios, unused = max_over_mean(counts_LE.cpu())
        if not ratios:
            return {}
        return {
            "expert_load/max_over_mean": sum(ratios) / len(ratios),
            "expert_load/max_over_mean_max": max(ratios),
            "expert_load/unused": unused,
        }


def max_over_mean(counts_LE: Tensor) -> tuple[list[float], float]:
    """Return the largest over the mean count of each layer with tokens, and the share of experts without any there."""
    used_LE = counts_LE[counts_LE.sum(1) > 0].double()
    if not len(used_LE):
        return [], 0.0
    return (used_LE.amax(1) / used_LE.mean(1)).tolist(), float((used_LE == 0).double().mean())


def freeze_routers(model: MegatronModel) -> None:
    """Exclude the weights of routers from training; needs to precede the creation of gradient buffers."""
    for router in find_routers(chunk.module for chunk in model.chunks):
        router.weight.requires_grad_(False)


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
        """Add values inside the mask, 0 or more, to the sample whose 99 % quantile is the metric `name`."""
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
