"""Offloads training state from the device while engines generate, and restores it bitwise.

    optimizer    fp32 main parameters and Adam moments   copied to the host
    gradients    gradient buffers                        freed; zero when restored
    weights      parameters used in the forward pass     copied to the host
    caches       what libraries keep and make again      freed with any of the above, and even if none is enabled

Storages are resized to zero and refilled in place, so that all tensors that view them stay valid: parameters within a
parameter buffer, optimizer shards of it. megatron-core's `offload_grad_buffers` does the same for gradients. Its
`offload_to_cpu` of the optimizer does not fit: it gives parameters new storages, which separates float32 parameters
from the buffer that ranks all-gather into. Offloading parameter buffers needs the distributed optimizer there, and
neither runs without CUDA.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megarl.config.trainer import OffloadConfig
from megarl.megatron.requests import OffloadStats as OffloadStats
from megarl.megatron.runtime import platform
from megarl_kernels import clear_dummy_gradients

if TYPE_CHECKING:
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.optimizer.optimizer import MegatronOptimizer

    from megarl.megatron.modeling.megatron_model import MegatronModel

HOST_BLOCK_BYTES = 2**28
"""Size of the blocks that host memory is allocated in: torch rounds pinned allocations up to a power of two."""


class TrainerMemory:
    """Offloads and onloads one rank's weights, gradients and optimizer state."""

    def __init__(
        self, model: MegatronModel, chunks: Sequence[DistributedDataParallel], optimizer: MegatronOptimizer
    ) -> None:
        self._model, self._optimizer = model, optimizer
        self._gradients = GradientBuffers(chunks)
        self._weight_storages, self._optimizer_storages = OffloadedTensors(), OffloadedTensors()

    def offload(self, kinds: OffloadConfig) -> OffloadStats:
        """Offload the kinds of state enabled in `kinds` (resolved); no-op for state that is offloaded already.

        Also frees the caches of libraries, and returns to the device what the process has freed before: activations,
        and the buckets of the last weight sync. These are not counted.
        """
        weights = list(self._model.tensors().values())
        freed = 0
        if kinds.optimizer:
            freed += self._optimizer_storages.offload(_state_tensors(self._optimizer), exclude=weights)
        if kinds.gradients:
            freed += self._gradients.free()
        if kinds.weights:
            freed += self._weight_storages.offload(weights)
        free_library_caches(self._model)
        platform.empty_cache()
        return self._stats(freed)

    def onload(self) -> OffloadStats:
        """Bring everything back to the device."""
        taken = self._weight_storages.onload() + self._optimizer_storages.onload() + self._gradients.restore()
        return self._stats(taken)

    def onload_weights(self) -> OffloadStats:
        """Bring the weights back to the device; leaves everything else where it is."""
        return self._stats(self._weight_storages.onload())

    def _stats(self, device_bytes: int) -> OffloadStats:
        host_bytes = self._weight_storages.host_bytes + self._optimizer_storages.host_bytes
        return OffloadStats(device_bytes=device_bytes, host_bytes=host_bytes)


class FrozenMemory:
    """Offloads and onloads one rank's weights of a model that is not trained."""

    def __init__(self, model: MegatronModel) -> None:
        self._model, self._storages = model, OffloadedTensors()

    def offload(self) -> int:
        """Offload the weights; no-op if they are offloaded already. Returns their bytes; frees caches besides."""
        freed = self._storages.offload(self._model.tensors().values())
        free_library_caches(self._model)
        platform.empty_cache()
        return freed

    def onload(self) -> int:
        """Bring the weights back to the device. Returns the bytes allocated."""
        return self._storages.onload()


def free_library_caches(model: MegatronModel) -> None:
    """Free device memory that libraries keep between passes; the next pass of a model makes what it needs again.

    `docs/cluster.md` lists what is freed and what stays, with figures.
    """
    for chunk in model.chunks:
        for module in chunk.module.modules():
            # Transformer Engine's FP8 copies of the weights, which the first micro-batch of every pass computes anyway
            workspaces = getattr(module, "_fp8_workspaces", None)
            if workspaces is not None:
                workspaces.clear()
            # RoPE tables of megatron-core, of the last 32 lengths
            if hasattr(type(module).forward, "cache_clear"):
                type(module).forward.cache_clear()
    clear_dummy_gradients()
    if platform.uses_transformer_engine():
        from transformer_engine.pytorch.module import base

        base._dummy_wgrads.clear()


