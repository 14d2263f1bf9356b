"""`ds_chat` and `hybridflow_v`: every rank gathers the full model, then keeps what its engine rank needs.

    ds_chat         from all ranks: each owns a distinct part of its shard               receives (tpd - 1)/(tpd) of M
    hybridflow_v    from its own training replica, each rank of which owns its shard     receives (tp - 1)/(tp) of M

Both are baselines from HybridFlow's table 2 (arXiv 2409.19256): the full model, M bytes, is allocated on every rank
in addition to its parameters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

from megarl.reshard.layout.layout import Box, ShardPiece, WeightLayout, volume
from megarl.reshard.layout.topology import Topology
from megarl.reshard.planning.plan_cache import RoundPlan, cached_plan
from megarl.reshard.planning.strategy import Sinks, SyncContext, SyncStats
from megarl.reshard.transfer.bucket import Parameters, torch_dtype
from megarl.reshard.transfer.executor import BoxExecutor
from megarl.reshard.transfer.process_groups import (
    TransportMaker,
    destroy_group,
    make_group,
    make_sync_group,
    make_sync_transport,
    raise_on_all_ranks,
)
from megarl.reshard.transfer.transport import Transport

LAYOUT_CACHE_SIZE = 4
"""Size of the layout caches: the same model gives the same layout object, by which plans are cached."""


@lru_cache(maxsize=LAYOUT_CACHE_SIZE)
def full_layout(tensors: WeightLayout) -> WeightLayout:
    """Return the layout that holds every tensor of the model in full, under its own name."""
    specs = tensors.tensors
    return WeightLayout(specs, tuple(ShardPiece(name, spec.box, name, spec.box) for name, spec in specs.items()))


@lru_cache(maxsize=LAYOUT_CACHE_SIZE)
def model_bytes(layout: WeightLayout) -> int:
    """Return M, the bytes of all tensors of the model."""
    return sum(volume(spec.box) * torch_dtype(spec.dtype).itemsize for spec in layout.tensors.values())


def owned_parts(sources: Sequence[WeightLayout]) -> tuple[WeightLayout, ...]:
    """Return, by rank, the part it owns: a box held by n ranks is split by rows into n parts, equal to within a row."""
    return _owned_parts(tuple(sources))


@lru_cache(maxsize=LAYOUT_CACHE_SIZE)
def _owned_parts(sources: tuple[WeightLayout, ...]) -> tuple[WeightLayout, ...]:
    holders: dict[tuple[str, Box], dict[int, ShardPiece]] = {}
    for rank, layout in enumerate(sources):
        for piece in layout.pieces:
            holders.setdefault((piece.tensor, piece.box), {})[rank] = piece
    owned: list[list[ShardPiece]] = [[] for _ in sources]
    for (tensor, box), pieces in holders.items():
        for index, (rank, piece) in enumerate(pieces.items()):
            first, last = _share(box, index, len(pieces))
            if first < last:
                local = _rows(piece.local_box, first, last)
                owned[rank].append(ShardPiece(tensor, _rows(box, first, last), piece.local, local))
    return tuple(
        WeightLayout(layout.tensors, tuple(owned_pieces)) for layout, owned_pieces in zip(sources, owned, strict=True)
    )


def _share(box: Box, index: int, parts: int) -> tuple[int, int]:
    rows = box[0][1] - box[0][0]
    return rows * index // parts, rows * (index + 1) // parts


def _rows(box: Box, first: int, last: int) -> Box:
    start = box[0][0]
    return ((start + first, start + last), *box[1:])


class FullGather:
    """The strategies `ds_chat` and `hybridflow_v`; for the latter, `context.groups` are the training replicas."""

    def __init__(
        self,
        context: SyncContext,
        bucket_bytes: int,
        method: Literal["ds_chat", "hybridflow_v"],
        timeout_seconds: float | None = None,
        backend: str | TransportMaker | None = None,
    ) -> None:
        """Plan and create process groups; collective over all ranks. The last two are as for `BoxStrategy`."""
        self._rank = context.rank
        self._full_layout = full_layout(context.sources[0])
        with raise_on_all_ranks():
            self._gather_plan, self._local_plan = plan_full_gather(context, bucket_bytes, method)
        self._gather_group = make_group(context.rank, context.groups)
        self._sync_group, self._transport = None, Transport()
        if timeout_seconds is not None:
            self._sync_group = make_sync_group(timeout_seconds)
            self._transport = make_sync_transport(self._sync_group, timeout_seconds, backend)

    def push(self, tensors: Mapping[str, Tensor], sinks: Sinks) -> SyncStats:
        """Gather the full model, then deliver this rank's part, as `Strategy.push`."""
        plan = self._gather_plan
        gather = BoxExecutor(self._rank, plan.rounds, plan.buffer_sizes, self._gather_group, self._transport)
        gather.counter.allocate(model_bytes(self._full_layout))
        specs = self._full_layout.tensors
        device = next((tensor.device for tensor in tensors.values()), torch.device("cpu"))
        full = {
            name: torch.empty(spec.shape, dtype=torch_dtype(spec.dtype), device=device) for name, spec in specs.items()
        }
        gather.run(tensors, Parameters(full))
        stats = gather.counter.stats()
        if self._local_plan is None or sinks.boxes is None:
            return replace(stats, bytes_delivered=0, buckets=0)
        local_part = BoxExecutor(0, self._local_plan.rounds, self._local_plan.buffer_sizes)
        local_part.counter.allocate(model_bytes(self._full_layout))
        local_part.run(full, sinks.boxes)
        delivered = local_part.counter.stats()
        peak = max(stats.peak_extra_bytes, delivered.peak_extra_bytes)
        return replace(
            stats, bytes_delivered=delivered.bytes_delivered, buckets=delivered.buckets, peak_extra_bytes=peak
        )

    def close(self) -> None:
        """Free the process groups; the full model exists only during a push."""
        destroy_group(self._gather_group)
        destroy_group(self._sync_group)


def plan_full_gather(
    context: SyncContext, bucket_bytes: int, method: Literal["ds_chat", "hybridflow_v"]
) -> tuple[RoundPlan, RoundPlan | None]:
    """Return the plan by which `context.rank` gathers the full model, and the plan to extract its part, if any."""
    rank, full = context.rank, full_layout(context.sources[0])
    sources = owned_parts(context.sources) if method == "ds_chat" else context.sources
    everyone = dict.fromkeys(range(len(context.sources)), full)
    gather = cached_plan(sources, everyone, context.topology, rank, bucket_bytes, groups=context.groups, relay=False)
    return gather, plan_local_part(full, context.needs[rank], bucket_bytes) if rank in context.needs else None


def plan_local_part(full: WeightLayout, need: WeightLayout, bucket_bytes: int) -> RoundPlan:
    """Return the plan that copies a rank's part out of the full model; all moves are local."""
    return cached_plan([full], {0: need}, Topology.single(1), 0, bucket_bytes)
