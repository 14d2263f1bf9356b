"""`ds_chat` and `hybridflow_v`: every rank gathers the full model, then keeps what its engine rank needs.

    ds_chat         from all ranks: each owns a distinct part of its shard               receives (tpd - 1)/(tpd) of M
    hybridflow_v    from its own training replica, each rank of which owns its shard     receives (tp - 1)/(tp) of M

Both are baselines from HybridFlow's table 2 (arXiv 2409.19256): the full model, M bytes, is allocated on every rank
in addition to its parameters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from megarl.cluster.placement.rank_grid import RankGrid
from megarl.reshard.analysis.forecast import Forecast, forecast
from megarl.reshard.analysis.scenario import Arrangement, Scenario, arrange, sync_context
from megarl.reshard.layout.engine_ranks import model_replicas
from megarl.reshard.layout.layout import Box, ShardPiece, WeightLayout
from megarl.reshard.layout.topology import Topology
from megarl.reshard.planning.plan_cache import RoundPlan
from megarl.reshard.planning.strategy import Sinks, SyncStats
from megarl.reshard.strategies.box_strategy import BoxStrategy, plan_boxes
from megarl.reshard.transfer.bucket import Parameters, PrivateBuffer, SyncMemory, lay_out, slot_view, torch_dtype
from megarl.reshard.transfer.executor import BoxExecutor
from megarl.reshard.transfer.process_groups import TransportMaker

FULL_GATHERS = ("ds_chat", "hybridflow_v")


class FullGather:
    """One of `FULL_GATHERS` on a scenario: a sync of the full model to every rank, then a copy of a part of it."""

    def __init__(self, name: str, scenario: Scenario) -> None:
        tensors, one_node = scenario.sources[0].tensors, Topology.single(len(scenario.sources))
        self.full = WeightLayout(tensors, tuple(ShardPiece(name, s.box, name, s.box) for name, s in tensors.items()))
        self.arrangement = replace(arrange("gather_hf", scenario), strategy=name)
        sources = owned_parts(scenario.sources) if name == "ds_chat" else scenario.sources
        groups = replica_groups(scenario.grid) if name == "hybridflow_v" else ()
        self.gather_scenario = replace(scenario, sources=sources, topology=one_node)  # no node fetches a box once
        self.gather = _boxes(dict.fromkeys(range(len(sources)), self.full), groups)

    def forecast(self) -> Forecast:
        """Predict the statistics of every rank."""
        gathered = forecast(self.gather, self.gather_scenario)
        parts = {
            id(need): forecast(*self.copy_of_part(need)).stats[0]
            for need in {id(need): need for need in self.arrangement.needs.values()}.values()
        }
        of_rank = {rank: parts[id(need)] for rank, need in self.arrangement.needs.items()}
        stats = tuple(self.join(stats, of_rank.get(rank)) for rank, stats in enumerate(gathered.stats))
        return replace(gathered, stats=stats)

    def copy_of_part(self, need: WeightLayout) -> tuple[Arrangement, Scenario]:
        """Return the sync of one rank with itself that copies what its engine rank needs out of the full model."""
        alone = replace(self.gather_scenario, sources=(self.full,), topology=Topology.single(1))
        return _boxes({0: need}), alone

    def join(self, gathered: SyncStats, copied: SyncStats | None) -> SyncStats:
        """Return the statistics of both, the second of which happens on ranks that serve an engine rank."""
        copied = copied or SyncStats(bytes_sent=0, bytes_received=0, bytes_delivered=0, buckets=0, peak_extra_bytes=0)
        peak = self.full.tensors.num_bytes + max(gathered.peak_extra_bytes, copied.peak_extra_bytes)
        delivered = copied.bytes_delivered
        return replace(gathered, bytes_delivered=delivered, buckets=copied.buckets, peak_extra_bytes=peak)


def _boxes(needs: Mapping[int, WeightLayout], groups: Sequence[tuple[int, ...]] = ()) -> Arrangement:
    return Arrangement(strategy="exact", needs=dict(needs), groups=tuple(groups))


class FullGatherStrategy:
    """The `Strategy` of one rank. In host memory, the full model is kept from push to push, as buckets are."""

    def __init__(
        self,
        case: FullGather,
        rank: int,
        *,
        timeout_seconds: float,
        make_transport: TransportMaker | None = None,
    ) -> None:
        """Plan and connect; collective over all ranks. The last two are as for `BoxStrategy`."""
        self._case, need = case, case.arrangement.needs.get(rank)
        context = sync_context(case.gather, case.gather_scenario, rank)
        self._gather = BoxStrategy(context, case.gather_scenario.bucket_bytes, timeout_seconds, make_transport)
        self._model_memory, self._bucket_memory = SyncMemory(), SyncMemory()
        self._copy: RoundPlan | None = None
        if need is not None:
            arrangement, alone = case.copy_of_part(need)
            self._copy = plan_boxes(sync_context(arrangement, alone, 0), alone.bucket_bytes)

    def push(self, tensors: Mapping[str, Tensor], sinks: Sinks) -> SyncStats:
        """Gather the full model, then deliver this rank's part, as `Strategy.push`."""
        device = next((tensor.device for tensor in tensors.values()), torch.device("cpu"))
        specs = self._case.full.tensors.items()
        slots, num_bytes = lay_out((name, torch_dtype(spec.dtype), spec.shape) for name, spec in specs)
        with self._model_memory.lent():
            (model,) = self._model_memory.take("full model", PrivateBuffer, 1, num_bytes, device)
            full = {slot.name: slot_view(model.bytes, slot) for slot in slots}
            gathered, copied = self._gather.push(tensors, Sinks(boxes=Parameters(full))), None
            if self._copy is not None and sinks.boxes is not None:
                sizes = self._copy.buffer_sizes
                executor = BoxExecutor(0, self._copy.rounds, sizes, memory=self._bucket_memory)
                executor.run(full, sinks.boxes)
                copied = executor.transport.stats
        return self._case.join(gathered, copied)

    def close(self) -> None:
        """Free the memory and process groups."""
        self._model_memory.close()
        self._bucket_memory.close()
        self._gather.close()


def replica_groups(grid: RankGrid) -> list[tuple[int, ...]]:
    """Return the ranks of each training replica: all tensor ranks of all its stages."""
    return [tuple(rank for shard_group in replica for rank in shard_group) for replica in model_replicas(grid)[0]]


def owned_parts(sources: Sequence[WeightLayout]) -> tuple[WeightLayout, ...]:
    """Return, by rank, the part it owns: a box held by n ranks is split by rows into n parts, equal to within a row."""
    holders: dict[tuple[str, Box], dict[int, ShardPiece]] = {}
    for rank, layout in enumerate(sources):
        for piece in layout.pieces:
            holders.setdefault((piece.tensor, piece.box), {})[rank] = piece
    owned: list[list[ShardPiece]] = [[] for _ in sources]
    for (tensor, box), pieces in holders.items():
        num_rows = box[0][1] - box[0][0]
        for index, (rank, piece) in enumerate(pieces.items()):
            first, last = num_rows * index // len(pieces), num_rows * (index + 1) // len(pieces)
            if first < last:
                local = _rows(piece.local_box, first, last)
                owned[rank].append(ShardPiece(tensor, _rows(box, first, last), piece.local, local))
    return tuple(WeightLayout(layout.tensors, tuple(parts)) for layout, parts in zip(sources, owned, strict=True))


def _rows(box: Box, first: int, last: int) -> Box:
    start = box[0][0]
    return ((start + first, start + last), *box[1:])
