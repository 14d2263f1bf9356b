"""`ds_chat` and `hybridflow_v`: every rank puts the whole model together, then keeps what its engine rank needs.

    ds_chat         from all ranks: each owns a part of its shard that no other owns     receives (tpd - 1)/(tpd) of M
    hybridflow_v    from its own training replica, each rank of which owns its shard     receives (tp - 1)/(tp) of M

Both are baselines, HybridFlow's table 2 (arXiv 2409.19256): M is allocated on every rank beside its parameters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

from megarl.reshard.layout.layout import Box, Piece, WeightLayout, volume
from megarl.reshard.layout.topology import Topology
from megarl.reshard.planning.plan_cache import Planned, cached_plan
from megarl.reshard.planning.strategy import Outlets, SyncContext, SyncStats
from megarl.reshard.transfer.bucket import torch_dtype
from megarl.reshard.transfer.executor import BoxExecutor
from megarl.reshard.transfer.process_groups import free_group, make_group
from megarl.reshard.transfer.sink import Parameters

KEPT_LAYOUTS = 4
"""The same layout object for the same model: plans are kept by layout."""


@lru_cache(maxsize=KEPT_LAYOUTS)
def whole_layout(tensors: WeightLayout) -> WeightLayout:
    """Every tensor of the model under its own name."""
    specs = tensors.tensors
    return WeightLayout(specs, tuple(Piece(name, spec.box, name, spec.box) for name, spec in specs.items()))


@lru_cache(maxsize=KEPT_LAYOUTS)
def model_bytes(layout: WeightLayout) -> int:
    """M: of every tensor of the model once."""
    return sum(volume(spec.box) * torch_dtype(spec.dtype).itemsize for spec in layout.tensors.values())


def owned_parts(sources: Sequence[WeightLayout]) -> tuple[WeightLayout, ...]:
    """By rank, what it alone owns: a box that n ranks hold is cut by rows into n parts, equal to within a row."""
    return _owned_parts(tuple(sources))


@lru_cache(maxsize=KEPT_LAYOUTS)
def _owned_parts(sources: tuple[WeightLayout, ...]) -> tuple[WeightLayout, ...]:
    holders: dict[tuple[str, Box], dict[int, Piece]] = {}
    for rank, layout in enumerate(sources):
        for piece in layout.pieces:
            holders.setdefault((piece.tensor, piece.box), {})[rank] = piece
    owned: list[list[Piece]] = [[] for _ in sources]
    for (tensor, box), pieces in holders.items():
        for index, (rank, piece) in enumerate(pieces.items()):
            first, last = _share(box, index, len(pieces))
            if first < last:
                local = _rows(piece.local_box, first, last)
                owned[rank].append(Piece(tensor, _rows(box, first, last), piece.local, local))
    return tuple(WeightLayout(layout.tensors, tuple(mine)) for layout, mine in zip(sources, owned, strict=True))


def _share(box: Box, index: int, parts: int) -> tuple[int, int]:
    rows = box[0][1] - box[0][0]
    return rows * index // parts, rows * (index + 1) // parts


def _rows(box: Box, first: int, last: int) -> Box:
    start = box[0][0]
    return ((start + first, start + last), *box[1:])


class FullGather:
    """The strategies `ds_chat` and `hybridflow_v`; `context.groups` are the training replicas for the latter."""

    def __init__(self, context: SyncContext, bucket_bytes: int, method: Literal["ds_chat", "hybridflow_v"]) -> None:
        self._rank = context.rank
        self._whole = whole_layout(context.sources[0])
        self._gather, self._keep = plan_full_gather(context, bucket_bytes, method)
        self._group = make_group(context.rank, context.groups)

    def push(self, tensors: Mapping[str, Tensor], outlets: Outlets) -> SyncStats:
        """See `Strategy.push`."""
        gather = BoxExecutor(self._rank, self._gather.rounds, self._gather.memory, self._group)
        gather.ledger.allocate(model_bytes(self._whole))
        specs = self._whole.tensors
        whole = {name: torch.empty(spec.shape, dtype=torch_dtype(spec.dtype)) for name, spec in specs.items()}
        gather.run(tensors, Parameters(whole))
        books = gather.ledger.stats()
        if self._keep is None or outlets.boxes is None:
            return replace(books, bytes_delivered=0, buckets=0)
        keep = BoxExecutor(0, self._keep.rounds, self._keep.memory)
        keep.ledger.allocate(model_bytes(self._whole))
        keep.run(whole, outlets.boxes)
        kept = keep.ledger.stats()
        peak = max(books.peak_extra_bytes, kept.peak_extra_bytes)
        return replace(books, bytes_delivered=kept.bytes_delivered, buckets=kept.buckets, peak_extra_bytes=peak)

    def close(self) -> None:
        """The model is whole for one push only."""
        free_group(self._group)


def plan_full_gather(
    context: SyncContext, bucket_bytes: int, method: Literal["ds_chat", "hybridflow_v"]
) -> tuple[Planned, Planned | None]:
    """How `context.rank` gets the whole model, and what it then keeps."""
    rank, whole = context.rank, whole_layout(context.sources[0])
    sources = owned_parts(context.sources) if method == "ds_chat" else context.sources
    everyone = dict.fromkeys(range(len(context.sources)), whole)
    gather = cached_plan(sources, everyone, context.topology, rank, bucket_bytes, groups=context.groups, relay=False)
    return gather, keep_plan(whole, context.needs[rank], bucket_bytes) if rank in context.needs else None


def keep_plan(whole: WeightLayout, need: WeightLayout, bucket_bytes: int) -> Planned:
    """A rank's own part of the whole model: a plan of one rank, of which every move is local."""
    return cached_plan([whole], {0: need}, Topology.single(1), 0, bucket_bytes)
