"""What GPUs can do and hold: the one table of peak rates and memory sizes."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TypeAlias

Capability: TypeAlias = tuple[int, int]
"""CUDA compute capability, major and minor."""
HOPPER: Capability = (9, 0)
BLACKWELL: Capability = (10, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuType:
    """A type of GPU; rates are those of NVIDIA's data sheets."""

    reported: str
    """Words of the name that CUDA reports."""
    capability: Capability
    flops_per_second: float
    """Dense matrix multiplications of bfloat16."""
    bytes_per_second: float | None = None
    """Of its memory; None if not known."""
    name: str = ""
    """With its memory in GB, as `megarl check --gpu` takes it; empty if it cannot."""
    mebibytes: int = 0
    """Memory as nvidia-smi prints it: less than the GB in the product's name. 0 without a name."""


GPU_TYPES = (
    GpuType(reported="GB200", capability=(10, 0), flops_per_second=2500e12, name="gb200-185", mebibytes=189_471),
    GpuType(
        reported="B200",
        capability=(10, 0),
        flops_per_second=2250e12,
        bytes_per_second=8.0e12,
        name="b200-180",
        mebibytes=183_359,
    ),
    GpuType(reported="GH200", capability=(9, 0), flops_per_second=989e12),
    GpuType(
        reported="H200",
        capability=(9, 0),
        flops_per_second=989e12,
        bytes_per_second=4.8e12,
        name="h200-141",
        mebibytes=143_771,
    ),
    GpuType(reported="H100 PCIe", capability=(9, 0), flops_per_second=756e12, bytes_per_second=2.0e12),
    GpuType(
        reported="H100 NVL",
        capability=(9, 0),
        flops_per_second=835e12,
        bytes_per_second=3.9e12,
        name="h100-94",
        mebibytes=95_830,
    ),
    GpuType(
        reported="H100",
        capability=(9, 0),
        flops_per_second=989e12,
        bytes_per_second=3.35e12,
        name="h100-80",
        mebibytes=81_559,
    ),
    GpuType(reported="H800", capability=(9, 0), flops_per_second=989e12),
    GpuType(reported="H20", capability=(9, 0), flops_per_second=148e12, name="h20-96", mebibytes=97_871),
    GpuType(
        reported="A100-SXM4-80GB",
        capability=(8, 0),
        flops_per_second=312e12,
        bytes_per_second=2.039e12,
        name="a100-80",
        mebibytes=81_920,
    ),
    GpuType(
        reported="A100",
        capability=(8, 0),
        flops_per_second=312e12,
        bytes_per_second=1.555e12,
        name="a100-40",
        mebibytes=40_960,
    ),
    GpuType(reported="A800", capability=(8, 0), flops_per_second=312e12),
    GpuType(reported="L40S", capability=(8, 9), flops_per_second=362e12, name="l40s-48", mebibytes=46_068),
    GpuType(reported="L4", capability=(8, 9), flops_per_second=121e12),
    GpuType(reported="A40", capability=(8, 6), flops_per_second=150e12),
    GpuType(reported="A10", capability=(8, 6), flops_per_second=125e12, name="a10-24", mebibytes=23_028),
)
"""In the order in which names that CUDA reports are compared: the first whose words occur in it counts."""


def find_gpu_type(reported: str) -> GpuType | None:
    """Return the type of a GPU by the name that CUDA reports; None if it is not listed."""
    return next((gpu for gpu in GPU_TYPES if re.search(rf"\b{gpu.reported}\b", reported)), None)
