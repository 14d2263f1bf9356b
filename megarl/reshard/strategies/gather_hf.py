"""`gather_hf`: whole Hugging Face tensors on every rank of a training replica, as verl and slime move weights.

    stage 0, which holds tensor a    r0 [a0 a1] <--- all-gather ---> r1 [a0 a1]
                                          |                               |
                                      broadcast                       broadcast
                                          v                               v
    stage 1, which does not          r2 [a0 a1]                      r3 [a0 a1]

Tensor by tensor. Where the parts of a tensor differ in size, all travel padded to the largest; what every rank of a
stage holds needs no gather. Routed experts travel likewise, in cells of their own. A rank that delivers copies each
tensor into one of two buckets, which an engine reads while the other is filled. Copies of the model that no delivering
rank is part of stay idle.

Peak extra memory: two buckets and one tensor, with its padding, whatever the model. Bytes into a rank: (tp - 1) / tp of
what its own stage holds, where parts are equal, and all of what the other stages hold.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.errors import WeightSyncError
from megarl.reshard.layout.layout import Box, Piece, TensorSpec, WeightLayout, intersect, slices, volume
from megarl.reshard.layout.micro_dp import Cells
from megarl.reshard.planning.strategy import Outlets, SyncContext, SyncStats
from megarl.reshard.transfer.bucket import SharedBuffer, TensorSlot, lay_out, split_into_buckets, torch_dtype
from megarl.reshard.transfer.byte_counter import Ledger
from megarl.reshard.transfer.process_groups import free_group, make_group

Layouts = Sequence[Sequence[WeightLayout]]
"""[cell][rank] of one copy."""


@dataclass(frozen=True, slots=True)
class TensorGather:
    """How one tensor gets to all ranks that hold a copy of the model."""

    slot: TensorSlot
    """In the bucket."""
    kind: int
    """Which of `SyncContext.copies`."""
    cell: int
    """Of the copy, the one that holds the tensor."""
    parts: tuple[tuple[Piece, ...], ...]
    """By rank of the cell, what it packs, in that order."""
    is_gathered: bool
    """False: each of `parts` is the whole tensor."""
    part_bytes: int
    """Of the largest part, to which the others are padded."""

    @property
    def num_bytes(self) -> int:
        """Of the packed tensor, padding included."""
        return self.part_bytes * (len(self.parts) if self.is_gathered else 1)


@dataclass(frozen=True, slots=True)
class BucketPlan:
    """Which tensors are handed over together."""

    gathers: tuple[TensorGather, ...]
    num_bytes: int

    @property
    def slots(self) -> tuple[TensorSlot, ...]:
        """Of all tensors."""
        return tuple(gather.slot for gather in self.gathers)


def plan_replica(
    rank: int, context: SyncContext, bucket_bytes: int, only: Sequence[str] | None = None
) -> list[BucketPlan]:
    """The plan of the copies that `rank` is part of, of all tensors or `only` some; raises as `plan_buckets` does."""
    held = []
    for copies in context.copies:
        mine = copy_of(rank, copies)
        # tensors that are dealt otherwise show in other copies, and only there
        others = [cells for cells in copies if cells != mine] if len(context.copies) > 1 else []
        held.append([_layouts(cells, context.sources) for cells in (mine, *others)])
    return plan_buckets([_distinct(copies) for copies in held], bucket_bytes, only)


def _layouts(cells: Cells, sources: Sequence[WeightLayout]) -> Layouts:
    return [[sources[rank] for rank in cell] for cell in cells]


def _distinct(copies: Sequence[Layouts]) -> list[Layouts]:
    return list({tuple(id(layout) for cell in cells for layout in cell): cells for cells in copies}.values())


def copy_of(rank: int, copies: Sequence[Cells]) -> Cells:
    """The copy that `rank` is part of."""
    return next(cells for cells in copies if any(rank in cell for cell in cells))


def plan_buckets(
    held: Sequence[Sequence[Layouts]], bucket_bytes: int, only: Sequence[str] | None = None
) -> list[BucketPlan]:
    """The same plan on all ranks of the copies.

    Args:
        held: [kind] -> copies, first the one that is planned for; of the others, those that differ. See
            `replica_cells`.
        bucket_bytes: a tensor larger than this travels in a bucket of its own.
        only: tensors to plan for. None: all.

    Raises:
        WeightSyncError: no cell holds all of a tensor, or the model has none of a name in `only`.
    """
    layouts = {id(layout): layout for copies in held for cells in copies for cell in cells for layout in cell}
    by_tensor = {key: _by_tensor(layout) for key, layout in layouts.items()}
    pieces = [[[[by_tensor[id(layout)] for layout in cell] for cell in cells] for cells in copies] for copies in held]
    tensors = _choose(next(iter(layouts.values())).tensors, only)
    holders: dict[str, list[tuple[int, int]]] = {}
    for kind, copies in enumerate(pieces):
        for number, cell in enumerate(copies[0]):
            for name in dict.fromkeys(name for of_rank in cell for name in of_rank):
                holders.setdefault(name, []).append((kind, number))
    plans = []
    for names in split_into_buckets(tensors, bucket_bytes):
        slots, num_bytes = lay_out((n, torch_dtype(tensors[n].dtype), tensors[n].shape) for n in names)
        gathers = (_plan_gather(slot, tensors[slot.name], pieces, holders.get(slot.name, ())) for slot in slots)
        plans.append(BucketPlan(tuple(gathers), num_bytes))
    return plans


def _choose(tensors: Mapping[str, TensorSpec], only: Sequence[str] | None) -> Mapping[str, TensorSpec]:
    """In the model's order."""
    if only is None:
        return tensors
    for name in only:
        if name not in tensors:
            raise WeightSyncError(f"{name}: the engine takes it whole, and the trainer's model has no such tensor")
    chosen = set(only)
    return {name: spec for name, spec in tensors.items() if name in chosen}


