"""The trainer rank's side of weight sync: sends this rank's weights to the engines with a resharding strategy."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection

from megarl.megatron.modeling.megatron_model import MegatronModel
from megarl.megatron.requests import RendezvousInfo, SyncSetup
from megarl.placement.rank_grid import RankGrid
from megarl.reshard.layout.layout import WeightLayout
from megarl.reshard.layout.micro_dp import ModelReplica, model_replicas
from megarl.reshard.layout.topology import Topology
from megarl.reshard.planning.disaggregated import TransferRank
from megarl.reshard.planning.strategy import Sinks, Strategy, SyncContext, SyncStats
from megarl.reshard.strategies.make_strategy import make_strategy
from megarl.reshard.transfer.process_groups import TransferGroup, open_store


class WeightSyncWorker:
    """One rank's part of every weight sync; created collectively on all ranks."""

    def __init__(self, model: MegatronModel, setup: SyncSetup) -> None:
        rank, world = dist.get_rank(), dist.get_world_size()
        layouts: list[WeightLayout] = [model.layout] * world
        dist.all_gather_object(layouts, model.layout)
        self._model = model
        self._sinks = setup.sinks.get(rank, Sinks())
        self.rendezvous_info: RendezvousInfo | None = None
        """How engines that receive weights over the network connect to the trainer; on rank 0."""
        self.strategy: Strategy
        if setup.transfer_spec is None:
            replicas = model_replicas(_grid(model.groups, world))
            self.strategy = make_strategy(setup.config, _context(setup, rank, layouts, replicas))
            return
        distinct: dict[WeightLayout, WeightLayout] = {}  # pickled once per distinct layout for the engines
        transfer_spec = replace(
            setup.transfer_spec, sources=[distinct.setdefault(layout, layout) for layout in layouts]
        )
        self.strategy = TransferRank(transfer_spec, rank)
        if rank == 0:
            host = os.environ["MASTER_ADDR"]  # rank 0 runs on this node
            self._store = open_store(host)
            self.rendezvous_info = RendezvousInfo(transfer_spec=transfer_spec, host=host, port=self._store.port)

    def connect(self, transfer_group: TransferGroup) -> None:
        """Connect with the other trainer ranks and the engines' ranks; all ranks connect at the same time.

        Raises:
            WeightSyncError: another rank did not connect in time.
        """
        assert isinstance(self.strategy, TransferRank), "connect needs engines that receive weights over the network"
        self.strategy.connect(transfer_group)

    def sync(self) -> SyncStats:
        """Send the current weights to the engines.

        Returns:
            The statistics of this rank. They are not reduced: a collective would wait for ranks that have failed.
        """
        with torch.no_grad():
            return self.strategy.push(self._model.tensors(), self._sinks)

    def close(self) -> None:
        """Free the buffers and connections of the strategy."""
        self.strategy.close()


def _context(
    setup: SyncSetup, rank: int, layouts: Sequence[WeightLayout], replicas: Sequence[Sequence[ModelReplica]]
) -> SyncContext:
    return SyncContext(
        rank=rank,
        sources=layouts,
        topology=Topology(setup.nodes or (0,) * len(layouts)),
        senders=sorted(rank for rank, sinks in setup.sinks.items() if sinks.full_tensors),
        needs=setup.needs,
        groups=setup.groups,
        full_tensors=setup.full_tensors,
        model_replicas=replicas,
    )


def _grid(groups: ProcessGroupCollection, world: int) -> RankGrid:
    tp, cp, pp = groups.tp.size(), groups.cp.size(), groups.pp.size()
    dp = world // (tp * cp * pp)
    return RankGrid(tp=tp, cp=cp, dp=dp, pp=pp, ep=groups.ep.size(), etp=groups.expt_tp.size())
