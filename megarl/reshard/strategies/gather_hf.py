r"""Whole Hugging Face tensors, gathered on the sending ranks, handed over in bounded buckets.

ranks          r0 r1 r2 r3          each packs its boxes of the bucket's tensors
\ |  | /
sender            bucket            one shared-memory buffer of two, filled box by box
|
engines          load(bucket)       while the next bucket is gathered
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.errors import WeightSyncError
from megarl.reshard.bucket import SharedBuffer, TensorSlot, lay_out, torch_dtype
from megarl.reshard.layout import Box, Piece, TensorSpec, WeightLayout, intersect, slices, volume
from megarl.reshard.strategy import Outlets, SyncContext, SyncStats


@dataclass(frozen=True, slots=True)
class BucketPlan:
    """Which tensors travel together, and who sends what of them."""

    slots: tuple[TensorSlot, ...]
    num_bytes: int
    pieces: tuple[tuple[Piece, ...], ...]
    """By rank: what it contributes, in the order in which it packs them."""


def plan_buckets(layouts: Sequence[WeightLayout], bucket_bytes: int) -> list[BucketPlan]:
    """The same list on every rank; each element of each tensor is sent by exactly one rank, the lowest that holds it.

    Raises:
        WeightSyncError: the ranks together do not hold all of a tensor.
    """
    tensors = layouts[0].tensors
    owners = _choose_owners(layouts)
    plans = []
    for names in _split_into_buckets(tensors, bucket_bytes):
        slots, num_bytes = lay_out((n, torch_dtype(tensors[n].dtype), tensors[n].shape) for n in names)
        wanted = set(names)
        pieces = tuple(tuple(p for p in of_rank if p.tensor in wanted) for of_rank in owners)
        plans.append(BucketPlan(slots, num_bytes, pieces))
    return plans


def _choose_owners(layouts: Sequence[WeightLayout]) -> list[list[Piece]]:
    taken: dict[str, list[Box]] = {}
    owners: list[list[Piece]] = []
    for layout in layouts:
        mine = []
        for piece in layout.pieces:
            boxes = taken.setdefault(piece.tensor, [])
            if piece.box in boxes:
                continue
            overlap = next((b for b in boxes if intersect(b, piece.box)), None)
            assert overlap is None, f"{piece.tensor}: boxes {overlap} and {piece.box} overlap in part"
            boxes.append(piece.box)
            mine.append(piece)
        owners.append(mine)
    for name, spec in layouts[0].tensors.items():
        held, whole = sum(map(volume, taken.get(name, []))), volume(spec.box)
        if held != whole:
            raise WeightSyncError(f"{name}: the trainer ranks hold {held} of {whole} elements")
    return owners


def _split_into_buckets(tensors: Mapping[str, TensorSpec], bucket_bytes: int) -> list[list[str]]:
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


class GatherHf:
    """The strategy `gather_hf`."""

    def __init__(self, context: SyncContext, bucket_bytes: int) -> None:
        self._rank, self._senders = context.rank, tuple(context.senders)
        self._plans = plan_buckets(context.sources, bucket_bytes)
        largest = max(plan.num_bytes for plan in self._plans)
        self._buffers = [SharedBuffer(largest) for _ in range(2)] if self._rank in self._senders else []

    def push(self, tensors: Mapping[str, Tensor], outlets: Outlets) -> SyncStats:
        """See `Strategy.push`."""
        sent = received = delivered = largest_packed = messages = 0
        pending: list[list[Callable[[], None]]] = [[], []]
        for index, plan in enumerate(self._plans):
            which = index % 2
            for wait in pending[which]:
                wait()
            mine = [tensors[p.local][slices(p.local_box)] for p in plan.pieces[self._rank]]
            for sender in self._senders:
                if sender == self._rank:
                    sizes = self._fill(plan, mine, self._buffers[which])
                    received += sum(sizes)
                    messages += len(sizes)
                    largest_packed = max(largest_packed, *sizes, 0)
                elif mine:
                    packed = torch.cat([m.reshape(-1) for m in mine])
                    dist.send(packed, sender)
                    largest_packed = max(largest_packed, packed.nbytes)
                    sent += packed.nbytes
            if self._rank in self._senders:
                bucket = self._buffers[which].describe(plan.slots)
                pending[which] = [sink.load(bucket) for sink in outlets.whole]
                delivered += sum(slot.num_bytes for slot in plan.slots) * len(outlets.whole)
        for wait in [*pending[0], *pending[1]]:
            wait()
        return SyncStats(
            bytes_sent=sent,
            bytes_received=received,
            bytes_delivered=delivered,
            buckets=len(self._plans),
            peak_extra_bytes=sum(buffer.num_bytes for buffer in self._buffers) + largest_packed,
            messages=messages,
        )

    def _fill(self, plan: BucketPlan, mine: Sequence[Tensor], buffer: SharedBuffer) -> list[int]:
        """Bytes of each message received."""
        views = {slot.name: buffer.view(slot) for slot in plan.slots}
        received = []
        for rank, pieces in enumerate(plan.pieces):
            if rank == self._rank:
                for piece, box in zip(pieces, mine, strict=True):
                    views[piece.tensor][slices(piece.box)].copy_(box)
                continue
            if not pieces:
                continue
            dtype, device = views[pieces[0].tensor].dtype, _device(mine)
            packed = torch.empty(sum(volume(p.box) for p in pieces), dtype=dtype, device=device)
            dist.recv(packed, rank)
            received.append(packed.nbytes)
            at = 0
            for piece in pieces:
                target = views[piece.tensor][slices(piece.box)]
                target.copy_(packed[at : at + target.numel()].view(target.shape))
                at += target.numel()
        return received

    def close(self) -> None:
        """Free the shared memory."""
        for buffer in self._buffers:
            buffer.close()


def _device(mine: Sequence[Tensor]) -> torch.device:
    return mine[0].device if mine else torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")
