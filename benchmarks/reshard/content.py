"""Test weights whose every element is a hash of tensor name, global index and sync, to verify what arrived."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from megarl.megatron.runtime.platform import device
from megarl.reshard.layout.layout import Box, ShardPiece, WeightLayout, extent, slices
from megarl.reshard.transfer.bucket import BoxBucket, WeightBucket, map_bucket, torch_dtype

BUCKETS_OF_A_PUSH = 2

INTEGERS = {4: torch.int32, 2: torch.int16}
"""By element size in bytes, the integer dtype used to compare bits."""


def content(tensor: str, box: Box, dtype: torch.dtype, sync: int) -> Tensor:
    """Return the elements of the box: hashes of tensor name, global index and sync; never NaN."""
    seed = zlib.crc32(tensor.encode()) + 0x9E3779B1 * (sync + 1)
    bits = torch.zeros((), dtype=INTEGERS[dtype.itemsize])
    for dim, (start, stop) in enumerate(box):
        hashed = _mix(torch.arange(start, stop, dtype=torch.int64) + seed + dim * 0x51ED2701)
        hashed &= ~(1 << 30)  # clear the highest exponent bit: neither NaN nor infinity, in float32 and in bfloat16
        bits = bits.unsqueeze(-1) ^ (hashed if dtype.itemsize == 4 else (hashed >> 16).to(torch.int16))
    return bits.view(dtype)


def _mix(x: Tensor) -> Tensor:
    for _ in range(2):
        x = ((x ^ (x >> 16)) * 0x45D9F3B) & 0xFFFFFFFF
    x ^= x >> 16
    return torch.where(x >= 1 << 31, x - (1 << 32), x).to(torch.int32)


class Shard:
    """Local tensors of one layout; also a sink for the weights that one engine rank needs."""

    def __init__(self, layout: WeightLayout, tensors: Mapping[str, Tensor] | None = None) -> None:
        self.tensors = dict(tensors) if tensors is not None else _allocate(layout)
        self._mapped: dict[tuple[int, int], Tensor] = {}
        self._pieces: dict[str, list[ShardPiece]] = {}
        for piece in layout.pieces:
            self._pieces.setdefault(piece.tensor, []).append(piece)

    def fill(self, sync: int) -> None:
        """Fill the tensors with the weights of sync `sync`."""
        for piece, box in self._boxes():
            box.copy_(content(piece.tensor, piece.box, box.dtype, sync))

    def fill_nan(self) -> None:
        """Fill the tensors with NaN."""
        for tensor in self.tensors.values():
            tensor.fill_(float("nan"))

    def mismatched_bytes(self, sync: int) -> int:
        """Return the bytes of the elements that differ, in any bit, from the weights of sync `sync`."""
        wrong = 0
        for piece, box in self._boxes():
            integer = INTEGERS[box.dtype.itemsize]
            got, want = box.cpu().view(integer), content(piece.tensor, piece.box, box.dtype, sync).view(integer)
            if not torch.equal(got, want):
                wrong += int((got != want).sum()) * box.dtype.itemsize
        return wrong

    def load_boxes(self, index: int, bucket: BoxBucket | None) -> Callable[[], None]:
        """Copy the boxes of a round, as `ShardSink.load_boxes`; blocks until done."""
        if bucket is not None:
            data = self._map(bucket)
            for slot in bucket.slots:
                flat = data[slot.offset : slot.offset + slot.num_bytes].view(torch_dtype(slot.dtype))
                self.tensors[slot.local][slices(slot.local_box)] = flat.view(extent(slot.local_box))
        return _noop

    def load(self, bucket: WeightBucket) -> Callable[[], None]:
        """Copy this layout's part of each tensor, as `WeightSink.load`; blocks until done."""
        data = self._map(bucket)
        for slot in bucket.slots:
            full = data[slot.offset : slot.offset + slot.num_bytes].view(torch_dtype(slot.dtype)).view(slot.shape)
            for piece in self._pieces.get(slot.name, ()):
                self.tensors[piece.local][slices(piece.local_box)] = full[slices(piece.box)]
        return _noop

    def _map(self, bucket: BoxBucket | WeightBucket) -> Tensor:
        """Return the bucket's bytes, from a cache: mapping a bucket costs as much as copying a good part of it."""
        stat = os.stat(bucket.path)
        if (stat.st_dev, stat.st_ino) not in self._mapped:
            if len(self._mapped) == BUCKETS_OF_A_PUSH:
                self._mapped.clear()
            self._mapped[stat.st_dev, stat.st_ino] = map_bucket(bucket)
        return self._mapped[stat.st_dev, stat.st_ino]

    def _boxes(self) -> Iterator[tuple[ShardPiece, Tensor]]:
        for pieces in self._pieces.values():
            for piece in pieces:
                yield piece, self.tensors[piece.local][slices(piece.local_box)]


def _allocate(layout: WeightLayout) -> dict[str, Tensor]:
    sizes: dict[str, list[int]] = {}
    dtypes: dict[str, torch.dtype] = {}
    for piece in layout.pieces:
        have = sizes.get(piece.local, [0] * len(piece.local_box))
        sizes[piece.local] = [max(a, stop) for a, (_, stop) in zip(have, piece.local_box, strict=True)]
        dtypes[piece.local] = torch_dtype(layout.tensors[piece.tensor].dtype)
    return {name: torch.zeros(size, dtype=dtypes[name], device=device()) for name, size in sizes.items()}


def _noop() -> None: ...
