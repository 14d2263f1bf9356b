"""Buckets of tensors in host or GPU memory that processes of one node share, views of boxes in them, and weight sinks.

trainer rank                          SGLang TP rank
SharedBuffer (owner) --- WeightBucket (plain data) ---> open_bucket(): views, no copies
SharedBuffer (owner) --- BoxBucket    (plain data) ---> MappedBuckets: the bytes that the boxes are read from
DeviceBuffer (owner) --- either of them ---------------> the same, in the memory of the owner's GPU
PrivateBuffer (owner) -- either of them ---------------> the same, for a reader in the owner's process

`SyncMemory` lends them to the syncs of a rank, and keeps those in host memory from sync to sync.

A view takes a microsecond or two of Python and of torch, and a sync of a large model has 100,000 boxes per rank. So
all messages of a bucket are split off in one call, so are boxes that lie one after another, and all copies of a hop or
of a round are one call:

    bucket        | message, 16 KB | box of a, 1 KB | box of b, 1 KB | message ...        split_regions: one call
    copies                           views_like(bucket, offset, [a, b]), copy_boxes: one call each

A strategy delivers full tensors to a `WeightSink`, boxes to a `ShardSink` or directly into `Parameters`.
"""

from __future__ import annotations

import base64
import json
import math
import mmap
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, groupby, pairwise
from typing import Any, Protocol, runtime_checkable
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor
from torch._utils import _unflatten_dense_tensors

from megarl.errors import WeightSyncError
from megarl.reshard.layout.layout import Box, Ints, TensorSpec, slices, volume

ON_DEVICE = "cuda-ipc:"
"""Prefix of the path of device memory; torch's IPC handle follows."""

ALIGNMENT = 64
"""Tensors start at multiples of this many bytes, so that any dtype can be viewed in place."""

IPC_STORAGE = slice(6, None)
"""Arguments of torch's `rebuild_cuda_tensor` that the path has to carry: from `storage_device` on, which is a UUID."""
IPC_COUNTER = slice(5, 7)
"""The two of these that say where the reference count is: `ref_counter_handle` and `ref_counter_offset`."""


@dataclass(frozen=True, slots=True)
class TensorSlot:
    """Location of one tensor in a bucket."""

    name: str
    dtype: str
    """Torch's name of the dtype, such as `float32`."""
    shape: tuple[int, ...]
    offset: int
    """Bytes from the start of the buffer."""

    @property
    def num_bytes(self) -> int:
        """Size of the tensor in bytes, without alignment."""
        return math.prod(self.shape) * torch_dtype(self.dtype).itemsize


@dataclass(frozen=True, slots=True)
class BoxSlot:
    """Location of one box in a bucket; its elements are contiguous."""

    local: str
    """Name of the receiver's local tensor that the box belongs to."""
    local_box: Box
    """The box in that tensor; see `ShardPiece`."""
    dtype: str
    """Torch's name of the dtype."""
    offset: int
    """Bytes from the start of the buffer; a multiple of the element's size."""

    @property
    def num_bytes(self) -> int:
        """Size of the box in bytes."""
        return volume(self.local_box) * torch_dtype(self.dtype).itemsize


@dataclass(frozen=True, slots=True)
class Bucket[Slot]:
    """Description of a bucket, sent to the receiver as plain data."""

    path: str
    """Opens the buffer, on the owner's node and as long as the owner has not closed it."""
    num_bytes: int
    """Size of the buffer in bytes."""
    slots: tuple[Slot, ...] = ()


type WeightBucket = Bucket[TensorSlot]
"""A bucket of full tensors."""
type BoxBucket = Bucket[BoxSlot]
"""A bucket of boxes for one TP rank of an engine."""


def torch_dtype(name: str) -> torch.dtype:
    """Return the torch dtype of a name: `float32` -> torch.float32."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype), name
    return dtype


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a torch dtype: torch.float32 -> `float32`."""
    return str(dtype).removeprefix("torch.")


