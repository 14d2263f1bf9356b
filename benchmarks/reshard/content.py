"""Weights whose every element tells tensor, global index and sync: what a rank holds, and whether it arrived."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from megarl.reshard.bucket import BoxBucket, WeightBucket, map_bucket, open_bucket, torch_dtype
from megarl.reshard.layout import Box, WeightLayout, extent, slices

INTEGERS = {4: torch.int32, 2: torch.int16}
"""By element size, the dtype in which bits are compared."""


def content(tensor: str, box: Box, dtype: torch.dtype, sync: int) -> Tensor:
    """The box's elements: a hash of the tensor's name, the global index and the sync; never NaN."""
    seed = zlib.crc32(tensor.encode()) + 0x9E3779B1 * (sync + 1)
    bits = torch.zeros((), dtype=torch.int32)
    for dim, (start, stop) in enumerate(box):
        hashed = _mix(torch.arange(start, stop, dtype=torch.int64) + seed + dim * 0x51ED2701)
        bits = bits.unsqueeze(-1) ^ hashed
    bits &= ~(1 << 30)  # the exponent's highest bit: neither NaN nor infinity, in float32 and bfloat16 alike
    return bits.view(dtype) if dtype.itemsize == 4 else (bits >> 16).to(torch.int16).view(dtype)


def _mix(x: Tensor) -> Tensor:
    for _ in range(2):
        x = ((x ^ (x >> 16)) * 0x45D9F3B) & 0xFFFFFFFF
    x ^= x >> 16
    return torch.where(x >= 1 << 31, x - (1 << 32), x).to(torch.int32)


class Shard:
    """The local tensors of one layout, in this process's memory."""

    def __init__(self, layout: WeightLayout) -> None:
        self.layout = layout
        sizes: dict[str, list[int]] = {}
        dtypes: dict[str, torch.dtype] = {}
        for piece in layout.pieces:
            have = sizes.get(piece.local, [0] * len(piece.local_box))
            sizes[piece.local] = [max(a, stop) for a, (_, stop) in zip(have, piece.local_box, strict=True)]
            dtypes[piece.local] = torch_dtype(layout.tensors[piece.tensor].dtype)
        self.tensors = {name: torch.zeros(size, dtype=dtypes[name]) for name, size in sizes.items()}

    def fill(self, sync: int) -> None:
        """What the trainer would hold after step `sync`."""
        for piece in self.layout.pieces:
            local = self.tensors[piece.local]
            local[slices(piece.local_box)] = content(piece.tensor, piece.box, local.dtype, sync)

    def poison(self) -> None:
        """NaN everywhere."""
        for tensor in self.tensors.values():
            tensor.fill_(float("nan"))

    def mismatched_bytes(self, sync: int) -> int:
        """Of elements that differ, in any bit, from what sync `sync` brought."""
        wrong = 0
        for piece in self.layout.pieces:
            local = self.tensors[piece.local]
            integer = INTEGERS[local.dtype.itemsize]
            got = local[slices(piece.local_box)].contiguous().view(integer)
            want = content(piece.tensor, piece.box, local.dtype, sync).view(integer)
            wrong += int((got != want).sum()) * local.dtype.itemsize
        return wrong

    def load_boxes(self, index: int, bucket: BoxBucket | None) -> Callable[[], None]:
        """See `BoxSink.load_boxes`."""
        if bucket is not None:
            data = map_bucket(bucket)
            for slot in bucket.slots:
                flat = data[slot.offset : slot.offset + slot.num_bytes].view(torch_dtype(slot.dtype))
                self.tensors[slot.local][slices(slot.local_box)] = flat.view(extent(slot.local_box))
        return _nothing


class WholeEngine:
    """All ranks of an engine, which take their parts of whole tensors."""

    def __init__(self, shards: Sequence[Shard]) -> None:
        self.shards = shards

    def load(self, bucket: WeightBucket) -> Callable[[], None]:
        """See `WeightSink.load`."""
        whole = open_bucket(bucket)
        for shard in self.shards:
            _take(shard, whole)
        return _nothing


def _take(shard: Shard, whole: Mapping[str, Tensor]) -> None:
    for piece in shard.layout.pieces:
        if piece.tensor in whole:
            shard.tensors[piece.local][slices(piece.local_box)] = whole[piece.tensor][slices(piece.box)]


def _nothing() -> None: ...
