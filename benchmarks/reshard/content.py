"""Test weights whose every element is a hash of tensor name, global index and sync, to verify what arrived."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megarl.megatron.runtime.platform import device
from megarl.reshard.layout.layout import Box, Ints, ShardPiece, WeightLayout, extent, slices
from megarl.reshard.transfer.bucket import BoxBucket, MappedBuckets, WeightBucket, slot_view, torch_dtype
from megarl.reshard.transfer.element_code import decode_boxes

CHANGES = -2
"""Number of a sync whose hashes say which elements change."""

INTEGERS = {4: torch.int32, 2: torch.int16}
"""By element size in bytes, the integer dtype used to compare bits."""

WORDS: dict[int, type[np.unsignedinteger[Any]]] = {4: np.uint32, 2: np.uint16}
"""By element size in bytes, the integer type of the hashes."""

HALF = np.uint32(16)
"""Bits of half a word."""


def content(tensor: str, box: Box, dtype: torch.dtype, sync: int) -> Tensor:
    """Return the elements of the box: hashes of tensor name, global index and sync; never NaN."""
    kind, seed = WORDS[dtype.itemsize], zlib.crc32(tensor.encode()) + 0x9E3779B1 * (sync + 1)
    bits = np.zeros((), kind)
    for dim, (start, stop) in enumerate(box):
        first = (start + seed + dim * 0x51ED2701) & 0xFFFFFFFF
        hashed = _mix(np.arange(stop - start, dtype=np.uint32) + np.uint32(first))
        hashed &= np.uint32(~(1 << 30) & 0xFFFFFFFF)  # the highest exponent bit: no NaN in float32 and bfloat16
        bits = bits[..., None] ^ (hashed if dtype.itemsize == 4 else (hashed >> HALF).astype(kind))
    return torch.from_numpy(bits).view(dtype)


def _mix(x: NDArray[np.uint32]) -> NDArray[np.uint32]:
    for _ in range(2):
        x = (x ^ (x >> HALF)) * np.uint32(0x45D9F3B)
    return x ^ (x >> HALF)


class Shard:
    """Local tensors of one layout; also a sink for the weights that one engine rank needs."""

    def __init__(
        self,
        layout: WeightLayout,
        tensors: Mapping[str, Tensor] | None = None,
        frozen: Container[str] = (),
        changed_share: float | None = None,
    ) -> None:
        """Take or allocate the tensors.

        Args:
            frozen: with `changed_share`, tensors of the model that have the weights of sync 0 in every sync.
            changed_share: of the elements of the others, the share that differs from sync to sync, in low bits of
                the mantissa; None: all elements are others in each sync, which may be equal by chance.
        """
        self._frozen, self._changed_share = frozen, changed_share
        self.tensors = dict(tensors) if tensors is not None else _allocate(layout)
        self._mapped = MappedBuckets()
        """Of all syncs: every contender keeps its buckets, as a run does."""
        self._codes: dict[int, Ints] = {}
        """By round of the sync that begins, the codes that come in place of boxes."""
        self._pieces: dict[str, list[ShardPiece]] = {}
        for piece in layout.pieces:
            self._pieces.setdefault(piece.tensor, []).append(piece)

    def fill(self, sync: int) -> None:
        """Fill the tensors with the weights of sync `sync`."""
        for piece, box in self._boxes():
            box.copy_(self._content(piece, box.dtype, sync))

    def fill_nan(self) -> None:
        """Fill the tensors with NaN."""
        for tensor in self.tensors.values():
            tensor.fill_(float("nan"))

    def mismatched_bytes(self, sync: int) -> int:
        """Return the bytes of the elements that differ, in any bit, from the weights of sync `sync`."""
        wrong = 0
        for piece, box in self._boxes():
            integer = INTEGERS[box.dtype.itemsize]
            got, want = box.cpu().view(integer), self._content(piece, box.dtype, sync).view(integer)
            if not torch.equal(got, want):
                wrong += int((got != want).sum()) * box.dtype.itemsize
        return wrong

    def expect_codes(self, rounds: Sequence[Ints]) -> None:
        """Expect codes in the sync that begins, as `CodeSink.expect_codes`."""
        self._codes = dict(enumerate(rounds))

    def load_boxes(self, index: int, bucket: BoxBucket | None) -> Callable[[], None]:
        """Copy the boxes of a round, as `ShardSink.load_boxes`; blocks until done."""
        codes = self._codes.pop(index, None)
        if bucket is not None and codes is not None:
            boxes = [self.tensors[slot.local][slices(slot.local_box)] for slot in bucket.slots]
            decode_boxes(self._mapped.map(bucket), codes, boxes)
        elif bucket is not None:
            data = self._mapped.map(bucket)
            for slot in bucket.slots:
                flat = data[slot.offset : slot.offset + slot.num_bytes].view(torch_dtype(slot.dtype))
                self.tensors[slot.local][slices(slot.local_box)] = flat.view(extent(slot.local_box))
        return _noop

    def load(self, bucket: WeightBucket) -> Callable[[], None]:
        """Copy this layout's part of each tensor, as `WeightSink.load`; blocks until done."""
        data = self._mapped.map(bucket)
        for slot in bucket.slots:
            full = slot_view(data, slot)
            for piece in self._pieces.get(slot.name, ()):
                self.tensors[piece.local][slices(piece.local_box)] = full[slices(piece.box)]
        return _noop

    def _content(self, piece: ShardPiece, dtype: torch.dtype, sync: int) -> Tensor:
        if self._changed_share is None:
            return content(piece.tensor, piece.box, dtype, sync)
        first = content(piece.tensor, piece.box, dtype, 0)
        if piece.tensor not in self._frozen:  # the elements that change are the same ones in all syncs
            draw = content(piece.tensor, piece.box, torch.float32, CHANGES).view(torch.int32) & 0xFFFF
            first.view(INTEGERS[dtype.itemsize])[draw < self._changed_share * 2**16] ^= sync & 0x3F
        return first

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
