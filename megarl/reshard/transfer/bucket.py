"""A bucket of tensors in memory that trainer and engine processes of one machine share: the host's, or a GPU's.

trainer rank                          SGLang TP rank
SharedBuffer (owner) --- WeightBucket (plain data) ---> open_bucket(): views, nothing copied
SharedBuffer (owner) --- BoxBucket    (plain data) ---> map_bucket():  the bytes, of which boxes are cut
DeviceBuffer (owner) --- BoxBucket    (plain data) ---> map_bucket():  the same on the GPU that both processes use
"""

from __future__ import annotations

import base64
import hashlib
import json
import mmap
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from megarl.reshard.layout.layout import Box, TensorSpec, volume

ON_DEVICE = "cuda-ipc:"
"""How paths of device memory start; what follows is torch's handle."""

ALIGNMENT = 64
"""Tensors start at multiples of this many bytes, so that any dtype can be viewed in place."""


IPC_STORAGE = slice(6, None)
"""Of the arguments of torch's `rebuild_cuda_tensor`, those that are not known anyway: from `storage_device` on."""


@dataclass(frozen=True, slots=True)
class TensorSlot:
    """Where one tensor lies in a bucket."""

    name: str
    dtype: str
    """As torch names it: `float32`."""
    shape: tuple[int, ...]
    offset: int
    """Bytes from the start of the buffer."""

    @property
    def num_bytes(self) -> int:
        """Without the alignment behind it."""
        n = torch_dtype(self.dtype).itemsize
        for length in self.shape:
            n *= length
        return n


@dataclass(frozen=True, slots=True)
class WeightBucket:
    """What the receiver needs to find the tensors; crosses processes as plain data."""

    path: str
    """Opens the buffer, on the owner's machine and as long as the owner has not closed it."""
    num_bytes: int
    """The buffer's size."""
    slots: tuple[TensorSlot, ...]


@dataclass(frozen=True, slots=True)
class BoxSlot:
    """Where the elements of one box lie in a bucket, one after another."""

    local: str
    """The receiver's own tensor that the box belongs to."""
    local_box: Box
    """In that tensor; see `Piece`."""
    dtype: str
    """As torch names it."""
    offset: int
    """Bytes from the start of the buffer; a multiple of the element's size."""

    @property
    def num_bytes(self) -> int:
        """Of the box."""
        return volume(self.local_box) * torch_dtype(self.dtype).itemsize


@dataclass(frozen=True, slots=True)
class BoxBucket:
    """What one TP rank of an engine needs to find its boxes; crosses processes as plain data."""

    path: str
    """Opens the buffer, on the owner's machine and as long as the owner has not closed it."""
    num_bytes: int
    """The buffer's size."""
    slots: tuple[BoxSlot, ...]


def torch_dtype(name: str) -> torch.dtype:
    """`float32` -> torch.float32."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype), name
    return dtype


def dtype_name(dtype: torch.dtype) -> str:
    """torch.float32 -> `float32`."""
    return str(dtype).removeprefix("torch.")


def lay_out(tensors: Iterable[tuple[str, torch.dtype, tuple[int, ...]]]) -> tuple[tuple[TensorSlot, ...], int]:
    """Slots one after another, aligned, and the bytes they span."""
    slots, end = [], 0
    for name, dtype, shape in tensors:
        slot = TensorSlot(name, dtype_name(dtype), tuple(shape), end)
        slots.append(slot)
        end += -(-slot.num_bytes // ALIGNMENT) * ALIGNMENT
    return tuple(slots), end


def split_into_buckets(tensors: Mapping[str, TensorSpec], bucket_bytes: int) -> list[list[str]]:
    """Names of tensors that share a bucket, in the order of `tensors`; one that is larger than a bucket has its own."""
    buckets: list[list[str]] = []
    used = bucket_bytes
    for name, spec in tensors.items():
        _, size = lay_out([(name, torch_dtype(spec.dtype), spec.shape)])
        if used + size > bucket_bytes:
            buckets.append([])
            used = 0
        buckets[-1].append(name)
        used += size
    return buckets


_OWN: WeakValueDictionary[str, DeviceBuffer] = WeakValueDictionary()
"""This process's buffers by path: CUDA lets no process open a handle of its own."""