def _by_tensor(layout: WeightLayout) -> dict[str, list[Piece]]:
    out: dict[str, list[Piece]] = {}
    for piece in layout.pieces:
        out.setdefault(piece.tensor, []).append(piece)
    return out


def _plan_gather(
    slot: TensorSlot,
    spec: TensorSpec,
    held: Sequence[Sequence[Sequence[Sequence[Mapping[str, Sequence[Piece]]]]]],
    holders: Sequence[tuple[int, int]],
) -> TensorGather:
    """By the cell that holds the tensor in every copy; of several, one whose ranks all hold some of it.

    Args:
        held: [kind][copy][cell][rank] -> what it holds, by tensor.
        holders: kinds and cells of the first copies that hold some of the tensor.
    """
    whole, most, possible = volume(spec.box), 0, []
    for kind, number in holders:
        of_copies = [[of_rank.get(slot.name, ()) for of_rank in cells[number]] for cells in held[kind]]
        parts = [_owned(slot.name, of_ranks) for of_ranks in of_copies]
        least = min(sum(map(_elements, of_copy)) for of_copy in parts)
        most = max(most, least)
        if least == whole:
            possible.append(_gather_in(slot, kind, number, of_copies[0], parts[0]))
    if not possible:
        raise WeightSyncError(f"{slot.name}: the tensor-parallel ranks of a stage hold {most} of {whole} elements")
    return next((gather for gather in possible if all(gather.parts)), possible[0])


def _gather_in(
    slot: TensorSlot,
    kind: int,
    cell: int,
    of_ranks: Sequence[Sequence[Piece]],
    parts: tuple[tuple[Piece, ...], ...],
) -> TensorGather:
    each_has_all = all(_elements(pieces) == volume(tuple((0, n) for n in slot.shape)) for pieces in of_ranks)
    kept = tuple(map(tuple, of_ranks)) if each_has_all else parts
    part_bytes = max(map(_elements, kept)) * torch_dtype(slot.dtype).itemsize
    return TensorGather(slot, kind, cell, kept, not each_has_all, part_bytes)


def _owned(tensor: str, of_ranks: Sequence[Sequence[Piece]]) -> tuple[tuple[Piece, ...], ...]:
    """By rank, the pieces that no lower rank holds."""
    taken: list[Box] = []
    owned = []
    for pieces in of_ranks:
        mine = []
        for piece in pieces:
            if piece.box in taken:
                continue
            overlap = next((box for box in taken if intersect(box, piece.box)), None)
            assert overlap is None, f"{tensor}: boxes {overlap} and {piece.box} overlap in part"
            taken.append(piece.box)
            mine.append(piece)
        owned.append(tuple(mine))
    return tuple(owned)


def _elements(pieces: Sequence[Piece]) -> int:
    return sum(volume(piece.box) for piece in pieces)


@dataclass(frozen=True, slots=True)
class _Place:
    """One rank's place in its copy of one kind."""

    cells: Cells
    cell: int
    index: int
    """In the cell."""
    takes_part: bool
    """False: no rank of the copy delivers."""
    within: dist.ProcessGroup | None
    """The cell."""
    across: dist.ProcessGroup | None
    """The ranks at the same index of all cells."""


