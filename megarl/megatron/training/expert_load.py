"""Counts the tokens that routers send to each expert, and freezes routers."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.megatron.modeling.megatron_model import MegatronModel
from megarl.megatron.modeling.router import PackRouter, find_routers
from megarl.megatron.runtime import platform


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
