"""`gather_hf`: assembles full Hugging Face tensors on every rank of a training replica, as verl and slime do.

    stage 0, which holds tensor a    r0 [a0 a1] <--- all-gather ---> r1 [a0 a1]
                                          |                               |
                                      broadcast                       broadcast
                                          v                               v
    stage 1, which does not          r2 [a0 a1]                      r3 [a0 a1]

Tensors are gathered one by one. If the parts of a tensor differ in size, they are padded to the largest; a tensor that
every rank of a stage holds needs no all-gather. Routed experts are gathered likewise, over their own shard groups. A
sender copies each tensor into one of two buckets; an engine reads one while the other is filled. Model replicas without
a sender stay idle.

Peak extra memory: two buckets and one padded tensor, whatever the size of the model. Bytes received by a rank:
(tp - 1) / tp of what its own stage holds, for equal parts, and all of what the other stages hold.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.errors import WeightSyncError
from megarl.reshard.layout.layout import Box, ShardPiece, TensorSpec, WeightLayout, intersect, slices, volume
from megarl.reshard.layout.micro_dp import ModelReplica
from megarl.reshard.planning.strategy import Sinks, SyncContext, SyncStats
from megarl.reshard.transfer.bucket import SharedBuffer, TensorSlot, lay_out, split_into_buckets, torch_dtype
from megarl.reshard.transfer.byte_counter import ByteCounter
from megarl.reshard.transfer.process_groups import destroy_group, make_group

Layouts = Sequence[Sequence[WeightLayout]]
"""Layouts of one model replica, [shard group][rank]."""


@dataclass(frozen=True, slots=True)
class TensorGather:
    """How one tensor is assembled on all ranks of a model replica."""

    slot: TensorSlot
    """Location of the tensor in the bucket."""
    kind: int
    """Index into `SyncContext.model_replicas`: dense parameters or routed experts."""
    shard_group: int
    """Index of the shard group, within the replica, that holds the tensor."""
    parts: tuple[tuple[ShardPiece, ...], ...]
    """By rank of the shard group, the pieces it packs, in that order."""
    is_gathered: bool
    """Whether an all-gather is needed; if not, each of `parts` is the full tensor."""
    part_bytes: int
    """Bytes of the largest part, to which the others are padded."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the packed tensor, including padding."""
        return self.part_bytes * (len(self.parts) if self.is_gathered else 1)


@dataclass(frozen=True, slots=True)
class BucketPlan:
    """Tensors that are delivered to engines in one bucket."""

    gathers: tuple[TensorGather, ...]
    num_bytes: int

    @property
    def slots(self) -> tuple[TensorSlot, ...]:
        """Slots of all tensors of the bucket."""
        return tuple(gather.slot for gather in self.gathers)


def plan_replica(
    rank: int, context: SyncContext, bucket_bytes: int, only: Sequence[str] | None = None
) -> list[BucketPlan]:
    """Return the plan of the replicas that contain `rank`, for all or `only` some tensors; raises as `plan_buckets`."""
    held = []
    for replicas in context.model_replicas:
        mine = find_replica(rank, replicas)
        # which tensors are sharded as the other kind is only visible in the other replicas
        others = [replica for replica in replicas if replica != mine] if len(context.model_replicas) > 1 else []
        held.append([_layouts(replica, context.sources) for replica in (mine, *others)])
    return plan_buckets([_distinct(replicas) for replicas in held], bucket_bytes, only)


def _layouts(replica: ModelReplica, sources: Sequence[WeightLayout]) -> Layouts:
    return [[sources[rank] for rank in shard_group] for shard_group in replica]


def _distinct(replicas: Sequence[Layouts]) -> list[Layouts]:
    return list(
        {
            tuple(id(layout) for shard_group in replica for layout in shard_group): replica for replica in replicas
        }.values()
    )


def find_replica(rank: int, replicas: Sequence[ModelReplica]) -> ModelReplica:
    """Return the replica that contains `rank`."""
    return next(replica for replica in replicas if any(rank in shard_group for shard_group in replica))


def plan_buckets(
    held: Sequence[Sequence[Layouts]], bucket_bytes: int, only: Sequence[str] | None = None
) -> list[BucketPlan]:
    """Plan the gathers of all buckets; all ranks of a replica get the same plan.

    Args:
        held: [kind] -> layouts of the replica to plan for, then those of the replicas that differ from it. For the
            kinds, see `model_replicas`.
        bucket_bytes: a tensor larger than this gets a bucket of its own.
        only: names of the tensors to plan for; None: all.

    Raises:
        WeightSyncError: no shard group holds all of a tensor, or the model has no tensor of a name in `only`.
    """
    layouts = {
        id(layout): layout
        for replicas in held
        for replica in replicas
        for shard_group in replica
        for layout in shard_group
    }
    by_tensor = {key: _by_tensor(layout) for key, layout in layouts.items()}
    pieces = [
        [[[by_tensor[id(layout)] for layout in shard_group] for shard_group in replica] for replica in replicas]
        for replicas in held
    ]
    tensors = _select_tensors(next(iter(layouts.values())).tensors, only)
    holders: dict[str, list[tuple[int, int]]] = {}
    for kind, replicas in enumerate(pieces):
        for number, shard_group in enumerate(replicas[0]):
            for name in dict.fromkeys(name for of_rank in shard_group for name in of_rank):
                holders.setdefault(name, []).append((kind, number))
    plans = []
    for names in split_into_buckets(tensors, bucket_bytes):
        slots, num_bytes = lay_out((n, torch_dtype(tensors[n].dtype), tensors[n].shape) for n in names)
        gathers = (_plan_gather(slot, tensors[slot.name], pieces, holders.get(slot.name, ())) for slot in slots)
        plans.append(BucketPlan(tuple(gathers), num_bytes))
    return plans


