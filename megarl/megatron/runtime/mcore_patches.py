"""What megatron-core 0.16.1 gets wrong without Transformer Engine, or on gloo. `platform.prepare` applies it.

Each function answers one fault and names how it shows.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import mappings, random
from megatron.core.transformer.moe import moe_utils, token_dispatcher
from torch import Tensor


def without_transformer_engine() -> None:
    """Names that stay undefined where the import fails."""
    if find_spec("transformer_engine") is not None:
        return
    # the router's product: NameError in every mixture of experts
    moe_utils.te_general_gemm = None
    # takes fp8=False for "fp8 is wanted": NameError with selective recomputation
    random.CheckpointWithoutOutput.__init__.__defaults__ = (None,)


def on_cpu() -> None:
    """Token counts of experts are asked for as arrays, and are converted only where they are on CUDA."""

    def to_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    token_dispatcher.maybe_move_tensor_to_cpu = to_cpu


def on_gloo() -> None:
    """All-gather and reduce-scatter of gloo need equal parts; expert tensor parallelism has unequal ones."""
    even_gather, even_scatter = mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim

    def gather(
        x: Tensor, group: dist.ProcessGroup, sizes: Sequence[int] | None = None, use_global_buffer: bool = False
    ) -> Tensor:
        if sizes is None or group.size() == 1:
            whole: Tensor = even_gather(x, group, sizes, use_global_buffer)
            return whole
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
            part: Tensor = even_scatter(x, group, sizes, use_global_buffer)
            return part
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return torch.split(total, [int(n) for n in sizes])[group.rank()].contiguous()

    mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim = gather, reduce_scatter
