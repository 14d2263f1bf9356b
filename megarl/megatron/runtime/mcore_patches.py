"""Patches for megatron-core 0.19.2 without Transformer Engine, on the CPU and on gloo; applied by `platform.prepare`.

Each function fixes one bug and names its symptom. `tests/megatron/runtime/test_mcore_patches.py` fails where
megatron-core no longer has the bug.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer import optimizer_config
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from megatron.core.tensor_parallel import mappings, random
from megatron.core.transformer.moe import token_dispatcher
from torch import Tensor
from torch.overrides import TorchFunctionMode


def patch_missing_transformer_engine() -> None:
    """Define names that megatron-core leaves undefined if Transformer Engine is missing."""
    if find_spec("transformer_engine") is not None:
        return
    # compares the version None: TypeError in the configuration of an optimizer on the CPU
    optimizer_config.is_te_min_version = _is_never_reached
    # treats fp8=False as fp8 enabled: NameError with selective recomputation
    random.CheckpointWithoutOutput.__init__.__defaults__ = (None,)


def _is_never_reached(*_: object) -> bool:
    """Answer whether a version is reached for the version of a package that is missing."""
    return False


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


def patch_optimizer_on_host() -> None:
    """Count all parameters as device tensors where Adam is to step a part of them on the host.

    megatron-core asks `is_cuda`, finds no parameters on a device, and then misses its copies: KeyError in every step.
    """
    original = HybridDeviceOptimizer._get_sub_optimizer_param_groups

    def divide(optimizer: HybridDeviceOptimizer, fraction: float) -> object:
        with _PretendDevice():
            return original(optimizer, fraction)

    HybridDeviceOptimizer._get_sub_optimizer_param_groups = divide


class _PretendDevice(TorchFunctionMode):
    """Makes `is_cuda` true of every tensor that was not made by `cpu()` or from one that was."""

    def __init__(self) -> None:
        super().__init__()
        self._on_host: list[Tensor] = []

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> Any:
        is_on_host = bool(args) and any(args[0] is tensor for tensor in self._on_host)
        if func == torch.Tensor.is_cuda.__get__:  # type: ignore[attr-defined]
            return not is_on_host
        result = args[0] if func is torch.Tensor.pin_memory else func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and (is_on_host or func is torch.Tensor.cpu):
            self._on_host.append(result)
        return result
