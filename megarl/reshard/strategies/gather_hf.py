"""`gather_hf`: assembles full Hugging Face tensors on every rank of a training replica, as verl and slime do.

    stage 0, which holds tensor a    r0 [a0 a1] <--- all-gather ---> r1 [a0 a1]
                                          |                               |
                                      broadcast                       broadcast
                                          v                               v
    stage 1, which does not          r2 [a0 a1]                      r3 [a0 a1]

All tensors of a bucket are gathered together: first all all-gathers are started, then all broadcasts; over NCCL each
of them are one call. If the parts of a tensor differ in size, they are padded to the largest; a tensor that every rank
of a stage holds needs no all-gather. Routed experts are gathered likewise, over their own shard groups. A sender copies
each tensor into one of two buckets; an engine reads one while the other is filled. Model replicas without a sender stay
idle.

Peak extra memory, whatever the size of the model: the packed tensors of one bucket, with their padding; on senders also
two buckets. On GPUs it is allocated during a push only (`SyncMemory`). Bytes received by a rank: (tp - 1) / tp of what
its own stage holds, for equal parts, and all of what the other stages hold.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.errors import WeightSyncError
from megarl.model_files.weight_index import stored_shape
from megarl.reshard.layout.engine_ranks import ModelReplica
from megarl.reshard.layout.layout import Box, ShardPiece, TensorSpec, WeightLayout, intersect, slices, volume
from megarl.reshard.planning.strategy import Sinks, SyncContext, SyncStats
from megarl.reshard.transfer.bucket import (
    ALIGNMENT,
    Bucket,
    Buffer,
    PrivateBuffer,
    SyncMemory,
    TensorSlot,
    copy_boxes,
    lay_out,
    make_buffer,
    slot_view,
    split_into_buckets,
    torch_dtype,
    views_like,
)
from megarl.reshard.transfer.executor import device_of
from megarl.reshard.transfer.process_groups import destroy_group, make_group, raise_on_all_ranks
from megarl.reshard.transfer.transport import Deadline, InFlight, Transport, abort_group, wait_for

Layouts = Sequence[Sequence[WeightLayout]]
"""Layouts of one model replica, [shard group][rank]."""


@dataclass(frozen=True, slots=True)
class TensorGather:
    """How one tensor is assembled on all ranks of a model replica."""

    slot: TensorSlot
    """Location of the tensor in the bucket, with the shape that it has in files."""
    shape: tuple[int, ...]
    """Its shape in layouts."""
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

    @property
    def aligned_bytes(self) -> int:
        """Bytes that the packed tensor takes in the memory in which a bucket's tensors are gathered."""
        return -(-self.num_bytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True, slots=True)
class BucketPlan:
    """Tensors that are delivered to engines in one bucket."""

    gathers: tuple[TensorGather, ...]
    num_bytes: int

    @property
    def slots(self) -> tuple[TensorSlot, ...]:
        """Slots of all tensors of the bucket."""
        return tuple(gather.slot for gather in self.gathers)

    def packed_bytes(self, kinds: Collection[int]) -> int:
        """Return the bytes of the bucket's packed tensors of these kinds, which are gathered at the same time."""
        return sum(gather.aligned_bytes for gather in self.gathers if gather.kind in kinds)


@dataclass(frozen=True, slots=True)
class Collectives:
    """All-gathers or broadcasts that some ranks start together."""

    kind: int
    is_broadcast: bool
    ranks: tuple[int, ...]
    bytes_from: tuple[int, ...]
    """By rank, the bytes that each of the others receives from it."""
    count: int


def collectives(
    gathers: Sequence[TensorGather], model_replicas: Sequence[Sequence[ModelReplica]], senders: Collection[int]
) -> Iterator[Collectives]:
    """Yield what ranks start to gather some tensors; replicas without a sender start nothing.

    Args:
        model_replicas: see `SyncContext`.
    """
    for kind, replicas in enumerate(model_replicas):
        of_kind = [gather for gather in gathers if gather.kind == kind]
        by_shard_group = [[each for each in of_kind if each.shard_group == i] for i in range(len(replicas[0]))]
        shares = [[each.part_bytes for each in of_group if each.is_gathered] for of_group in by_shard_group]
        full = tuple(sum(each.num_bytes for each in of_group) for of_group in by_shard_group)
        for replica in replicas if of_kind else ():
            if not _has_sender(replica, senders):
                continue
            for ranks, of_group in zip(replica, shares, strict=True):
                yield Collectives(kind, False, ranks, (sum(of_group),) * len(ranks), len(of_group))
            for ranks in zip(*replica, strict=True) if len(replica) > 1 else ():
                yield Collectives(kind, True, ranks, full, len(of_kind))


def _has_sender(replica: ModelReplica, senders: Collection[int]) -> bool:
    return any(rank in senders for shard_group in replica for rank in shard_group)