def lay_out(tensors: Iterable[tuple[str, torch.dtype, tuple[int, ...]]]) -> tuple[tuple[TensorSlot, ...], int]:
    """Return aligned slots, one after another, and the bytes they span."""
    slots, end = [], 0
    for name, dtype, shape in tensors:
        slot = TensorSlot(name, dtype_name(dtype), tuple(shape), end)
        slots.append(slot)
        end += -(-slot.num_bytes // ALIGNMENT) * ALIGNMENT
    return tuple(slots), end


def split_into_buckets(tensors: Mapping[str, TensorSpec], bucket_bytes: int) -> list[list[str]]:
    """Return the tensor names of each bucket, in the order of `tensors`; one larger than a bucket gets its own."""
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


_OWN: WeakValueDictionary[str, Buffer] = WeakValueDictionary()
"""Buffers that this process opens by their path itself: CUDA does not let a process open its own IPC handles."""


class PrivateBuffer:
    """Memory that nobody but this process opens."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self.num_bytes, self.path = num_bytes, f"private:{id(self)}"
        self.bytes = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        """The memory, uint8 [num_bytes]."""
        _OWN[self.path] = self

    def close(self) -> None:
        """Do nothing: the memory is freed with the last tensor in it, which a message of a failed sync may hold."""


class SharedBuffer:
    """Shared host memory in an anonymous file, which the kernel frees once no process has it open or mapped."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = max(num_bytes, mmap.PAGESIZE)
        self._handle: int | None = os.memfd_create("megarl-weights")
        self.path = f"/proc/{os.getpid()}/fd/{self._handle}"
        os.posix_fallocate(self._handle, 0, self.num_bytes)  # out of memory is an error here instead of a SIGBUS later
        self.bytes = torch.from_file(self.path, shared=True, size=self.num_bytes, dtype=torch.uint8)

    def close(self) -> None:
        """Close the file, so that it cannot be opened any more; processes that have mapped it keep their view."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None


class DeviceBuffer:
    """GPU memory that other processes on the same node map through CUDA IPC; this process may map it too.

    torch frees exported memory only while its reference count, 1 after the export and unsigned, is 0: never if no
    process maps it, or if it is mapped twice. A bucket may stay unused, and each TP rank of an engine may map it once
    per round. So the owner releases the reference itself, and readers decrement the count of a tensor that is never
    freed.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self.num_bytes = max(num_bytes, mmap.PAGESIZE)
        with _outside_expandable_segments():
            self.bytes = torch.empty(self.num_bytes, dtype=torch.uint8, device=device)
        storage = _export(self.bytes)
        release = torch.UntypedStorage._release_ipc_counter
        release(*storage[IPC_COUNTER], device=device)  # type: ignore[no-untyped-call]
        storage[IPC_COUNTER] = reader_counter(device)[0]
        # processes number GPUs differently, so that the path has the GPU's UUID instead of `storage_device`
        location = [device_uuid(device), *storage[1:]]
        self.path = ON_DEVICE + json.dumps(location, default=lambda data: {"bytes": base64.b64encode(data).decode()})
        _OWN[self.path] = self

    def close(self) -> None:
        """Free the memory, also if there are still views of it in this process; no process may read it any more."""
        if _OWN.pop(self.path, None) is not None:
            self.bytes.untyped_storage().resize_(0)


type Buffer = PrivateBuffer | SharedBuffer | DeviceBuffer
"""Memory of a bucket."""


@contextmanager
def _outside_expandable_segments() -> Iterator[None]:
    """Allocate GPU memory in plain segments, also where the environment sets `expandable_segments:True`.

    Processes map expandable segments of each other through `pidfd_getfd`, for which they need to be allowed to trace
    each other; containers and Yama's ptrace_scope forbid it.
    """
    settings = os.environ.get("PYTORCH_CUDA_ALLOC_CONF", os.environ.get("PYTORCH_ALLOC_CONF", ""))  # torch's order
    if "expandable_segments:True" not in settings.replace(" ", ""):
        yield
        return
    torch._C._accelerator_setAllocatorSettings("expandable_segments:False")
    try:
        yield
    finally:
        torch._C._accelerator_setAllocatorSettings(settings)


def _export(tensor: Tensor) -> list[Any]:
    """Return the arguments of torch's `rebuild_cuda_tensor` that are about the storage."""
    from torch.multiprocessing.reductions import reduce_tensor

    _, arguments = reduce_tensor(tensor)  # type: ignore[no-untyped-call]
    return list(arguments[IPC_STORAGE])


@cache
def reader_counter(device: torch.device) -> tuple[list[Any], Tensor]:
    """Return where the reference count is that all readers decrement, and the tensor that it belongs to."""
    token = torch.empty(1, device=device)
    return _export(token)[IPC_COUNTER], token


def device_uuid(device: torch.device) -> str:
    """Return the UUID of a GPU, which is the same in all processes of a node."""
    return str(torch.cuda.get_device_properties(device).uuid)


def make_buffer(num_bytes: int, device: torch.device) -> Buffer:
    """Return a shared buffer on `device`: host memory for the CPU, else GPU memory."""
    return SharedBuffer(num_bytes) if device.type == "cpu" else DeviceBuffer(num_bytes, device)


class SyncMemory:
    """Memory of the syncs of one rank.

    Buffers in host memory are kept from sync to sync: page faults in new ones take several times as long as the copies
    into them. Those on a GPU are freed with each sync, as other work needs the memory; torch caches it.
    """

    def __init__(self) -> None:
        self._kept: dict[str, list[Buffer]] = {}

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Lend memory to a sync, which is the block. If it fails, free all: a message or an engine may still use it."""
        kept = ""
        try:
            yield
            kept = "cpu"
        finally:
            self.close(kept)

    def take(
        self, name: str, make: Callable[[int, torch.device], Buffer], count: int, num_bytes: int, device: torch.device
    ) -> list[Buffer]:
        """Return `count` buffers of at least `num_bytes` bytes for the purpose `name` of the sync that runs.

        They are those of the sync before if they are large enough, in host memory, and shared unless `make` is
        `PrivateBuffer`. Others are freed before `make` allocates. The list is emptied when the buffers are freed.
        """
        kept = self._kept.setdefault(name, [])
        fits = len(kept) == count and device.type == "cpu" and all(buffer.num_bytes >= num_bytes for buffer in kept)
        if not fits or (make is not PrivateBuffer and isinstance(kept[0], PrivateBuffer)):
            while kept:
                kept.pop().close()
            for _ in range(count):
                kept.append(make(num_bytes, device))
        return kept

    def close(self, kept: str = "") -> None:
        """Free all buffers, except for those on devices of the type `kept`."""
        for buffers in self._kept.values():
            while buffers and buffers[-1].bytes.device.type != kept:
                buffers.pop().close()


def open_bucket(bucket: WeightBucket) -> dict[str, Tensor]:
    """Return name -> tensor, as views of the shared memory."""
    data = map_bucket(bucket)
    return {slot.name: slot_view(data, slot) for slot in bucket.slots}


def map_bucket(bucket: Bucket[Any]) -> Tensor:
    """Map the shared memory; return uint8 [num_bytes], not a copy. Raises OSError if the memory no longer exists."""
    own = _OWN.get(bucket.path)
    if own is not None:
        return own.bytes
    if bucket.path.startswith(ON_DEVICE):
        return _map_device(bucket)
    size = os.stat(bucket.path).st_size
    if size < bucket.num_bytes:  # to read past its end would be a SIGBUS
        raise WeightSyncError(f"{bucket.path} needs {bucket.num_bytes} bytes, got {size}")
    return torch.from_file(bucket.path, shared=True, size=bucket.num_bytes, dtype=torch.uint8)


class MappedBuckets(dict[tuple[int | str, ...], Tensor]):
    """Buckets of other processes, each mapped once: that costs as much as copying a good part of it."""

    def __init__(self) -> None:
        super().__init__()
        self._of_this_sync = set[tuple[int | str, ...]]()

    def map(self, bucket: Bucket[Any]) -> Tensor:
        """Return the bytes of a bucket as `map_bucket`."""
        if bucket.path in _OWN:
            return map_bucket(bucket)
        stat = None if bucket.path.startswith(ON_DEVICE) else os.stat(bucket.path)
        key = (bucket.path,) if stat is None else (stat.st_dev, stat.st_ino, bucket.num_bytes)
        if key not in self:
            self[key] = map_bucket(bucket)
        self._of_this_sync.add(key)
        return self[key]

    def end_sync(self) -> None:
        """Unmap GPU memory, which its owner frees now, and buckets that this sync did not use: they were replaced."""
        for key in [key for key in self if key not in self._of_this_sync or isinstance(key[0], str)]:
            del self[key]
        self._of_this_sync.clear()


def _map_device(bucket: Bucket[Any]) -> Tensor:
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    text = bucket.path.removeprefix(ON_DEVICE)
    uuid, *kept = json.loads(text, object_hook=lambda handle: base64.b64decode(handle["bytes"]))
    visible = [device_uuid(torch.device("cuda", i)) for i in range(torch.cuda.device_count())]
    if uuid not in visible:
        raise WeightSyncError(
            f"the weights are on GPU {uuid}, which this process does not see; it sees {', '.join(visible) or 'none'}"
        )
    tensor: Tensor = rebuild_cuda_tensor(  # type: ignore[no-untyped-call]
        Tensor, (bucket.num_bytes,), (1,), 0, torch.UntypedStorage, torch.uint8, visible.index(uuid), *kept
    )
    return tensor


def slot_view(data: Tensor, slot: TensorSlot) -> Tensor:
    """Return the slot's tensor, a view of the bytes of a bucket."""
    return data[slot.offset : slot.offset + slot.num_bytes].view(torch_dtype(slot.dtype)).view(slot.shape)


SENT_DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})
"""Dtypes that gloo and NCCL send as they are."""