class SharedBuffer:
    """Host memory behind a nameless file: however its owner ends, nothing of it is left."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = max(num_bytes, mmap.PAGESIZE)
        self._handle: int | None = os.memfd_create("megarl-weights")
        self.path = f"/proc/{os.getpid()}/fd/{self._handle}"
        os.posix_fallocate(self._handle, 0, self.num_bytes)  # full memory is an error here, not a SIGBUS later
        self.bytes = torch.from_file(self.path, shared=True, size=self.num_bytes, dtype=torch.uint8)

    def view(self, slot: TensorSlot) -> Tensor:
        """The slot's tensor, in place."""
        return _view(self.bytes, slot)

    def describe(self, slots: Iterable[TensorSlot]) -> WeightBucket:
        """Plain data from which `open_bucket` finds the tensors."""
        return WeightBucket(self.path, self.num_bytes, tuple(slots))

    def close(self) -> None:
        """Nobody can open it from now on; processes that mapped it keep their view until they drop it."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None


class DeviceBuffer:
    """Memory of a GPU that another process on the same GPU maps (CUDA IPC), or this one."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        from torch.multiprocessing.reductions import reduce_tensor

        self.num_bytes = max(num_bytes, mmap.PAGESIZE)
        self.bytes = torch.empty(self.num_bytes, dtype=torch.uint8, device=device)
        _, handle = reduce_tensor(self.bytes)  # type: ignore[no-untyped-call]
        self.path = ON_DEVICE + json.dumps([_to_text(value) for value in handle[IPC_STORAGE]])
        _OWN[self.path] = self

    def close(self) -> None:
        """Give the memory back once the other process has dropped its view."""
        _OWN.pop(self.path, None)
        self.bytes = self.bytes[:0]
        torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]


def make_buffer(num_bytes: int, device: torch.device) -> SharedBuffer | DeviceBuffer:
    """Memory that tensors on `device` reach without leaving it."""
    return SharedBuffer(num_bytes) if device.type == "cpu" else DeviceBuffer(num_bytes, device)


def open_bucket(bucket: WeightBucket) -> dict[str, Tensor]:
    """Name -> tensor, views of the shared memory."""
    data = map_bucket(bucket)
    return {slot.name: _view(data, slot) for slot in bucket.slots}


def map_bucket(bucket: WeightBucket | BoxBucket) -> Tensor:
    """uint8 [num_bytes], the shared memory itself."""
    if bucket.path.startswith(ON_DEVICE):
        return _map_device(bucket)
    return torch.from_file(bucket.path, shared=True, size=bucket.num_bytes, dtype=torch.uint8)


def identify_memory(bucket: WeightBucket | BoxBucket) -> tuple[tuple[int | str, ...], int]:
    """What tells the bucket's memory from any other, and its size in bytes; raises OSError where it is gone."""
    if bucket.path.startswith(ON_DEVICE):
        return (bucket.path,), bucket.num_bytes
    stat = os.stat(bucket.path)
    return (stat.st_dev, stat.st_ino, bucket.num_bytes), stat.st_size


def _map_device(bucket: WeightBucket | BoxBucket) -> Tensor:
    own = _OWN.get(bucket.path)
    if own is not None:
        return own.bytes
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    kept = [_from_text(value) for value in json.loads(bucket.path.removeprefix(ON_DEVICE))]
    # processes may number GPUs differently; this is the GPU that both of them use
    kept[0] = torch.cuda.current_device()
    tensor: Tensor = rebuild_cuda_tensor(  # type: ignore[no-untyped-call]
        Tensor, (bucket.num_bytes,), (1,), 0, torch.UntypedStorage, torch.uint8, *kept
    )
    return tensor


def _to_text(value: object) -> object:
    return {"bytes": base64.b64encode(value).decode()} if isinstance(value, bytes) else value


def _from_text(value: object) -> object:
    return base64.b64decode(value["bytes"]) if isinstance(value, dict) else value


def digest(tensor: Tensor) -> bytes:
    """16 bytes that two tensors share if they are the same bit by bit, element after element."""
    flat = tensor.detach().contiguous().reshape(-1).cpu().view(torch.uint8)
    return hashlib.blake2b(flat.numpy().data, digest_size=16).digest()


def _view(data: Tensor, slot: TensorSlot) -> Tensor:
    return data[slot.offset : slot.offset + slot.num_bytes].view(torch_dtype(slot.dtype)).view(slot.shape)