def plan_replica(rank: int, context: SyncContext, bucket_bytes: int) -> list[BucketPlan]:
    """Return the plan of the replicas that contain `rank`; raises as `plan_buckets`."""
    held = []
    for replicas in context.model_replicas:
        mine = find_replica(rank, replicas)
        # which tensors are sharded as the other kind is only visible in the other replicas
        others = replicas if len(context.model_replicas) > 1 else ()
        distinct: dict[tuple[int, ...], Layouts] = {}
        for replica in (mine, *others):
            layouts = [[context.sources[rank] for rank in shard_group] for shard_group in replica]
            distinct.setdefault(tuple(id(layout) for shard_group in layouts for layout in shard_group), layouts)
        held.append(list(distinct.values()))
    return plan_buckets(held, bucket_bytes)


def find_replica(rank: int, replicas: Sequence[ModelReplica]) -> ModelReplica:
    """Return the replica that contains `rank`."""
    return next(replica for replica in replicas if any(rank in shard_group for shard_group in replica))


def plan_buckets(held: Sequence[Sequence[Layouts]], bucket_bytes: int) -> list[BucketPlan]:
    """Plan the gathers of all buckets; all ranks of a replica get the same plan.

    Args:
        held: [kind] -> layouts of the replica to plan for, then those of the replicas that differ from it. For the
            kinds, see `model_replicas`.
        bucket_bytes: a tensor larger than this gets a bucket of its own.

    Raises:
        WeightSyncError: no shard group holds all of a tensor.
    """
    by_tensor = cache(_by_tensor)
    pieces = [
        [[[by_tensor(layout) for layout in shard_group] for shard_group in replica] for replica in replicas]
        for replicas in held
    ]
    tensors = held[0][0][0][0].tensors
    holders: dict[str, list[tuple[int, int]]] = {}
    for kind, replicas in enumerate(pieces):
        for number, shard_group in enumerate(replicas[0]):
            for name in dict.fromkeys(name for of_rank in shard_group for name in of_rank):
                holders.setdefault(name, []).append((kind, number))
    plans = []
    for names in split_into_buckets(tensors, bucket_bytes):
        slots, num_bytes = lay_out((n, torch_dtype(tensors[n].dtype), stored_shape(n, tensors[n].shape)) for n in names)
        gathers = (_plan_gather(slot, tensors[slot.name], pieces, holders.get(slot.name, ())) for slot in slots)
        plans.append(BucketPlan(tuple(gathers), num_bytes))
    return plans


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
            is_replicated = all(_count_elements(pieces) == num_elements for pieces in by_replica[0])
            kept = tuple(map(tuple, by_replica[0])) if is_replicated else parts[0]
            part_bytes = max(map(_count_elements, kept)) * torch_dtype(slot.dtype).itemsize
            candidates.append(TensorGather(slot, spec.shape, kind, number, kept, not is_replicated, part_bytes))
    if not candidates:
        raise WeightSyncError(
            f"{slot.name}: the tensor-parallel ranks of a stage hold {max_held} of {num_elements} elements"
        )
    return next((gather for gather in candidates if all(gather.parts)), candidates[0])


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
    within: dist.ProcessGroup | None
    """Process group of the shard group."""
    across: dist.ProcessGroup | None
    """Process group of the ranks with the same index in all shard groups."""

    def own_part(self, gather: TensorGather, packed: Tensor) -> Tensor:
        """Return the region of the packed tensor that this rank fills itself."""
        first = self.index * gather.part_bytes if gather.is_gathered else 0
        return packed[first : first + gather.part_bytes]