def split_regions(data: Tensor, sizes: Sequence[int]) -> dict[int, Tensor]:
    """Return, by their offsets, views of consecutive bytes of `data`, which may be larger than all `sizes` together."""
    regions = data.split_with_sizes([*sizes, len(data) - sum(sizes)])
    return dict(zip(accumulate(sizes, initial=0), regions, strict=True))


def views_like(data: Tensor, offset: int, boxes: Sequence[Tensor]) -> list[Tensor]:
    """Return views of the bytes of `data` from `offset` on, one after another with the dtype and shape of each box.

    torch has no public name for the function behind it; its own data parallelism uses this one.
    """
    views: list[Tensor] = []
    for dtype, group in groupby(boxes, key=lambda box: box.dtype):
        same = list(group)
        end = offset + sum([box.nbytes for box in same])
        views += _unflatten_dense_tensors(data[offset:end].view(dtype), same)  # type: ignore[no-untyped-call]
        offset = end
    return views


def copy_boxes(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy each source into the target of the same shape and dtype.

    On GPUs, boxes with one kernel for many, if each has the strides of its target and all have the same dtype (torch's
    `_check_tensors_share_sizes_and_strides`); a single other pair would make it one kernel for each box.
    """
    groups: dict[torch.dtype | None, tuple[list[Tensor], list[Tensor]]] = {}
    for target, source in zip(targets, sources, strict=True):
        alike = target.dtype if target.stride() == source.stride() else None
        into, out_of = groups.setdefault(alike, ([], []))
        into.append(target)
        out_of.append(source)
    for into, out_of in groups.values():
        torch._foreach_copy_(into, out_of, non_blocking=True)


def view_box(tensor: Tensor, box: Box, num_bytes: int) -> Tensor:
    """Return a view of the elements of the box, of any shape if they are contiguous, else of the box's shape.

    Args:
        num_bytes: size of the box. A tensor that does not contain it raises WeightSyncError.
    """
    is_contiguous = tensor.is_contiguous()
    if is_contiguous and tensor.nbytes == num_bytes:
        return tensor
    if any(stop > size for (_, stop), size in zip(box, tensor.shape, strict=True)):
        raise WeightSyncError(f"a tensor of size {list(tensor.shape)} does not contain the box {box}")
    first = first_element(box, tensor.shape) if is_contiguous else None
    if first is None:
        return tensor[slices(box)]
    return tensor.view(-1)[first : first + num_bytes // tensor.itemsize]


def view_to_send(tensor: Tensor, box: Box, num_bytes: int) -> Tensor | None:
    """Return a contiguous view of the elements of the box, of any shape, or None if they are not contiguous.

    Its dtype is the tensor's own where gloo and NCCL can send it, which saves a view per message, else uint8. Both
    ends of a message have checked that their dtypes are equal. Arguments and errors as for `view_box`.
    """
    view = view_box(tensor, box, num_bytes)
    if view.dtype in SENT_DTYPES and view.is_contiguous():
        return view
    return contiguous_bytes(view)


def first_element(box: Box, shape: Sequence[int]) -> int | None:
    """Return the index of the box's first element in a row-major tensor, None if its elements are not contiguous."""
    first, stride, covers_all = 0, 1, True
    for (start, stop), size in zip(box[::-1], shape[::-1], strict=True):
        if not covers_all and stop - start != 1:
            return None
        first += start * stride
        stride *= size
        covers_all = covers_all and stop - start == size
    return first


def contiguous_bytes(box: Tensor) -> Tensor | None:
    """Return a uint8 view of the box, of any shape, or None if it is not contiguous."""
    if not box.is_contiguous():
        return None
    if not box.ndim or box.stride(-1) != 1:  # a contiguous dimension of size 1 may have any stride
        box = box.as_strided((box.numel(),), (1,))
    return box.view(torch.uint8)


def consecutive(offsets: Sequence[int], sizes: Sequence[int]) -> list[slice]:
    """Return the slices of regions that lie one after another."""
    begin, end = np.array(offsets, np.int64), np.add(offsets, sizes)
    first = [0, *(np.flatnonzero(begin[1:] != end[:-1]) + 1).tolist(), len(sizes)]
    return [slice(*ends) for ends in pairwise(first)] if sizes else []


def stack_boxes(boxes: Sequence[Box]) -> Box | None:
    """Return the union of boxes that are adjacent along the first dimension, or None if they are not."""
    for box, following in pairwise(boxes):
        if box[1:] != following[1:] or box[0][1] != following[0][0]:
            return None
    return ((boxes[0][0][0], boxes[-1][0][1]), *boxes[0][1:])


def no_wait() -> None:
    """Return at once: what a sink returns if the bucket may be overwritten."""


class WeightSink(Protocol):
    """A rollout engine that loads full tensors. Every call raises WeightSyncError on failure."""

    def load(self, bucket: WeightBucket) -> Callable[[], None]:
        """Start loading the bucket into the engine's parameters.

        Returns:
            A function that blocks until the engine no longer reads the bucket.
        """
        ...


class ShardSink(Protocol):
    """A destination outside of this process's parameters, to which a trainer rank delivers the boxes of its rounds."""

    def load_boxes(self, index: int, bucket: BoxBucket | None) -> Callable[[], None]:
        """Start to write the boxes of round `index`, once per round and in order.

        Args:
            bucket: the boxes, or their codes after `expect_codes`; None if the round has none.

        Returns:
            A function that blocks until the bucket may be overwritten; raises WeightSyncError on failure.
        """
        ...


@runtime_checkable
class CodeSink(ShardSink, Protocol):
    """A `ShardSink` that takes codes of changed elements, too (`megarl.reshard.transfer.element_code`)."""

    def expect_codes(self, rounds: Sequence[Ints]) -> None:
        """Expect codes in place of boxes, in the sync that begins.

        Args:
            rounds: by round, `megarl.reshard.planning.delta.CodedRound.lines`.
        """
        ...


class DiscardSink:
    """A `ShardSink` that drops the boxes: this rank takes part in the rounds for the sake of the others."""

    def expect_codes(self, rounds: Sequence[Ints]) -> None:
        """Drop the codes of the next sync, too."""

    def load_boxes(self, index: int, bucket: BoxBucket | None) -> Callable[[], None]:
        """Drop the boxes; the returned function does not wait."""
        del index, bucket
        return no_wait


@dataclass(frozen=True, slots=True)
class Parameters:
    """Parameters of a tensor-parallel engine rank that this process writes directly, without a shared bucket."""

    tensors: Mapping[str, Tensor]
    """Name in the rank's layout -> tensor, viewed with as many dimensions as its boxes have. Tensors that are received
    in full only are not among them."""