class GatherHf:
    """The strategy `gather_hf`, or its part of a strategy that moves `only` some tensors whole.

    Made on all ranks together.
    """

    def __init__(self, context: SyncContext, bucket_bytes: int, only: Sequence[str] | None = None) -> None:
        self._is_sender = context.rank in context.senders
        self._plans = plan_replica(context.rank, context, bucket_bytes, only)
        self._places = {
            kind: _find_place(context.rank, context.copies[kind], context.senders)
            for kind in sorted({gather.kind for plan in self._plans for gather in plan.gathers})
        }
        largest = max(plan.num_bytes for plan in self._plans)
        self._buffers = [SharedBuffer(largest) for _ in range(2)] if self._is_sender else []

    @property
    def held_bytes(self) -> int:
        """Memory that stays allocated between pushes."""
        return sum(buffer.num_bytes for buffer in self._buffers)

    def push(self, tensors: Mapping[str, Tensor], outlets: Outlets) -> SyncStats:
        """See `Strategy.push`; a rank whose engine fails takes part to the end, since the others wait for it."""
        ledger = Ledger()
        failures: list[WeightSyncError] = []
        largest = max((g.num_bytes for plan in self._plans for g in plan.gathers if self._takes_part(g)), default=0)
        scratch = torch.empty(largest, dtype=torch.uint8, device=next(iter(tensors.values())).device)
        ledger.allocate(largest + self.held_bytes)
        pending: list[list[Callable[[], None]]] = [[], []]
        for number, plan in enumerate(self._plans):
            which = number % 2
            failures += _failures(pending[which])
            for gather in filter(self._takes_part, plan.gathers):
                packed = self._gather(gather, tensors, scratch, ledger)
                if self._is_sender:
                    _unpack(self._parts(gather), gather.part_bytes, packed, self._buffers[which].view(gather.slot))
            if self._is_sender and not failures:
                bucket = self._buffers[which].describe(plan.slots)
                pending[which] += [sink.load(bucket) for sink in outlets.whole]
                ledger.buckets += 1
                ledger.bytes_delivered += sum(slot.num_bytes for slot in plan.slots) * len(outlets.whole)
        failures += _failures([*pending[0], *pending[1]])
        if failures:
            raise failures[0]
        return ledger.stats()

    def _takes_part(self, gather: TensorGather) -> bool:
        return self._places[gather.kind].takes_part

    def _gather(self, gather: TensorGather, tensors: Mapping[str, Tensor], scratch: Tensor, ledger: Ledger) -> Tensor:
        """uint8 [gather.num_bytes], the packed tensor, in `scratch`."""
        packed, place = scratch[: gather.num_bytes], self._places[gather.kind]
        if place.cell == gather.cell:
            first = place.index * gather.part_bytes if gather.is_gathered else 0
            part = packed[first : first + gather.part_bytes]
            _pack(gather.parts[place.index], tensors, part)
            if gather.is_gathered:
                assert place.within is not None, gather.slot.name
                ledger.all_gather(packed, part, place.within)
        if place.across is not None:
            ledger.broadcast(packed, place.cells[gather.cell][place.index], place.across)
        return packed

    def _parts(self, gather: TensorGather) -> Sequence[Sequence[Piece]]:
        """What lies in the packed tensor."""
        return gather.parts if gather.is_gathered else (gather.parts[self._places[gather.kind].index],)

    def close(self) -> None:
        """Free the shared memory and the process groups."""
        for buffer in self._buffers:
            buffer.close()
        for place in self._places.values():
            free_group(place.within)
            free_group(place.across)


def _find_place(rank: int, copies: Sequence[Cells], senders: Sequence[int]) -> _Place:
    cells = copy_of(rank, copies)
    number = next(i for i, cell in enumerate(cells) if rank in cell)
    within = make_group(rank, [cell for of_copy in copies for cell in of_copy])
    across = make_group(rank, [column for of_copy in copies for column in zip(*of_copy, strict=True)])
    takes_part = any(sender in cell for cell in cells for sender in senders)
    return _Place(cells, number, cells[number].index(rank), takes_part, within, across)


def _failures(waits: list[Callable[[], None]]) -> list[WeightSyncError]:
    """What engines answer to buckets that they were given; none is waited for again."""
    found = []
    for wait in waits:
        try:
            wait()
        except WeightSyncError as error:
            found.append(error)
    waits.clear()
    return found


def _pack(pieces: Sequence[Piece], tensors: Mapping[str, Tensor], part: Tensor) -> None:
    at = 0
    for piece in pieces:
        box = tensors[piece.local][slices(piece.local_box)]
        part[at : at + box.nbytes].view(box.dtype).view(box.shape).copy_(box)
        at += box.nbytes


def _unpack(parts: Sequence[Sequence[Piece]], part_bytes: int, packed: Tensor, whole: Tensor) -> None:
    for number, pieces in enumerate(parts):
        at = number * part_bytes
        for piece in pieces:
            target = whole[slices(piece.box)]
            target.copy_(packed[at : at + target.nbytes].view(target.dtype).view(target.shape))
            at += target.nbytes