class GatherHf:
    """The strategy `gather_hf`.

    The constructor is collective over all ranks. After a push that failed because a rank was lost or late, the process
    groups are unusable: create a new strategy.
    """

    def __init__(
        self,
        context: SyncContext,
        bucket_bytes: int,
        timeout_seconds: float,
        make_buffer: Callable[[int, torch.device], Buffer] = make_buffer,
    ) -> None:
        """Plan and create process groups.

        Args:
            timeout_seconds: timeout of a push.
            make_buffer: allocates a bucket of some bytes on a device; engines in this process need no shared memory.
        """
        self._make_buffer, self._memory = make_buffer, SyncMemory()
        self._rank, self._transport = context.rank, Transport(timeout_seconds=timeout_seconds)
        self._is_sender = context.rank in context.senders
        with raise_on_all_ranks():
            self._plans = plan_replica(context.rank, context, bucket_bytes)
        kinds = sorted({gather.kind for plan in self._plans for gather in plan.gathers})
        positions = {kind: _find_position(context.rank, context.model_replicas[kind]) for kind in kinds}
        self._groups = [
            group for each in positions.values() for group in (each.within, each.across) if group is not None
        ]
        self._positions = {kind: each for kind, each in positions.items() if _has_sender(each.replica, context.senders)}
        """By kind, where its replica has a sender."""

    def push(self, tensors: Mapping[str, Tensor], sinks: Sinks) -> SyncStats:
        """Push as `Strategy.push`; a rank whose engine fails still takes part to the end, as the others wait for it."""
        stats, device = SyncStats(), device_of(tensors, None)
        self._transport.stats = stats
        packed_bytes = max((plan.packed_bytes(self._positions) for plan in self._plans), default=0)
        bucket_bytes = max(mmap.PAGESIZE, *(plan.num_bytes for plan in self._plans))
        memory, buffers = self._memory, list[Buffer]()
        with memory.lent():
            if self._is_sender:
                buffers = memory.take("buckets", self._make_buffer, 2, bucket_bytes, device)
            (scratch,) = memory.take("packed tensors", PrivateBuffer, 1, packed_bytes, device)
            stats.peak_extra_bytes = packed_bytes + len(buffers) * bucket_bytes
            self._push_buckets(tensors, sinks, scratch.bytes, buffers)
        return stats

    def _push_buckets(
        self, tensors: Mapping[str, Tensor], sinks: Sinks, scratch: Tensor, buffers: Sequence[Buffer]
    ) -> None:
        """Gather and deliver all buckets, then raise the first failure of an engine."""
        failures: list[WeightSyncError] = []
        stats, deadline = self._transport.stats, Deadline(self._transport.timeout_seconds)
        pending: list[list[Callable[[], None]]] = [[], []]
        for number, plan in enumerate(self._plans):
            which = number % 2
            failures += _collect_failures(pending[which])
            with self._abort_on_failure():
                packed = self._gather(plan, tensors, scratch, deadline)
            if not self._is_sender:
                continue
            for gather, region in packed:
                parts = gather.parts if gather.is_gathered else (gather.parts[self._positions[gather.kind].index],)
                full = slot_view(buffers[which].bytes, gather.slot)
                _unpack(parts, gather.part_bytes, region, full.view(gather.shape))
            if failures:
                continue
            if scratch.is_cuda:
                torch.cuda.current_stream(scratch.device).synchronize()  # the engine reads on another stream
            bucket = Bucket(buffers[which].path, buffers[which].num_bytes, plan.slots)
            pending[which] += [sink.load(bucket) for sink in sinks.full_tensors]
            stats.buckets += 1
            stats.bytes_delivered += sum(slot.num_bytes for slot in plan.slots) * len(sinks.full_tensors)
        failures += _collect_failures([*pending[0], *pending[1]])
        if failures:
            raise failures[0]

    def _gather(
        self, plan: BucketPlan, tensors: Mapping[str, Tensor], scratch: Tensor, deadline: Deadline
    ) -> list[tuple[TensorGather, Tensor]]:
        """Gather the bucket's tensors into `scratch`; return each with its packed bytes, uint8 [gather.num_bytes]."""
        packed, start = list[tuple[TensorGather, Tensor]](), 0
        for gather in plan.gathers:
            if gather.kind in self._positions:
                packed.append((gather, scratch[start : start + gather.num_bytes]))
                start += gather.aligned_bytes
        gathering: list[InFlight] = []
        broadcasting: list[InFlight] = []
        of_kinds = [  # in the same order on all ranks
            (position, [each for each in packed if each[0].kind == kind]) for kind, position in self._positions.items()
        ]
        for position, of_kind in of_kinds:
            own = [each for each in of_kind if each[0].shard_group == position.shard_group]
            for gather, region in own:
                _pack(gather.parts[position.index], tensors, position.own_part(gather, region))
            gathered = [(region, position.own_part(gather, region)) for gather, region in own if gather.is_gathered]
            if gathered:
                assert position.within is not None
                gathering += self._transport.start_all_gathers(gathered, position.within)
        wait_for(gathering, deadline)
        for position, of_kind in of_kinds:
            if position.across is not None:
                roots = [(region, position.replica[gather.shard_group][position.index]) for gather, region in of_kind]
                broadcasting += self._transport.start_broadcasts(roots, position.across)
        wait_for(broadcasting, deadline)
        return packed

    @contextmanager
    def _abort_on_failure(self) -> Iterator[None]:
        """Abort the process groups if a rank was lost or late, so that the others do not wait for this one."""
        try:
            yield
        except WeightSyncError as e:
            for group in self._groups:
                abort_group(group)
            raise type(e)(f"rank {self._rank}: full tensors: {e}") from e

    def close(self) -> None:
        """Free the buffers and process groups."""
        self._transport.close()
        self._memory.close()
        for group in self._groups:
            destroy_group(group)


def _find_position(rank: int, replicas: Sequence[ModelReplica]) -> _ReplicaPosition:
    replica = find_replica(rank, replicas)
    number = next(i for i, shard_group in enumerate(replica) if rank in shard_group)
    within = make_group(rank, [shard_group for shard_groups in replicas for shard_group in shard_groups])
    across = make_group(rank, [column for shard_groups in replicas for column in zip(*shard_groups, strict=True)])
    return _ReplicaPosition(replica, number, replica[number].index(rank), within, across)


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
    boxes = [tensors[piece.local][slices(piece.local_box)] for piece in pieces]
    copy_boxes(views_like(part, 0, boxes), boxes)


def _unpack(parts: Sequence[Sequence[ShardPiece]], part_bytes: int, packed: Tensor, full_tensor: Tensor) -> None:
    for number, pieces in enumerate(parts):
        boxes = [full_tensor[slices(piece.box)] for piece in pieces]
        copy_boxes(boxes, views_like(packed, number * part_bytes, boxes))
