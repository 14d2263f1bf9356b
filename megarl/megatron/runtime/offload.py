"""What training alone needs leaves the device while engines generate, and comes back bit for bit.

    optimizer    fp32 masters and Adam's moments             copied to the host
    gradients    the buffers that they are summed up in      freed; zeros when they come back
    weights      parameters as the model computes with them  copied to the host

Storages are freed and filled again under the tensors that view them: parameters that are parts of one buffer, shards of
it that the optimizer steps. megatron-core's own `offload_grad_buffers` does so for gradients. Its `offload_to_cpu` of
the optimizer gives parameters storages of their own, which parts float32 ones from the buffer that ranks gather them
in; that of parameter buffers exists with the distributed optimizer only; and neither runs without CUDA.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megarl.config.trainer import OffloadConfig
from megarl.megatron.runtime import platform

if TYPE_CHECKING:
    from megatron.core.distributed import DistributedDataParallel

    from megarl.megatron.modeling.megatron_model import ModelRank

PIECE_BYTES = 2**28
"""Host memory is taken in pieces of this size: torch rounds what it pins up to a power of two."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadStats:
    """Bytes of one call, and where they are after it."""

    device_bytes: int
    """Freed on the device by `offload`, taken again by `onload`; 0 where all was in its place already."""
    host_bytes: int
    """Held on the host. It is kept between phases: pinning memory takes longer than filling it."""

    def __add__(self, other: OffloadStats) -> OffloadStats:
        return OffloadStats(
            device_bytes=self.device_bytes + other.device_bytes, host_bytes=self.host_bytes + other.host_bytes
        )


class TrainerMemory:
    """One rank's weights, gradients and optimizer state, on the device or off it."""

    def __init__(self, rank: ModelRank, chunks: Sequence[DistributedDataParallel], optimizer: Any) -> None:
        self._rank, self._optimizer = rank, optimizer
        self._gradients = GradientBuffers(chunks)
        self._weight_bytes, self._optimizer_bytes = OffloadedTensors(), OffloadedTensors()

    def offload(self, kinds: OffloadConfig) -> OffloadStats:
        """Free the device memory of what `kinds`, resolved, names; what has left already stays away."""
        weights = list(self._rank.tensors().values())
        freed = 0
        if kinds.optimizer:
            freed += self._optimizer_bytes.offload(_state_tensors(self._optimizer), apart_from=weights)
        if kinds.gradients:
            freed += self._gradients.free()
        if kinds.weights:
            freed += self._weight_bytes.offload(weights)
        _release_cached()
        return self._stats(freed)

    def onload(self) -> OffloadStats:
        """Everything back on the device."""
        taken = self._weight_bytes.onload() + self._optimizer_bytes.onload() + self._gradients.restore()
        return self._stats(taken)

    def onload_weights(self) -> OffloadStats:
        """The weights back on the device, the rest as it is."""
        return self._stats(self._weight_bytes.onload())

    def _stats(self, device_bytes: int) -> OffloadStats:
        host_bytes = self._weight_bytes.host_bytes + self._optimizer_bytes.host_bytes
        return OffloadStats(device_bytes=device_bytes, host_bytes=host_bytes)


class OffloadedTensors:
    """Storages of tensors, each once, whose bytes are on the host while the device's are freed."""

    def __init__(self, piece_bytes: int = PIECE_BYTES) -> None:
        self._piece_bytes = piece_bytes
        self._host: list[Tensor] = []
        self._away: list[tuple[torch.UntypedStorage, int]] = []
        """With the bytes that each had."""

    @property
    def host_bytes(self) -> int:
        """Taken on the host."""
        return sum(len(piece) for piece in self._host)

    def offload(self, tensors: Iterable[Tensor], *, apart_from: Iterable[Tensor] = ()) -> int:
        """Copy the storages of `tensors` to the host and free them; bytes freed.

        Does nothing before `onload` has brought back what an earlier call took.

        Args:
            apart_from: tensors whose storages stay, whichever of `tensors` share them.
        """
        if self._away:
            return 0
        staying = {t.untyped_storage().data_ptr() for t in apart_from}
        storages = {s.data_ptr(): s for s in (t.untyped_storage() for t in tensors if _is_on_device(t)) if s.nbytes()}
        self._away = [(s, s.nbytes()) for pointer, s in storages.items() if pointer not in staying]
        freed = sum(num_bytes for _, num_bytes in self._away)
        self._require_host(freed)
        for device, host in self._parts():
            host.copy_(device, non_blocking=True)
        _wait_for_copies()
        for storage, _ in self._away:
            storage.resize_(0)
        return freed

    def onload(self) -> int:
        """Bring everything back; bytes taken on the device."""
        for storage, num_bytes in self._away:
            storage.resize_(num_bytes)
        for device, host in self._parts():
            device.copy_(host, non_blocking=True)
        _wait_for_copies()
        taken = sum(num_bytes for _, num_bytes in self._away)
        self._away = []
        return taken

    def _require_host(self, num_bytes: int) -> None:
        if self.host_bytes >= num_bytes:
            return
        self._host = []  # given back first
        sizes = (min(self._piece_bytes, num_bytes - at) for at in range(0, num_bytes, self._piece_bytes))
        self._host = [torch.empty(n, dtype=torch.uint8, pin_memory=platform.is_cuda()) for n in sizes]

    def _parts(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Bytes on the device with their place on the host: storages one after another, across the pieces."""
        at = 0
        for storage, _ in self._away:
            rest = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            while len(rest):
                host = self._host[at // self._piece_bytes][at % self._piece_bytes :][: len(rest)]
                yield rest[: len(host)], host
                rest, at = rest[len(host) :], at + len(host)


class GradientBuffers:
    """Where the gradients of a rank's chunks are summed up."""

    def __init__(self, chunks: Sequence[DistributedDataParallel]) -> None:
        self._chunks = chunks

    @property
    def num_bytes(self) -> int:
        """On the device."""
        buffers = (buffer for chunk in self._chunks for buffer in chunk.buffers + chunk.expert_parallel_buffers)
        return sum(buffer.grad_data.untyped_storage().nbytes() for buffer in buffers)

    def free(self) -> int:
        """Bytes freed: gradients are not kept, since every optimizer step starts from zero."""
        before = self.num_bytes
        with _no_storage_warnings():
            for chunk in self._chunks:
                chunk.offload_grad_buffers(empty_cache=False)
        return before - self.num_bytes

    def restore(self) -> int:
        """Bytes taken, all zero."""
        before = self.num_bytes
        with _no_storage_warnings():
            for chunk in self._chunks:
                chunk.restore_grad_buffers()
        return self.num_bytes - before


def _state_tensors(optimizer: Any) -> Iterator[Tensor]:
    """Of megatron-core's `optimizer`: what it steps, and what it remembers of each."""
    for group in optimizer.param_groups:
        yield from group["params"]
    states = optimizer.state
    for key in states:
        yield from (value for value in states[key].values() if isinstance(value, Tensor))


@contextmanager
def _no_storage_warnings() -> Iterator[None]:
    # megatron-core asks for storages in a way that torch has deprecated
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="TypedStorage is deprecated")
        yield


def _is_on_device(tensor: Tensor) -> bool:
    # Adam counts its steps on the host
    return tensor.device.type == platform.device().type


def _wait_for_copies() -> None:
    if platform.is_cuda():
        torch.cuda.synchronize()


def _release_cached() -> None:
    # torch keeps what is freed; the engines are other processes
    if platform.is_cuda():
        torch.cuda.empty_cache()
