"""Patches for megatron-core 0.19.2, most of them for the CPU and gloo; applied by `platform.prepare`.

Each function fixes one bug and names its symptom. `tests/megatron/runtime/test_mcore_patches.py` calls megatron-core's
own functions, `__wrapped__` by the patches, and fails where one no longer has its bug.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from megatron.core.tensor_parallel import mappings, random
from megatron.core.transformer.moe import token_dispatcher
from torch import Tensor
from torch.overrides import TorchFunctionMode


def patch_recomputation() -> None:
    """Recompute without FP8 where Transformer Engine is missing: NameError with selective recomputation.

    megatron-core takes `fp8=False`, the default that nearly all its callers use, for fp8 enabled.
    """
    if find_spec("transformer_engine") is None:
        random.CheckpointWithoutOutput.__init__.__defaults__ = (None,)


def patch_routing_padding() -> None:
    """Pad a copy of the routing map: RuntimeError in the backward pass of models with experts in FP8.

    Transformer Engine's fused router keeps the map for its backward pass, and megatron-core pads it in place.
    """
    original = token_dispatcher.pad_routing_map

    @wraps(original)
    def pad(routing_map: Tensor, pad_multiple: int) -> Tensor:
        padded: Tensor = original(routing_map.clone(), pad_multiple)
        return padded

    token_dispatcher.pad_routing_map = pad


def patch_packed_rope() -> None:
    """Rotate the tokens of a pack in one operation: megatron-core rotates one sequence after the other.

    That is a fifth of a training step with packs of 64 short sequences. It rotates all at once if it gets the angles of
    every token, and takes a table of one sequence's angles for them if the pack happens to be as long as the table.
    """
    original = rope_utils._apply_rotary_pos_emb_thd

    @wraps(original)
    def rotate(tokens_thd: Tensor, cu_seqlens_S: Tensor, table_L11d: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        starts_T = cu_seqlens_S[:-1].repeat_interleave(cu_seqlens_S.diff())
        angles_T11d = table_L11d[torch.arange(len(starts_T), device=starts_T.device) - starts_T]
        rotated_thd: Tensor = original(tokens_thd, cu_seqlens_S, angles_T11d, *args, **kwargs)
        return rotated_thd

    rope_utils._apply_rotary_pos_emb_thd = rotate


def patch_expert_token_counts() -> None:
    """Convert expert token counts to numpy on the CPU; megatron-core converts them only from CUDA."""
    original = token_dispatcher.maybe_move_tensor_to_cpu

    @wraps(original)
    def to_cpu(tensor: object, as_numpy: bool = False, record_stream: bool = False) -> object:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    token_dispatcher.maybe_move_tensor_to_cpu = to_cpu


def patch_uneven_gather() -> None:
    """Support uneven all-gathers, which expert tensor parallelism needs and gloo lacks."""
    original = mappings._gather_along_first_dim

    @wraps(original)
    def gather(
        x: Tensor, group: dist.ProcessGroup, sizes: Sequence[int] | None = None, use_global_buffer: bool = False
    ) -> Tensor:
        if sizes is None or group.size() == 1:
            gathered: Tensor = original(x, group, sizes, use_global_buffer)
            return gathered
        sizes = [int(n) for n in sizes]
        padded = x.new_zeros(max(sizes), *x.shape[1:])
        padded[: len(x)] = x
        parts = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(parts, padded, group=group)
        return torch.cat([part[:n] for part, n in zip(parts, sizes, strict=True)])

    mappings._gather_along_first_dim = gather


def patch_optimizer_on_host() -> None:
    """Count all parameters as device tensors where Adam is to step a part of them on the host.

    megatron-core asks `is_cuda`, finds no parameters on a device, and then misses its copies: KeyError in every step.
    """
    original = HybridDeviceOptimizer._get_sub_optimizer_param_groups

    @wraps(original)
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