def _select_tensors(tensors: Mapping[str, TensorSpec], only: Sequence[str] | None) -> Mapping[str, TensorSpec]:
    """Return the specs of the tensors in `only`, in the model's order."""
    if only is None:
        return tensors
    for name in only:
        if name not in tensors:
            raise WeightSyncError(
                f"{name}: the engine needs the full tensor, but the trainer's model has no such tensor"
            )
    chosen = set(only)
    return {name: spec for name, spec in tensors.items() if name in chosen}


def _by_tensor(layout: WeightLayout) -> dict[str, list[ShardPiece]]:
    out: dict[str, list[ShardPiece]] = {}
    for piece in layout.pieces:
        out.setdefault(piece.tensor, []).append(piece)
    return out


def _plan_gather(
    slot: TensorSlot,
    spec: TensorSpec,
    held: Sequence[Sequence[Sequence[Sequence[Mapping[str, Sequence[ShardPiece]]]]]],
    holders: Sequence[tuple[int, int]],
) -> TensorGather:
    """Plan the gather over a shard group that holds the full tensor in every replica.

    Of several such shard groups, prefer one whose ranks all hold some of the tensor.

    Args:
        held: [kind][replica][shard group][rank] -> pieces held, by tensor.
        holders: (kind, shard group) of the first replicas that hold some of the tensor.
    """
    num_elements, max_held, candidates = volume(spec.box), 0, []
    for kind, number in holders:
        by_replica = [[of_rank.get(slot.name, ()) for of_rank in replica[number]] for replica in held[kind]]
        parts = [_drop_duplicates(slot.name, of_ranks) for of_ranks in by_replica]
        min_held = min(sum(map(_count_elements, of_replica)) for of_replica in parts)
        max_held = max(max_held, min_held)
        if min_held == num_elements:
            candidates.append(_make_gather(slot, kind, number, by_replica[0], parts[0]))
    if not candidates:
        raise WeightSyncError(
            f"{slot.name}: the tensor-parallel ranks of a stage hold {max_held} of {num_elements} elements"
        )
    return next((gather for gather in candidates if all(gather.parts)), candidates[0])


def _make_gather(
    slot: TensorSlot,
    kind: int,
    shard_group: int,
    of_ranks: Sequence[Sequence[ShardPiece]],
    parts: tuple[tuple[ShardPiece, ...], ...],
) -> TensorGather:
    is_replicated = all(_count_elements(pieces) == volume(tuple((0, n) for n in slot.shape)) for pieces in of_ranks)
    kept = tuple(map(tuple, of_ranks)) if is_replicated else parts
    part_bytes = max(map(_count_elements, kept)) * torch_dtype(slot.dtype).itemsize
    return TensorGather(slot, kind, shard_group, kept, not is_replicated, part_bytes)


def _drop_duplicates(tensor: str, of_ranks: Sequence[Sequence[ShardPiece]]) -> tuple[tuple[ShardPiece, ...], ...]:
    """Return, by rank, the pieces that no lower rank holds."""
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


def _count_elements(pieces: Sequence[ShardPiece]) -> int:
    return sum(volume(piece.box) for piece in pieces)


@dataclass(frozen=True, slots=True)
class _ReplicaPosition:
    """Position of one rank in its model replica of one kind, with its process groups."""

    replica: ModelReplica
    shard_group: int
    index: int
    """Index of the rank in its shard group."""
    participates: bool
    """Whether any rank of the replica is a sender."""
    within: dist.ProcessGroup | None
    """Process group of the shard group."""
    across: dist.ProcessGroup | None
    """Process group of the ranks with the same index in all shard groups."""


