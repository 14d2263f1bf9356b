"""The least time that a GPU takes, by its peak rates of dense bfloat16 matrix multiplication and of memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megarl.cluster.placement.hardware import find_gpu_type


@dataclass(frozen=True, slots=True)
class Roofline:
    """What a GPU can do at most."""

    bytes_per_second: float
    flops_per_second: float

    def seconds(self, num_bytes: int, flops: int) -> float:
        """Return the least time to move so many bytes and compute so much."""
        return max(num_bytes / self.bytes_per_second, flops / self.flops_per_second)


def find_roofline(device: str) -> Roofline | None:
    """Return the peak rates of this process's GPU; None for a CPU or a GPU whose rates are not listed."""
    if device != "cuda":
        return None
    gpu = find_gpu_type(torch.cuda.get_device_name())
    if gpu is None or gpu.bytes_per_second is None:
        return None
    return Roofline(gpu.bytes_per_second, gpu.flops_per_second)
