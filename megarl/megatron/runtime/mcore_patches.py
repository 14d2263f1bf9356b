"""Patches for megatron-core 0.16.1 without Transformer Engine, on the CPU and on gloo; applied by `platform.prepare`.

Each function fixes one bug and names its symptom.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import mappings, random
from megatron.core.transformer.moe import moe_utils, token_dispatcher
from torch import Tensor


def patch_missing_transformer_engine() -> None:
    """Define names that megatron-core leaves undefined if Transformer Engine is missing."""
    if find_spec("transformer_engine") is not None:
        return
    # the router's GEMM: NameError in every MoE layer
    moe_utils.te_general_gemm = None
    # treats fp8=False as fp8 enabled: NameError with selective recomputation
    random.CheckpointWithoutOutput.__init__.__defaults__ = (None,)


def patch_expert_token_counts() -> None:
    """Convert expert token counts to numpy on the CPU; megatron-core converts them only from CUDA."""

    def to_cpu(tensor: object, as_numpy: bool = False, record_stream: bool = False) -> object:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    token_dispatcher.maybe_move_tensor_to_cpu = to_cpu


def patch_uneven_collectives() -> None:
    """Support uneven all-gather and reduce-scatter, which expert tensor parallelism needs and gloo lacks."""
    original_gather, original_scatter = mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim

    def gather(
        x: Tensor, group: dist.ProcessGroup, sizes: Sequence[int] | None = None, use_global_buffer: bool = False
    ) -> Tensor:
        if sizes is None or group.size() == 1:
            gathered: Tensor = original_gather(x, group, sizes, use_global_buffer)
            return gathered
        sizes = [int(n) for n in sizes]
        padded = x.new_zeros(max(sizes), *x.shape[1:])
        padded[: len(x)] = x
        parts = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(parts, padded, group=group)
        return torch.cat([part[:n] for part, n in zip(parts, sizes, strict=True)])

    def reduce_scatter(
        x: Tensor, group: dist.ProcessGroup, sizes: Sequence[int] | None = None, use_global_buffer: bool = False
    ) -> Tensor:
        if sizes is None or group.size() == 1:
            part: Tensor = original_scatter(x, group, sizes, use_global_buffer)
            return part
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return torch.split(total, [int(n) for n in sizes])[group.rank()].contiguous()

    mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim = gather, reduce_scatter
