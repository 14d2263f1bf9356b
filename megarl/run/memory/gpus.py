"""Memory of a GPU by its name, and what processes need of it besides their tensors."""

from __future__ import annotations

from megarl.cluster.placement.hardware import GPU_TYPES, GpuType
from megarl.errors import ConfigError

MIB, GIB = 2**20, 2**30

USABLE_FRACTION = 0.95
"""Part of a GPU's memory that is planned with. The rest is lost to fragmentation of torch's caching allocators."""

CUDA_CONTEXT_BYTES = 512 * MIB
"""CUDA context and loaded kernels of one process: 0.4 to 0.6 GB, of which AIConfigurator measured 551 MB."""

NCCL_BYTES_PER_GROUP = 656 * MIB
"""Buffers of one NCCL communicator of more than two GPUs, which allocates them with its first collective: 688 MB
(https://github.com/NVIDIA/nccl/issues/964). Smaller where NCCL_BUFFSIZE or NVLink SHARP say so."""


def gpu_type(name: str) -> GpuType:
    """Return the type of GPU `name`, such as `h100-80`.

    Raises:
        ConfigError: the name is unknown.
    """
    named = {gpu.name: gpu for gpu in GPU_TYPES if gpu.name}
    if name not in named:
        raise ConfigError(f"--gpu: needs one of {', '.join(sorted(named))}, got {name}")
    return named[name]


def gpu_memory(name: str) -> int:
    """Return the bytes of memory of GPU `name`.

    Raises:
        ConfigError: as `gpu_type`.
    """
    return gpu_type(name).mebibytes * MIB
