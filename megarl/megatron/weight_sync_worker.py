"""The trainer rank's side of weight sync: sends this rank's weights to the engines with a resharding strategy."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from megarl.cluster.placement.rank_grid import RankGrid
from megarl.config.rollout import WeightSyncConfig
from megarl.megatron.hf_export import BlockQuantizer
from megarl.megatron.modeling.megatron_model import MegatronModel
from megarl.megatron.requests import PreparedSync, PushRequest, PushResult, SyncSetup
from megarl.reshard.layout.engine_ranks import ModelReplica, model_replicas
from megarl.reshard.layout.layout import WeightLayout
from megarl.reshard.layout.quantized_layout import cast_dtypes, cast_layout, quantized_tensors
from megarl.reshard.layout.topology import Topology
from megarl.reshard.planning.disaggregated import TransferRank, TransferSpec
from megarl.reshard.planning.strategy import Sinks, Strategy, SyncContext
from megarl.reshard.strategies.box_strategy import BoxStrategy
from megarl.reshard.strategies.gather_hf import GatherHf
from megarl.reshard.transfer.box_channel import BoxSender
from megarl.reshard.transfer.bucket import DiscardSink, ShardSink, torch_dtype
from megarl.reshard.transfer.heartbeat import HeartbeatSpec
from megarl.reshard.transfer.process_groups import TransferGroup, exchange_layouts
from megarl.reshard.transfer.weight_sums import PartSums, PartTable


def make_strategy(config: WeightSyncConfig, context: SyncContext, heartbeat: HeartbeatSpec | None = None) -> Strategy:
    """Create the strategy that `weight_sync.strategy` names; collective over all trainer ranks.

    Args:
        heartbeat: where the ranks leave their heartbeats during a sync; not used by `gather_hf`.
    """
    match config.strategy:
        case "gather_hf":
            return GatherHf(context, config.bucket_bytes, timeout_seconds=config.timeout_seconds)
        case "micro_dp" | "exact":
            return BoxStrategy(context, config.bucket_bytes, config.timeout_seconds, heartbeat=heartbeat)
        case "auto":
            raise AssertionError("auto has to be resolved before, where the sizes of both sides are known")


STALL_LIMITS = 2
"""An engine rank that takes this many times `abort_seconds` to copy a round counts as lost."""


class WeightSyncWorker:
    """One rank's part of every weight sync; created collectively on all ranks."""

    def __init__(self, model: MegatronModel, setup: SyncSetup) -> None:
        rank, world = dist.get_rank(), dist.get_world_size()
        self._model, self._rank = model, rank
        needs = list(setup.needs.values() if setup.transfer_spec is None else setup.transfer_spec.needs)
        quantized, dtypes = quantized_tensors(needs), cast_dtypes(model.layout.tensors, needs)
        held = cast_layout(model.layout, dtypes)
        self._casts = (
            {piece.local: torch_dtype(dtypes[piece.tensor]) for piece in held.pieces if piece.tensor in dtypes}
            if dtypes
            else {}
        )
        """Dtypes of the local tensors that are sent in another one than the model's."""
        self._quantizer = _make_quantizer(model, held, quantized) if quantized else None
        self._layout = held if self._quantizer is None else self._quantizer.layout
        self._engine = setup.engine
        self._parts: PartTable | None = None
        self._ready_seconds = setup.config.timeout_seconds / 2
        """An engine that takes longer to stop generating counts as lost; what is left is for the transfer."""
        layouts = exchange_layouts(self._layout, rank)
        self._transfer_spec: TransferSpec | None = None
        self._sender: BoxSender | None = None
        self.strategy: Strategy
        if setup.transfer_spec is None:
            replicas = model_replicas(_grid(model.groups, world))
            self.strategy = make_strategy(setup.config, _context(setup, rank, layouts, replicas), setup.heartbeat)
            if rank in setup.receivers:
                self._sender = self._offer_boxes(setup.receivers[rank], setup.config.abort_seconds)
            return
        transfer_spec = replace(setup.transfer_spec, sources=layouts)
        self.strategy = TransferRank(transfer_spec, rank)
        if rank == 0:
            self._transfer_spec = transfer_spec

    def connect(self, transfer_group: TransferGroup) -> None:
        """Connect with the other trainer ranks and the engines' ranks; all ranks connect at the same time.

        Raises:
            WeightSyncError: another rank did not connect in time.
        """
        assert isinstance(self.strategy, TransferRank), "connect needs engines that receive weights over the network"
        self.strategy.connect(transfer_group)

    def push(self, request: PushRequest) -> PushResult:
        """Send the current weights to the engines.

        Returns:
            The result of this rank. Statistics are not reduced: a collective would wait for ranks that have failed.
        """
        boxes: ShardSink | None = self._sender
        wait_ready: Callable[[], None] | None = None
        if self._sender is not None and self._rank in request.skipped:
            boxes = DiscardSink()
        elif self._sender is not None:
            self._sender.begin()
            wait_ready = partial(self._sender.wait_ready, self._ready_seconds)
        sinks = Sinks(full_tensors=request.sinks.get(self._rank, ()), boxes=boxes, wait_ready=wait_ready)
        with torch.no_grad():
            if request.delta is None:
                stats = self.strategy.push(self.sent_tensors(), sinks)
            else:
                assert isinstance(self.strategy, BoxStrategy | TransferRank), "gather_hf sends all weights"
                stats = self.strategy.push(self.sent_tensors(), sinks, request.delta)
        if self._quantizer is not None:
            stats = replace(stats, peak_extra_bytes=stats.peak_extra_bytes + self._quantizer.num_bytes)
        failure = self._sender.failure if self._sender is not None and boxes is self._sender else ""
        return PushResult(stats=stats, undelivered=(failure,) if failure else ())

    def sum_weights(self) -> PartSums:
        """Return the sums of what this rank holds of the engines' weights. All ranks take part."""
        if self._parts is None:
            self._parts = PartTable(self._layout, self._engine)
        with torch.no_grad():
            return self._parts.sum(self.sent_tensors())

    @property
    def prepared(self) -> PreparedSync:
        """What this rank adds to what the engines prepare from: the transfer spec on rank 0, or its own offer."""
        offers = {} if self._sender is None else {self._rank: self._sender.offer}
        return PreparedSync(transfer_spec=self._transfer_spec, offers=offers)

    def close(self) -> None:
        """Free the buffers and connections."""
        if self._sender is not None:
            self._sender.close()
        self.strategy.close()

    def sent_tensors(self) -> Mapping[str, Tensor]:
        """Return the tensors that `_layout` names; those that engines need in another dtype are converted now."""
        held = self._model.tensors()
        held |= {local: held[local].to(dtype) for local, dtype in self._casts.items()}
        return held if self._quantizer is None else self._quantizer.quantize(held)

    def _offer_boxes(self, receiver: str, abort_seconds: float) -> BoxSender:
        strategy = self.strategy
        assert isinstance(strategy, BoxStrategy), f"{type(strategy).__name__} delivers no boxes"
        name, rounds = f"trainer rank {self._rank}", [each.slots for each in strategy.rounds]
        # shorter than the time after which the ranks that wait are reported as stuck
        stall_seconds = STALL_LIMITS * abort_seconds
        return BoxSender(name, receiver, rounds, stall_seconds, strategy.raise_if_aborted)


def _context(
    setup: SyncSetup, rank: int, layouts: Sequence[WeightLayout], replicas: Sequence[Sequence[ModelReplica]]
) -> SyncContext:
    return SyncContext(
        rank=rank,
        sources=layouts,
        topology=Topology(setup.nodes or (0,) * len(layouts)),
        senders=setup.senders,
        needs=setup.needs,
        groups=setup.groups,
        model_replicas=replicas,
    )


def _make_quantizer(model: MegatronModel, layout: WeightLayout, names: Collection[str]) -> BlockQuantizer:
    groups = model.groups

    def group_number(local: str) -> int:
        return 0 if model.architecture.parameter_map(local).expert is None else 1

    return BlockQuantizer(layout, names, (groups.tp, groups.expt_tp), group_number)


def _grid(groups: ProcessGroupCollection, world: int) -> RankGrid:
    tp, cp, pp = groups.tp.size(), groups.cp.size(), groups.pp.size()
    dp = world // (tp * cp * pp)
    return RankGrid(tp=tp, cp=cp, dp=dp, pp=pp, ep=groups.ep.size(), etp=groups.expt_tp.size())