class GatherHf:
    """The strategy `gather_hf`; also used by box strategies for the tensors that engines need in full.

    The constructor is collective over all ranks.
    """

    def __init__(self, context: SyncContext, bucket_bytes: int, only: Sequence[str] | None = None) -> None:
        self._is_sender = context.rank in context.senders
        self._plans = plan_replica(context.rank, context, bucket_bytes, only)
        self._positions = {
            kind: _find_position(context.rank, context.model_replicas[kind], context.senders)
            for kind in sorted({gather.kind for plan in self._plans for gather in plan.gathers})
        }
        largest = max(plan.num_bytes for plan in self._plans)
        self._buffers = [SharedBuffer(largest) for _ in range(2)] if self._is_sender else []

    @property
    def held_bytes(self) -> int:
        """Bytes that stay allocated between pushes."""
        return sum(buffer.num_bytes for buffer in self._buffers)

    def push(self, tensors: Mapping[str, Tensor], sinks: Sinks) -> SyncStats:
        """Push as `Strategy.push`; a rank whose engine fails still takes part to the end, as the others wait for it."""
        counter = ByteCounter()
        failures: list[WeightSyncError] = []
        largest = max((g.num_bytes for plan in self._plans for g in plan.gathers if self._participates(g)), default=0)
        scratch = torch.empty(largest, dtype=torch.uint8, device=next(iter(tensors.values())).device)
        counter.allocate(largest + self.held_bytes)
        pending: list[list[Callable[[], None]]] = [[], []]
        for number, plan in enumerate(self._plans):
            which = number % 2
            failures += _collect_failures(pending[which])
            for gather in filter(self._participates, plan.gathers):
                packed = self._gather(gather, tensors, scratch, counter)
                if self._is_sender:
                    _unpack(
                        self._packed_parts(gather), gather.part_bytes, packed, self._buffers[which].view(gather.slot)
                    )
            if self._is_sender and not failures:
                bucket = self._buffers[which].describe(plan.slots)
                pending[which] += [sink.load(bucket) for sink in sinks.full_tensors]
                counter.buckets += 1
                counter.bytes_delivered += sum(slot.num_bytes for slot in plan.slots) * len(sinks.full_tensors)
        failures += _collect_failures([*pending[0], *pending[1]])
        if failures:
            raise failures[0]
        return counter.stats()

    def _participates(self, gather: TensorGather) -> bool:
        return self._positions[gather.kind].participates

    def _gather(
        self, gather: TensorGather, tensors: Mapping[str, Tensor], scratch: Tensor, counter: ByteCounter
    ) -> Tensor:
        """Gather and broadcast the packed tensor into `scratch`; return uint8 [gather.num_bytes]."""
        packed, position = scratch[: gather.num_bytes], self._positions[gather.kind]
        if position.shard_group == gather.shard_group:
            first = position.index * gather.part_bytes if gather.is_gathered else 0
            part = packed[first : first + gather.part_bytes]
            _pack(gather.parts[position.index], tensors, part)
            if gather.is_gathered:
                assert position.within is not None, gather.slot.name
                counter.all_gather(packed, part, position.within)
        if position.across is not None:
            counter.broadcast(packed, position.replica[gather.shard_group][position.index], position.across)
        return packed

    def _packed_parts(self, gather: TensorGather) -> Sequence[Sequence[ShardPiece]]:
        """Return the parts that the packed tensor consists of."""
        return gather.parts if gather.is_gathered else (gather.parts[self._positions[gather.kind].index],)

    def close(self) -> None:
        """Free the shared memory and the process groups."""
        for buffer in self._buffers:
            buffer.close()
        for position in self._positions.values():
            destroy_group(position.within)
            destroy_group(position.across)


def _find_position(rank: int, replicas: Sequence[ModelReplica], senders: Sequence[int]) -> _ReplicaPosition:
    replica = find_replica(rank, replicas)
    number = next(i for i, shard_group in enumerate(replica) if rank in shard_group)
    within = make_group(rank, [shard_group for shard_groups in replicas for shard_group in shard_groups])
    across = make_group(rank, [column for shard_groups in replicas for column in zip(*shard_groups, strict=True)])
    participates = any(sender in shard_group for shard_group in replica for sender in senders)
    return _ReplicaPosition(replica, number, replica[number].index(rank), participates, within, across)


def _collect_failures(waits: list[Callable[[], None]]) -> list[WeightSyncError]:
    """Wait for the engines' loads, collect their failures, and clear the list of waits."""
    found = []
    for wait in waits:
        try:
            wait()
        except WeightSyncError as error:
            found.append(error)
    waits.clear()
    return found


def _pack(pieces: Sequence[ShardPiece], tensors: Mapping[str, Tensor], part: Tensor) -> None:
    at = 0
    for piece in pieces:
        box = tensors[piece.local][slices(piece.local_box)]
        part[at : at + box.nbytes].view(box.dtype).view(box.shape).copy_(box)
        at += box.nbytes


def _unpack(parts: Sequence[Sequence[ShardPiece]], part_bytes: int, packed: Tensor, full_tensor: Tensor) -> None:
    for number, pieces in enumerate(parts):
        at = number * part_bytes
        for piece in pieces:
            target = full_tensor[slices(piece.box)]
            target.copy_(packed[at : at + target.nbytes].view(target.dtype).view(target.shape))
            at += target.nbytes
