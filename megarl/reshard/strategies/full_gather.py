"""`ds_chat` and `hybridflow_v`: every rank puts the whole model together, then keeps what its engine rank needs.

    ds_chat         from all ranks: each owns a part of its shard that no other owns     receives (tpd - 1)/(tpd) of M
    hybridflow_v    from its own training replica, each rank of which owns its shard     receives (tp - 1)/(tp) of M

Both are baselines, HybridFlow's table 2 (arXiv 2409.19256): M is allocated on every rank beside its parameters.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from megarl.reshard.bucket import BoxBucket, map_bucket, torch_dtype
from megarl.reshard.cache import cached_moves, cached_rounds
from megarl.reshard.executor import BoxExecutor
from megarl.reshard.layout import Box, Piece, WeightLayout, extent, slices, volume
from megarl.reshard.plan import Topology, index_sources
from megarl.reshard.strategy import Outlets, SyncContext, SyncStats


def whole_layout(tensors: WeightLayout) -> WeightLayout:
    """Every tensor of the model under its own name."""
    specs = tensors.tensors
    return WeightLayout(specs, tuple(Piece(name, spec.box, name, spec.box) for name, spec in specs.items()))


def model_bytes(layout: WeightLayout) -> int:
    """M: of every tensor of the model once."""
    return sum(volume(spec.box) * torch_dtype(spec.dtype).itemsize for spec in layout.tensors.values())


def owned_parts(sources: Sequence[WeightLayout]) -> list[WeightLayout]:
    """By rank, what it alone owns: a box that n ranks hold is cut by rows into n parts, equal to within a row."""
    owned: dict[int, list[Piece]] = defaultdict(list)
    for tensor, holdings in index_sources(sources).items():
        for holding in holdings:
            holders = sorted(holding.pieces)
            for index, rank in enumerate(holders):
                piece = holding.pieces[rank]
                first, last = _share(piece.box, index, len(holders))
                if first < last:
                    owned[rank].append(
                        Piece(
                            tensor,
                            _rows(piece.box, first, last),
                            piece.local,
                            _rows(piece.local_box, first, last),
                        )
                    )
    return [WeightLayout(layout.tensors, tuple(owned[rank])) for rank, layout in enumerate(sources)]


def _share(box: Box, index: int, parts: int) -> tuple[int, int]:
    rows = box[0][1] - box[0][0]
    return rows * index // parts, rows * (index + 1) // parts


def _rows(box: Box, first: int, last: int) -> Box:
    start = box[0][0]
    return ((start + first, start + last), *box[1:])


class WholeModel:
    """The gathered model: a sink for its boxes."""

    def __init__(self, layout: WeightLayout) -> None:
        self.tensors = {
            name: torch.empty(spec.shape, dtype=torch_dtype(spec.dtype)) for name, spec in layout.tensors.items()
        }

    def load_boxes(self, index: int, bucket: BoxBucket | None) -> Callable[[], None]:
        """See `BoxSink.load_boxes`; done when it returns."""
        data = map_bucket(bucket) if bucket else torch.empty(0)
        for slot in bucket.slots if bucket else ():
            flat = data[slot.offset : slot.offset + slot.num_bytes].view(torch_dtype(slot.dtype))
            self.tensors[slot.local][slices(slot.local_box)] = flat.view(extent(slot.local_box))
        return _nothing


class FullGather:
    """The strategies `ds_chat` and `hybridflow_v`; `context.groups` are the training replicas for the latter."""

    def __init__(self, context: SyncContext, bucket_bytes: int, method: Literal["ds_chat", "hybridflow_v"]) -> None:
        self._rank = rank = context.rank
        self._whole = whole_layout(context.sources[0])
        sources = owned_parts(context.sources) if method == "ds_chat" else context.sources
        everyone = dict.fromkeys(range(len(context.sources)), self._whole)
        gather = cached_moves(sources, everyone, context.topology, context.groups)
        self._gather = cached_rounds(gather, rank, bucket_bytes // 2)
        keep = (
            cached_moves([self._whole], {0: context.needs[rank]}, Topology.single(1)) if rank in context.needs else ()
        )
        self._keep = cached_rounds(keep, 0, bucket_bytes // 2) if keep else []

    def push(self, tensors: Mapping[str, Tensor], outlets: Outlets) -> SyncStats:
        """See `Strategy.push`."""
        gather = BoxExecutor(self._rank, self._gather)
        gather.ledger.allocate(model_bytes(self._whole))
        whole = WholeModel(self._whole)
        gather.run(tensors, whole)
        keep = BoxExecutor(0, self._keep)  # a plan of one rank: all moves are local
        keep.ledger.allocate(model_bytes(self._whole))
        if outlets.boxes is not None:
            keep.run(whole.tensors, outlets.boxes)
        return SyncStats(
            bytes_sent=gather.ledger.bytes_sent,
            bytes_received=gather.ledger.bytes_received,
            bytes_delivered=keep.ledger.bytes_delivered,
            buckets=keep.ledger.buckets,
            peak_extra_bytes=max(gather.ledger.peak_extra_bytes, keep.ledger.peak_extra_bytes),
            messages=gather.ledger.messages,
            collectives=gather.ledger.collectives,
        )

    def close(self) -> None:
        """The model is whole for one push only."""


def _nothing() -> None: ...
