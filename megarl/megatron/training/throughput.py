"""Throughput of training steps on GPUs: tokens, floating-point operations and the share of what the GPUs can do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from megarl.megatron.requests import TrainRequest
from megarl.placement.gpu_types import find_gpu_type

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
