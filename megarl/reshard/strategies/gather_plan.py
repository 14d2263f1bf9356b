"""Plans `gather_hf`: which ranks assemble which full tensors, bucket by bucket."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from megarl.errors import WeightSyncError
from megarl.model_files.weight_index import stored_shape
from megarl.reshard.layout.layout import Box, ShardPiece, TensorSpec, WeightLayout, intersect, volume
from megarl.reshard.layout.micro_dp import ModelReplica
from megarl.reshard.planning.strategy import SyncContext
from megarl.reshard.transfer.bucket import ALIGNMENT, TensorSlot, lay_out, split_into_buckets, torch_dtype

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


def plan_replica(rank: int, context: SyncContext, bucket_bytes: int) -> list[BucketPlan]:
    """Return the plan of the replicas that contain `rank`; raises as `plan_buckets`."""
    held = []
    for replicas in context.model_replicas:
        mine = find_replica(rank, replicas)
        # which tensors are sharded as the other kind is only visible in the other replicas
        others = [replica for replica in replicas if replica != mine] if len(context.model_replicas) > 1 else []
        held.append([_layouts(replica, context.sources) for replica in (mine, *others)])
    return plan_buckets([_distinct(replicas) for replicas in held], bucket_bytes)


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


def plan_buckets(held: Sequence[Sequence[Layouts]], bucket_bytes: int) -> list[BucketPlan]:
    """Plan the gathers of all buckets; all ranks of a replica get the same plan.

    Args:
        held: [kind] -> layouts of the replica to plan for, then those of the replicas that differ from it. For the
            kinds, see `model_replicas`.
        bucket_bytes: a tensor larger than this gets a bucket of its own.

    Raises:
        WeightSyncError: no shard group holds all of a tensor.
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
    tensors = next(iter(layouts.values())).tensors
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
            candidates.append(_make_gather(slot, spec.shape, kind, number, by_replica[0], parts[0]))
    if not candidates:
        raise WeightSyncError(
            f"{slot.name}: the tensor-parallel ranks of a stage hold {max_held} of {num_elements} elements"
        )
    return next((gather for gather in candidates if all(gather.parts)), candidates[0])


def _make_gather(
    slot: TensorSlot,
    shape: tuple[int, ...],
    kind: int,
    shard_group: int,
    of_ranks: Sequence[Sequence[ShardPiece]],
    parts: tuple[tuple[ShardPiece, ...], ...],
) -> TensorGather:
    is_replicated = all(_count_elements(pieces) == volume(tuple((0, n) for n in slot.shape)) for pieces in of_ranks)
    kept = tuple(map(tuple, of_ranks)) if is_replicated else parts
    part_bytes = max(map(_count_elements, kept)) * torch_dtype(slot.dtype).itemsize
    return TensorGather(slot, shape, kind, shard_group, kept, not is_replicated, part_bytes)


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