class OffloadedTensors:
    """Copies the storages of tensors to the host and frees them on the device. Shared storages are moved once.

    On the device, torch caches what is freed until `platform.empty_cache`.
    """

    def __init__(self, block_bytes: int = HOST_BLOCK_BYTES) -> None:
        self._block_bytes = block_bytes
        self.host_blocks: list[Tensor] = []
        self._offloaded: list[tuple[torch.UntypedStorage, int]] = []
        """Offloaded storages with their original size in bytes."""

    @property
    def host_bytes(self) -> int:
        """Host memory allocated, in bytes."""
        return sum(len(piece) for piece in self.host_blocks)

    def offload(self, tensors: Iterable[Tensor], *, exclude: Iterable[Tensor] = ()) -> int:
        """Copy the storages of `tensors` to the host and free them. Returns the bytes freed.

        No-op while an earlier call's storages are still offloaded.

        Args:
            exclude: tensors whose storages stay on the device, even if some of `tensors` share them.
        """
        if self._offloaded:
            return 0
        staying = {t.untyped_storage().data_ptr() for t in exclude}
        storages = {s.data_ptr(): s for s in (t.untyped_storage() for t in tensors if _is_on_device(t)) if s.nbytes()}
        self._offloaded = [(s, s.nbytes()) for pointer, s in storages.items() if pointer not in staying]
        freed = sum(num_bytes for _, num_bytes in self._offloaded)
        self._allocate_host(freed)
        for device, host in self._copy_pairs():
            host.copy_(device, non_blocking=True)
        _wait_for_copies()
        for storage, _ in self._offloaded:
            storage.resize_(0)
        return freed

    def onload(self) -> int:
        """Bring everything back. Returns the bytes allocated on the device."""
        for storage, num_bytes in self._offloaded:
            storage.resize_(num_bytes)
        for device, host in self._copy_pairs():
            device.copy_(host, non_blocking=True)
        _wait_for_copies()
        taken = sum(num_bytes for _, num_bytes in self._offloaded)
        self._offloaded = []
        return taken

    def _allocate_host(self, num_bytes: int) -> None:
        if self.host_bytes >= num_bytes:
            return
        self.host_blocks = []  # free the old blocks first
        sizes = (min(self._block_bytes, num_bytes - at) for at in range(0, num_bytes, self._block_bytes))
        self.host_blocks = [torch.empty(n, dtype=torch.uint8, pin_memory=platform.is_cuda()) for n in sizes]

    def _copy_pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (device bytes, host bytes) views of equal length: storages concatenated, cut at host block borders."""
        at = 0
        for storage, _ in self._offloaded:
            rest = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            while len(rest):
                host = self.host_blocks[at // self._block_bytes][at % self._block_bytes :][: len(rest)]
                yield rest[: len(host)], host
                rest, at = rest[len(host) :], at + len(host)


class GradientBuffers:
    """The DDP gradient buffers of a rank's model chunks."""

    def __init__(self, chunks: Sequence[DistributedDataParallel]) -> None:
        self._chunks = chunks

    @property
    def num_bytes(self) -> int:
        """Device memory of the buffers, in bytes."""
        buffers = (buffer for chunk in self._chunks for buffer in chunk.buffers + chunk.expert_parallel_buffers)
        return sum(buffer.grad_data.untyped_storage().nbytes() for buffer in buffers)

    def free(self) -> int:
        """Free the buffers and return the bytes freed; gradients are not saved, as each optimizer step zeroes them."""
        before = self.num_bytes
        with _no_storage_warnings():
            for chunk in self._chunks:
                chunk.offload_grad_buffers(empty_cache=False)
        return before - self.num_bytes

    def restore(self) -> int:
        """Allocate the buffers again, filled with zeros. Returns bytes allocated."""
        before = self.num_bytes
        with _no_storage_warnings():
            for chunk in self._chunks:
                chunk.restore_grad_buffers()
        return self.num_bytes - before


def _state_tensors(optimizer: MegatronOptimizer) -> Iterator[Tensor]:
    """Yield the parameters that megatron-core's `optimizer` updates, and their optimizer state (moments)."""
    for group in optimizer.param_groups:
        yield from group["params"]
    states = optimizer.state
    for key in states:
        yield from (value for value in states[key].values() if isinstance(value, Tensor))


@contextmanager
def _no_storage_warnings() -> Iterator[None]:
    # megatron-core accesses storages through an API that torch has deprecated
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="TypedStorage is deprecated")
        yield


def _is_on_device(tensor: Tensor) -> bool:
    # Adam's step counters are on the host
    return tensor.device.type == platform.device().type


def _wait_for_copies() -> None:
    if platform.is_cuda():
        torch.cuda.synchronize()
